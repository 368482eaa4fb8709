"""Which tensor parallel rank writes what into which, between engines of equal or unequal size.

Pure. Every block of a rank holds the KV heads of that rank, one after another. vLLM gives each rank
`heads // ranks` of the model's KV heads; with more ranks than heads, several ranks in a row hold the same
one. Multi-head latent attention is the case of one head: its latent is whole on every rank.

The rule, both ways: an owner's rank must get each of its heads exactly once, from the first rank that has
it among those that face it (upstream's pairing, `TransferTopology.handshake_target_ranks`). A rank that
holds only what another one already writes has nothing to do.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

# More ranks than any engine has; bounds what a peer can make us compute.
MAX_RANKS = 1024


def objection(ranks: int, other: int, heads: int) -> str:
    """Why engines of these tensor parallel sizes cannot exchange KV; empty if they can.

    `heads` are the model's KV heads, 1 for MLA.
    """
    small, large = sorted((ranks, other))
    if small < 1 or large > MAX_RANKS or large % small:
        return f"tensor parallel sizes {ranks} and {other}: one must be a multiple of the other"
    for size in (ranks, other):
        if heads % size and size % heads:
            return f"tensor parallel size {size} does not divide {heads} KV heads, nor they it"
    return ""


def heads_of(rank: int, ranks: int, heads: int) -> range:
    """The KV heads, of `heads` in the model, that a rank of `ranks` holds."""
    count = max(1, heads // ranks)
    first = rank * heads // ranks
    return range(first, first + count)


@dataclass(frozen=True)
class Piece:
    """What one rank writes into one other, of every block: `heads` heads in a row."""

    writer: int
    owner: int
    source: int
    """The first of them, counted in the writer's block."""
    target: int
    """The first of them, counted in the owner's block."""
    heads: int


@lru_cache(maxsize=256)
def pieces(writers: int, owners: int, heads: int) -> tuple[Piece, ...]:
    """All that the ranks of one engine write into the ranks of another.

    `writers` and `owners` are the tensor parallel sizes, `heads` the model's KV heads (1 for MLA). Raises
    `ValueError` for sizes to which there is an `objection`.
    """
    why = objection(writers, owners, heads)
    if why:
        raise ValueError(why)
    found = []
    for owner in range(owners):
        wanted = heads_of(owner, owners, heads)
        missing = set(wanted)
        for writer in _facing(owner, writers, owners):
            held = heads_of(writer, writers, heads)
            mine = [head for head in held if head in missing]
            if mine:
                missing.difference_update(mine)
                found.append(Piece(writer, owner, mine[0] - held.start, mine[0] - wanted.start, len(mine)))
    return tuple(found)


def _facing(owner: int, writers: int, owners: int) -> range:
    """The writing ranks that have to do with an owner's rank."""
    if writers >= owners:
        ratio = writers // owners
        return range(owner * ratio, (owner + 1) * ratio)
    writer = owner // (owners // writers)
    return range(writer, writer + 1)


@dataclass(frozen=True)
class Sharding:
    """How an engine's KV cache is spread over its ranks."""

    ranks: int
    heads: int
    """KV heads of the model; 1 for multi-head latent attention."""
    sliceable: bool = True
    """Whether the heads of a block lie one after another, so that some of them can be written alone."""

    def objection(self, other: int) -> str:
        """Why no KV can be exchanged with an engine of `other` ranks; empty if it can."""
        why = objection(self.ranks, other, self.heads)
        if why or self.sliceable or min(self.ranks, self.heads) == min(other, self.heads):
            return why
        return (
            f"tensor parallel sizes {self.ranks} and {other}: the KV cache's layout does not keep a head's tokens "
            "together; only an attention backend with the layout LBHNC can exchange KV between unequal sizes"
        )


@dataclass(frozen=True)
class Shard:
    """One rank's share of an engine's KV cache."""

    rank: int
    ranks: int
    heads: int
    """KV heads of the model; 1 for multi-head latent attention."""

    def writes_into(self, owners: int) -> tuple[Piece, ...]:
        """What this rank writes into an engine of `owners` ranks; empty if the others write it all."""
        return tuple(piece for piece in pieces(self.ranks, owners, self.heads) if piece.writer == self.rank)

    def written_by(self, writers: int) -> frozenset[int]:
        """The ranks, of an engine of `writers`, that write into this one; never empty.

        A transfer has landed here when each of them has announced it.
        """
        return frozenset(
            piece.writer for piece in pieces(writers, self.ranks, self.heads) if piece.owner == self.rank
        )
