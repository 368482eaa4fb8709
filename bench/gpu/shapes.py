"""Model folders without weights: a config of a known shape and a tokenizer of bytes. Engines load them as dummies.

Prompts go in as token ids and come out as token ids, so the tokenizer only has to exist.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VOCABULARY = 151_936
FIRST_WORD = 2
"""The token id of a tokenizer's first word; those before are special."""


@dataclass(frozen=True)
class Shape:
    """A Qwen3 as its makers published it, but for the weights."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int = 128

    @property
    def kv_bytes_per_token(self) -> int:
        """In bfloat16, K and V of all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * 2

    def config(self) -> dict[str, Any]:
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "attention_bias": False,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "dtype": "bfloat16",
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "max_position_embeddings": 40_960,
            "num_attention_heads": self.heads,
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.kv_heads,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1_000_000,
            "tie_word_embeddings": False,
            "vocab_size": VOCABULARY,
        }


SHAPES = {
    "qwen3-32b": Shape(layers=64, hidden=5120, intermediate=25_600, heads=64, kv_heads=8),
    "qwen3-0.6b": Shape(layers=28, hidden=1024, intermediate=3072, heads=16, kv_heads=8),
}


def write_model(name: str, folder: Path) -> Path:
    """The folder of a model of the shape `name`."""
    target = folder / name
    target.mkdir(parents=True, exist_ok=True)
    (target / "config.json").write_text(json.dumps(SHAPES[name].config(), indent=1))
    words = [f"<{byte}>" for byte in range(256)]
    write_tokenizer(target, words, {"type": "BPE", "merges": [], "fuse_unk": True})
    return target


def write_tokenizer(
    folder: Path,
    words: Sequence[str],
    model: Mapping[str, Any],
    split: Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> None:
    """Write one whose tokens are `words`, from id FIRST_WORD on; `model` without its vocabulary, `settings` beside the usual."""
    special = [
        {"id": number, "content": text, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        for text, number in (("<s>", 0), ("</s>", 1))
    ]  # fmt: skip
    vocabulary = {"<s>": 0, "</s>": 1} | {word: FIRST_WORD + number for number, word in enumerate(words)}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
        "normalizer": None,
        "pre_tokenizer": split,
        "post_processor": None,
        "decoder": {"type": "Fuse"},
        "model": {**model, "vocab": vocabulary, "unk_token": "<s>"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    common = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<s>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps({**common, **(settings or {})}))
