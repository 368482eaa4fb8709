"""All ranks of two engines with their real workers, over a network that completes and announces in any order."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from disagg_connector.ports import Incoming, Orders, Posted, Tally, WriteJob
from disagg_connector.protocol import Address, Peer, announcement
from disagg_connector.ranks import Piece, Shard, heads_of
from disagg_connector.worker import Worker

XID = "xid"


@dataclass
class Rank:
    """A rank's worker, and NIXL under it: one block, head by head."""

    shard: Shard
    network: list[Callable[[], None]]
    others: list[Rank]
    """The ranks of the other engine."""
    block: list[int | None] = field(default_factory=list)
    states: dict[int, str] = field(default_factory=dict)
    notes: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.worker = Worker(self, lambda: 0.0)

    def connect(self, peer: Peer) -> Future[Any] | None:
        return None

    def post(self, job: WriteJob) -> Posted:
        posted = Posted()
        for piece in self.shard.writes_into(job.peer.tensor_parallel):
            handle = len(self.states)
            self.states[handle] = "pending"
            posted.handles.append(handle)
            posted.size += piece.heads
            self.network.append(lambda piece=piece: self.deliver(piece))  # type: ignore[misc]
            self.network.append(lambda handle=handle: self.states.update({handle: "done"}))  # type: ignore[misc]
        return posted

    def deliver(self, piece: Piece) -> None:
        """Data, and after it the announcement: the one order that NIXL keeps. Twice, to see that twice is once."""
        target = self.others[piece.owner]
        for offset in range(piece.heads):
            assert target.block[piece.target + offset] is None, "two ranks write the same"
            target.block[piece.target + offset] = self.block[piece.source + offset]
        target.notes += [announcement(XID, self.shard.rank)] * 2

    def poll(self, handle: int) -> str:
        return self.states[handle]

    def notifications(self) -> list[bytes]:
        notes, self.notes = self.notes, []
        return notes

    def forget(self, engine_id: str) -> None: ...


SIZES = st.sampled_from([1, 2, 4, 8])


@given(SIZES, SIZES, SIZES, st.booleans(), st.data())
def test_a_rank_lands_a_transfer_once_and_only_with_all_its_heads(
    writers: int, owners: int, heads: int, told_late: bool, data: st.DataObject
) -> None:
    network: list[Callable[[], None]] = []
    sources: list[Rank] = []
    targets: list[Rank] = []
    for rank in range(owners):
        shard = Shard(rank, owners, heads)
        targets.append(Rank(shard, network, sources, [None] * len(heads_of(rank, owners, heads))))
    for rank in range(writers):
        held = heads_of(rank, writers, heads)
        sources.append(Rank(Shard(rank, writers, heads), network, targets, list(held)))
    expect = Orders(expect=[Incoming("another", writers), Incoming(XID, writers)])
    early = Orders(expect=[Incoming("another", writers)])
    peer = Peer("owner", Address("h", 1), "h", 2, owners, "fp")
    landed: set[int] = set()
    sent = Tally()

    def look() -> None:
        for rank, target in enumerate(targets):
            target.worker.turn()
            report = target.worker.take_report()
            if report is not None:
                assert report.landed == {XID: 1}
                assert rank not in landed
                assert target.block == list(heads_of(rank, owners, heads)), "not all has arrived"
                landed.add(rank)
        for source in sources:
            source.worker.turn()
            report = source.worker.take_report()
            if report is not None:
                sent.add(report.sent[XID])

    for target in targets:
        target.worker.submit(early if told_late else expect)
    for source in sources:
        source.worker.submit(Orders(writes=[WriteJob(XID, peer, (0,), (0,), 1.0)]))
    look()
    while network:
        network.pop(data.draw(st.integers(0, len(network) - 1)))()
        look()
    if told_late:
        assert not landed
        for target in targets:
            target.worker.submit(expect)
        look()
    assert landed == set(range(owners))
    assert (sent.done, sent.failed) == (writers, 0)
    assert sent.size == sum(len(target.block) for target in targets)
