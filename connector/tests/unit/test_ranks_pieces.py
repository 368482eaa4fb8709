"""Every KV head gets to every rank that holds it, once, whatever the sizes of the two engines."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg_connector.ranks import MAX_RANKS, Piece, Shard, Sharding, heads_of, objection, pieces

# writers, owners, KV heads -> (writer, owner, first head in the writer's block, in the owner's, heads)
TABLE = {
    "equal": ((2, 2, 8), [(0, 0, 0, 0, 4), (1, 1, 0, 0, 4)]),
    "one into two": ((1, 2, 8), [(0, 0, 0, 0, 4), (0, 1, 4, 0, 4)]),
    "two into one": ((2, 1, 8), [(0, 0, 0, 0, 4), (1, 0, 0, 4, 4)]),
    "two into four": ((2, 4, 8), [(0, 0, 0, 0, 2), (0, 1, 2, 0, 2), (1, 2, 0, 0, 2), (1, 3, 2, 0, 2)]),
    "four into two": ((4, 2, 8), [(0, 0, 0, 0, 2), (1, 0, 0, 2, 2), (2, 1, 0, 0, 2), (3, 1, 0, 2, 2)]),
    "more owners than heads": (
        (1, 4, 2),
        [(0, 0, 0, 0, 1), (0, 1, 0, 0, 1), (0, 2, 1, 0, 1), (0, 3, 1, 0, 1)],
    ),
    "more writers than heads": ((4, 1, 2), [(0, 0, 0, 0, 1), (2, 0, 0, 1, 1)]),
    "owners beyond the heads that writers just cover": (
        (2, 4, 2),
        [(0, 0, 0, 0, 1), (0, 1, 0, 0, 1), (1, 2, 0, 0, 1), (1, 3, 0, 0, 1)],
    ),
    "both beyond the heads": ((4, 2, 1), [(0, 0, 0, 0, 1), (2, 1, 0, 0, 1)]),
    "latent, fewer writers": ((1, 2, 1), [(0, 0, 0, 0, 1), (0, 1, 0, 0, 1)]),
    "latent, more writers": ((2, 1, 1), [(0, 0, 0, 0, 1)]),
    "latent, equal": ((2, 2, 1), [(0, 0, 0, 0, 1), (1, 1, 0, 0, 1)]),
}


@pytest.mark.parametrize("case", TABLE)
def test_who_writes_what_into_whom(case: str) -> None:
    sizes, want = TABLE[case]
    assert list(pieces(*sizes)) == [Piece(*row) for row in want]


def test_a_rank_waits_for_each_of_its_writers_and_for_no_other() -> None:
    assert Shard(0, 1, 8).written_by(2) == {0, 1}
    assert Shard(1, 2, 8).written_by(1) == {0}
    assert Shard(1, 2, 8).written_by(2) == {1}
    assert Shard(0, 1, 2).written_by(4) == {0, 2}, "ranks 1 and 3 hold the same heads as 0 and 2"
    assert Shard(1, 2, 1).written_by(4) == {2}


def test_a_rank_whose_heads_others_write_writes_nothing() -> None:
    assert Shard(1, 2, 1).writes_into(1) == ()
    assert Shard(0, 2, 1).writes_into(1) == (Piece(0, 0, 0, 0, 1),)
    assert Shard(1, 2, 2).writes_into(1) == (Piece(1, 0, 0, 1, 1),)


@pytest.mark.parametrize(
    ("sizes", "why"),
    [
        ((2, 3, 6), "sizes 2 and 3: one must be a multiple"),
        ((3, 2, 6), "sizes 3 and 2: one must be a multiple"),
        ((0, 1, 8), "sizes 0 and 1: one must be a multiple"),
        ((1, MAX_RANKS * 2, 8), "must be a multiple"),
        ((1, 3, 8), "size 3 does not divide 8 KV heads, nor they it"),
        ((6, 3, 4), "size 6 does not divide 4 KV heads, nor they it"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_the_reason(sizes: tuple[int, int, int], why: str) -> None:
    assert why in objection(*sizes)
    with pytest.raises(ValueError, match=r"multiple|divide"):
        pieces(*sizes)


@pytest.mark.parametrize("sizes", [(1, 2, 8), (4, 2, 2), (3, 1, 6), (1, 1, 7), (2, 16, 1)])
def test_sizes_that_fit_do_so_both_ways(sizes: tuple[int, int, int]) -> None:
    ranks, other, heads = sizes
    assert not objection(ranks, other, heads)
    assert not objection(other, ranks, heads)


@pytest.mark.parametrize(
    ("ranks", "other", "heads", "fits"),
    [(2, 2, 8, True), (1, 2, 8, False), (4, 2, 8, False), (1, 2, 1, True), (4, 2, 2, True), (4, 2, 1, True)],
)
def test_what_cannot_be_sliced_goes_between_ranks_of_the_same_heads_alone(
    ranks: int, other: int, heads: int, fits: bool
) -> None:
    assert not Sharding(ranks, heads).objection(other)
    assert bool(Sharding(ranks, heads, sliceable=False).objection(other)) != fits


POWERS = st.sampled_from([1, 2, 4, 8, 16])


@given(POWERS, POWERS, POWERS, st.sampled_from([1, 3, 5]))
def test_each_owner_gets_each_of_its_heads_once(writers: int, owners: int, base: int, odd: int) -> None:
    heads = base * odd if max(writers, owners) <= base else base
    found = pieces(writers, owners, heads)
    for owner in range(owners):
        held = heads_of(owner, owners, heads)
        got = []
        for piece in (piece for piece in found if piece.owner == owner):
            mine = heads_of(piece.writer, writers, heads)
            source = range(mine.start + piece.source, mine.start + piece.source + piece.heads)
            target = range(held.start + piece.target, held.start + piece.target + piece.heads)
            assert source == target, "a head must not become another"
            assert source[-1] in mine
            got += list(source)
        assert sorted(got) == list(held)


@given(POWERS, POWERS, POWERS)
def test_what_ranks_write_is_what_ranks_wait_for(writers: int, owners: int, heads: int) -> None:
    written = {
        (piece.writer, piece.owner)
        for rank in range(writers)
        for piece in Shard(rank, writers, heads).writes_into(owners)
    }
    awaited = {(w, rank) for rank in range(owners) for w in Shard(rank, owners, heads).written_by(writers)}
    assert written == awaited
    assert {owner for _, owner in awaited} == set(range(owners)), "no rank waits for nobody"
