"""A LoRA adapter with random weights for the tiny model, written without torch."""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path

RANK, HIDDEN = 4, 64
# Output sizes of the projections that it changes, in each of the two layers.
TARGETS = {"q_proj": 128, "v_proj": 64}
LAYERS = 2


def write_adapter(folder: Path, seed: int = 1) -> Path:
    """Fill `folder` as PEFT would, with weights large enough to change every answer."""
    drawn = random.Random(seed)
    tensors: dict[str, tuple[int, int]] = {}
    for layer in range(LAYERS):
        for target, size in TARGETS.items():
            name = f"base_model.model.model.layers.{layer}.self_attn.{target}"
            tensors[f"{name}.lora_A.weight"] = (RANK, HIDDEN)
            tensors[f"{name}.lora_B.weight"] = (size, RANK)
    header, data = {}, b""
    for name, (rows, columns) in tensors.items():
        values = [drawn.gauss(0, 1) for _ in range(rows * columns)]
        start, data = len(data), data + struct.pack(f"<{len(values)}f", *values)
        header[name] = {"dtype": "F32", "shape": [rows, columns], "data_offsets": [start, len(data)]}
    encoded = json.dumps(header).encode()
    folder.mkdir()
    (folder / "adapter_model.safetensors").write_bytes(struct.pack("<Q", len(encoded)) + encoded + data)
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": 2 * RANK,
        "target_modules": list(TARGETS),
        "bias": "none",
        "base_model_name_or_path": "",
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder
