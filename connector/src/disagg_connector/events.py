"""KV events of blocks that decode brought, so that whoever follows prefill's events knows what it holds.

Pure. vLLM tells of the blocks that it caches itself (``--kv-events-config``), with their tokens; of a block that
was written by a peer it has none. Decode sends them with its offers to an engine that publishes events, and they
are told only where a block's hash proves them.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from collections.abc import Set as AbstractSet

from disagg_connector.ports import Pool
from disagg_connector.protocol import MAX_TOKENS_BYTES

BYTES_PER_TOKEN = 4


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Token ids as `Offer.tokens`; empty if they cannot be sent, which costs the events and nothing else."""
    if len(tokens) * BYTES_PER_TOKEN > MAX_TOKENS_BYTES:
        return b""
    try:
        return struct.pack(f"<{len(tokens)}I", *tokens)
    except struct.error:
        return b""


def unpack_tokens(data: bytes) -> tuple[int, ...]:
    """The token ids of `pack_tokens`; what is left of an incomplete one is ignored."""
    count = len(data) // BYTES_PER_TOKEN
    return struct.unpack(f"<{count}I", data[: count * BYTES_PER_TOKEN])


def tell_stored(
    pool: Pool,
    hashes: Sequence[bytes],
    inserted: AbstractSet[bytes],
    tokens: Sequence[int],
    block_size: int,
) -> None:
    """Tell of the `inserted` blocks of a chain, one event for each run of them.

    `tokens` are those of the last blocks of `hashes`; a block whose tokens are not among them is not told of.
    """
    first = len(hashes) - len(tokens) // block_size
    offset = len(tokens) % block_size
    start: int | None = None
    for index in range(max(first, 0), len(hashes) + 1):
        if index < len(hashes) and hashes[index] in inserted:
            start = index if start is None else start
        elif start is not None:
            parent = hashes[start - 1] if start else None
            begin = offset + (start - first) * block_size
            run = tokens[begin : begin + (index - start) * block_size]
            pool.tell_stored(parent, hashes[start:index], run)
            start = None
