"""What the files of a model say about its KV: which weights they hold, and by which scales KV is quantized.

Reads files, nothing else. A checkpoint of hundreds of gigabytes cannot be read whole at every start, so of each
file its size, its header and evenly spaced samples are taken.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

logger = logging.getLogger(__name__)

SAMPLES = 64
SAMPLE_BYTES = 64 * 1024
WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
# Names of tensors by which vLLM scales a quantized KV cache.
SCALES = ("k_scale", "v_scale", "kv_scale", "k_proj.output_scale", "v_proj.output_scale")
# A safetensors file begins with the length of its JSON header, which is never near this.
LONGEST_HEADER = 100 * 1024 * 1024


@dataclass(frozen=True)
class Checkpoint:
    """Digests, hex of 32 characters; empty where there is nothing to digest."""

    weights: str = ""
    kv_scales: str = ""


def read_checkpoint(folder: Path) -> Checkpoint:
    """Look at the weights files in a folder. One that cannot be read is equal to no other."""
    weights, scales = hashlib.sha256(), hashlib.sha256()
    files = sorted({path for pattern in WEIGHTS for path in folder.glob(pattern)})
    has_scales = False
    for path in files:
        try:
            _sample(path, weights)
            for name, value in _kv_scales(path):
                has_scales = True
                scales.update(f"{name}:".encode() + value)
        except ValueError as error:
            logger.warning("No KV scales are known of %s: %s", path, error)
        except OSError as error:
            logger.warning("The weights file %s cannot be read, no KV is exchanged: %s", path, error)
            weights.update(os.urandom(32))
    return Checkpoint(
        weights.hexdigest()[:32] if files else "", scales.hexdigest()[:32] if has_scales else ""
    )


def sample_offsets(size: int) -> list[int]:
    """Where samples begin in a file of `size` bytes: evenly spaced, the file's beginning and end among them."""
    if size <= SAMPLES * SAMPLE_BYTES:
        return list(range(0, size, SAMPLE_BYTES))
    last = size - SAMPLE_BYTES
    return [last * index // (SAMPLES - 1) for index in range(SAMPLES)]


def _sample(path: Path, digest: hashlib._Hash) -> None:
    size = path.stat().st_size
    digest.update(f"{path.name}:{size}:".encode())
    with path.open("rb") as file:
        for offset in sample_offsets(size):
            file.seek(offset)
            digest.update(file.read(SAMPLE_BYTES))


def _kv_scales(path: Path) -> Iterator[tuple[str, bytes]]:
    """Tensors of KV scales in a safetensors file: name, and type and content as they are stored."""
    if path.suffix != ".safetensors":
        return
    with path.open("rb") as file:
        header, start = _header(file)
        for name in sorted(header):
            entry = header[name]
            if name.endswith(SCALES) and isinstance(entry, dict):
                first, end = entry["data_offsets"]
                file.seek(start + first)
                yield name, str(entry["dtype"]).encode() + file.read(end - first)


def _header(file: BinaryIO) -> tuple[dict[str, object], int]:
    """A safetensors file's header, and where its data begins."""
    length = int.from_bytes(file.read(8), "little")
    if not 0 < length <= LONGEST_HEADER:
        raise ValueError(f"not a safetensors file: a header of {length} bytes")
    header = json.loads(file.read(length))
    if not isinstance(header, dict):
        raise ValueError("not a safetensors file: its header is no object")
    return header, 8 + length
