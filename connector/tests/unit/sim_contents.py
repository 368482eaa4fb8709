"""What simulated engines compute: a block's content is a digest of the tokens whose KV it holds and of the weights it
was computed with, so wrong text shows as a wrong digest."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence

BLOCK = 4


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


# The simulations ask for the same prompts again and again.
@functools.lru_cache(maxsize=65536)
def digest(parent: bytes, tokens: tuple[int, ...]) -> bytes:
    return hashlib.sha256(parent + repr(tokens).encode()).digest()


def chain(tokens: Sequence[int]) -> list[bytes]:
    """Content of the blocks that hold these tokens, the last one perhaps partial."""
    parent, contents, held = b"", [], tuple(tokens)
    for start in range(0, len(held), BLOCK):
        parent = digest(parent, held[start : start + BLOCK])
        contents.append(parent)
    return contents


def kv(tokens: Sequence[int], weights: int) -> list[bytes]:
    """Content of the blocks that hold these tokens, computed with these weights. With the first ones a full
    block's content is its hash."""
    hashes = chain(tokens)
    return [hashlib.sha256(h + b"%d" % weights).digest() for h in hashes] if weights else hashes


def next_token(tokens: Sequence[int]) -> int:
    """What the model says after these tokens, whatever its weights."""
    return (sum(tokens) * 31 + len(tokens)) % 50


def answer(prompt: Sequence[int], count: int) -> list[int]:
    """The first tokens that are generated for a prompt."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class ViolationError(AssertionError):
    """Something that must never happen."""
