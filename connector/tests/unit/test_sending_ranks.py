from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from disagg_connector.direct import Direct, NoLink
from disagg_connector.epochs import Epochs
from disagg_connector.ports import Orders, Steps, Tally, Token
from disagg_connector.protocol import Address, Peer, Released, Reply, Request
from disagg_connector.sending import Sender, Sent

PEER = Peer("peer", Address("h", 1), "h", 2, 2, "fp")


class Surroundings:
    """Pool, channel and clock of a sender of two ranks."""

    total = 10

    def __init__(self) -> None:
        self.now = 0.0
        self.unpinned: list[int] = []
        self.answers: list[Reply] = []
        self.steps = Steps()
        self.ended: list[Sent] = []
        direct = Direct(NoLink(), self, Epochs(), lambda: self.now, ranks=2)
        self.sender = Sender(self, self, direct, lambda: self.now, self.steps, ranks=2)

    def start(self, fence: int = 0) -> None:
        self.sender.start("x", PEER, [1, 2], [7, 8], 10.0, self.ended.append, fence)

    def orders(self) -> Orders:
        orders = Orders()
        self.sender.fill(orders)
        return orders

    def free(self) -> int:
        return 0

    def find(self, block_hash: bytes) -> int | None:
        return None

    def pin(self, blocks: Sequence[int]) -> None: ...

    def unpin(self, blocks: Sequence[int]) -> None:
        self.unpinned += blocks

    def take(self, count: int) -> list[int]:
        return []

    def insert(self, block_hash: bytes, block: int, num_tokens: int) -> None: ...

    def request(
        self,
        to: Address,
        message: Request,
        timeout: float,
        on_reply: Callable[[Reply | None], None],
        at_once: Callable[[Reply], None] | None = None,
    ) -> None: ...

    def answer(self, token: Token, reply: Reply) -> None:
        self.answers.append(reply)

    def probe(self, address: Address, on_refused: Callable[[], None]) -> None: ...


TOKEN: Token = (b"who", 1)
OK = Tally(done=1, posted=1, size=20)
BAD = Tally(done=1, failed=1, posted=1)
NOT_STARTED = Tally(done=1, failed=1)


def test_source_blocks_are_kept_until_the_last_rank_is_through() -> None:
    world = Surroundings()
    world.start()
    assert [job.xid for job in world.orders().writes] == ["x"]
    world.sender.report("x", OK)
    assert not world.unpinned
    world.sender.report("x", OK)
    assert world.unpinned == [1, 2]
    assert world.ended == [Sent("x", PEER, 2, ok=True, wrote=True, size=40)]


def test_one_failed_rank_fails_the_transfer() -> None:
    world = Surroundings()
    world.start()
    world.orders()
    world.sender.report("x", OK)
    world.sender.report("x", BAD)
    assert not world.ended[0].ok


def test_a_cancellation_is_answered_when_the_last_rank_is_through() -> None:
    world = Surroundings()
    world.start()
    world.orders()
    world.sender.cancel("x", TOKEN)
    assert world.orders().cancels == ["x"]
    assert world.orders().cancels == [], "once is enough"
    world.sender.report("x", NOT_STARTED)
    assert not world.answers
    world.sender.report("x", OK)
    assert world.answers == [Released(wrote=True)]


def test_a_transfer_that_no_rank_has_been_told_of_is_dropped_at_once() -> None:
    world = Surroundings()
    world.start()
    world.sender.cancel("x", TOKEN)
    assert world.answers == [Released(wrote=False)]
    assert world.unpinned == [1, 2]
    assert not world.orders().writes


def test_a_cancelled_name_never_starts() -> None:
    world = Surroundings()
    world.sender.cancel("x", TOKEN)
    world.start()
    assert not world.orders().writes
    assert world.unpinned == [1, 2]
    assert not world.ended[0].ok


def test_nothing_starts_before_its_step_is_over() -> None:
    world = Surroundings()
    world.steps.scheduled = 5
    world.start(fence=5)
    world.steps.processed = 4
    assert not world.orders().writes
    world.steps.processed = 5
    assert world.orders().writes


def test_nothing_starts_after_its_time() -> None:
    world = Surroundings()
    world.start()
    world.now = 10.0
    assert not world.orders().writes
    assert world.ended == [Sent("x", PEER, 2, ok=False, wrote=False, size=0)]


def test_the_time_left_travels_with_the_order() -> None:
    world = Surroundings()
    world.start()
    world.now = 4.0
    assert world.orders().writes[0].start_within == 6.0


def test_unequal_lists_are_a_bug() -> None:
    world = Surroundings()
    with pytest.raises(ValueError, match="2 blocks into 1"):
        world.sender.start("x", PEER, [1, 2], [7], 10.0, world.ended.append)
