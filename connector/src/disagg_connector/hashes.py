"""Fingerprints and block hash chains: what makes KV of two engines the same thing.

Pure. A block hash (32 bytes, SHA-256) covers its block's tokens and, through its parent, the whole
prefix, and vLLM puts cache salts, LoRA names and multimodal inputs into it. Equal hash and equal
fingerprint therefore mean equal KV.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import msgspec


class Fingerprint(msgspec.Struct, frozen=True, kw_only=True):
    """All that two engines must agree on before one may use KV that the other computed."""

    model: str
    revision: str
    weights: str
    """Digest of samples of the weights' files (`checkpoint`): two folders may share a name."""
    generation: str = ""
    """Which weights, of those that the engine has had since boot (`epochs.Standing.generation`)."""
    dtype: str
    kv_dtype: str
    kv_scales: str
    """Digest of the scales in the checkpoint by which KV is quantized."""
    quantization: str
    rope: str
    """How positions get into the keys. How long a prompt may be is no part of it."""
    draft: str
    """The model that drafts, whose KV lies in the same blocks."""
    block_size: int
    hash_algorithm: str
    none_hash: str
    """The parent of every first block, hex: differs when PYTHONHASHSEED does."""
    kv_layout: str
    vllm: str
    connector: str
    wire: int

    def parts(self) -> dict[str, str]:
        """Field names and values, as text."""
        return {name: str(getattr(self, name)) for name in self.__struct_fields__}

    def digest(self) -> str:
        """Hex, 32 characters."""
        return hashlib.sha256(msgspec.json.encode(self.parts())).hexdigest()[:32]


def differences(mine: dict[str, str], theirs: dict[str, str]) -> str:
    """Which parts of two fingerprints differ, for a person to read."""
    names = [name for name in sorted(mine.keys() | theirs.keys()) if mine.get(name) != theirs.get(name)]
    return ", ".join(f"{name}: {mine.get(name)!r} here, {theirs.get(name)!r} there" for name in names)


def first_missing(chain: Sequence[bytes], is_held: Callable[[bytes], bool], start: int = 0) -> int:
    """Index of the first block from `start` on that is not held; the chain's length if all are."""
    for index in range(start, len(chain)):
        if not is_held(chain[index]):
            return index
    return len(chain)


def full_blocks(num_tokens: int, block_size: int) -> int:
    """How many whole blocks a number of tokens fills."""
    return num_tokens // block_size


def written_blocks(num_valid_tokens: int, num_tokens: int, block_size: int) -> int:
    """How many blocks of a request are full and computed, given its tokens of steps that are over and all of them.

    The last token has been sampled, but its KV is never computed while it is the last.
    """
    return full_blocks(min(num_valid_tokens, num_tokens - 1), block_size)


def blocks_for(num_tokens: int, block_size: int) -> int:
    """How many blocks it takes to hold a number of tokens."""
    return -(-num_tokens // block_size)
