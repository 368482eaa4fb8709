"""Write a tiny Qwen3 with random float32 weights, the same on every run. Run by the engine bundle's interpreter.

It is for comparing engines bit by bit, so it is made to vary and to round-trip. With the usual initial weights every
prompt ends in the same repeated token and equality proves nothing; here every layer's output is as large as its input
and attention is sharp, so that each token depends on the whole context. Every token but the special ones is one
printable ASCII character: an answer sent back as text becomes the very tokens that were generated. Special tokens are
never the likeliest, so that a greedy answer has exactly `max_tokens` tokens.
"""

import json
import math
import string
import sys
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import Qwen3Config, Qwen3ForCausalLM

SEED = 20240607
SPECIAL = ("<unk>", "<|im_start|>", "<|im_end|>")
CHARACTERS = "\n" + string.digits + string.ascii_letters + string.punctuation + " "
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tokenizer(folder: Path) -> None:
    """One token a character; nothing is merged, so text and tokens map one to one."""
    vocabulary = {token: index for index, token in enumerate((*SPECIAL, *CHARACTERS))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "<unk>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|im_end|>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 2048,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))


def write_model(folder: Path, kv_heads: int) -> None:
    """2 layers, 4 query heads and KV heads of 32: 512 bytes of KV a token and KV head; tensor parallel sizes 1 and 2."""
    torch.manual_seed(SEED)
    config = Qwen3Config(
        vocab_size=len(SPECIAL) + len(CHARACTERS),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        eos_token_id=SPECIAL.index("<|im_end|>"),
        dtype="float32",
    )
    model = Qwen3ForCausalLM(config).to(torch.float32)
    with torch.no_grad():
        for name, weights in model.model.layers.named_parameters():
            if weights.ndim == 2:
                weights.normal_(mean=0.0, std=2 / math.sqrt(weights.shape[1]))
            elif name.endswith(("q_norm.weight", "k_norm.weight")):
                weights.fill_(2.0)
        model.lm_head.weight.normal_(mean=0.0, std=1.0)
        model.model.embed_tokens.weight.normal_(mean=0.0, std=1.0)
        model.lm_head.weight[: len(SPECIAL)] = 0
    model.save_pretrained(folder)


if __name__ == "__main__":
    target = Path(sys.argv[1])
    write_tokenizer(target)
    write_model(target, int(sys.argv[2]) if len(sys.argv) > 2 else 2)
