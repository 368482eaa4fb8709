"""What the control thread does alone for a write-back, call by call, of an engine with two ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from disagg_connector.direct import Begun, Committed, Direct, Reservation
from disagg_connector.epochs import Epochs
from disagg_connector.ports import Tally, Token, WriteJob
from disagg_connector.protocol import NO_BLOCKS, Address, Commit, Grant, Peer, Refused, Reply, Request
from disagg_connector.protocol import Committed as Taken

PEER = Peer("peer", Address("h", 1), "h", 2, 2, "fp")
GRANT = Grant(start=4, blocks=[70, 80], epoch=6, lease_seconds=30)
WELL = Tally(done=1, posted=1, size=20, seconds=0.5)


class Setting:
    """A link and a channel that remember, and a clock. Blocks 11 to 13 are reserved as 3 to 5 of the chain."""

    path = "somewhere"
    is_ready = True
    is_lost = False

    def __init__(self) -> None:
        self.now = 100.0
        self.epochs = Epochs()
        self.orders: list[tuple[WriteJob, float]] = []
        self.commits: list[Commit] = []
        self.committed: list[Committed] = []
        self.meanwhile: Callable[[], None] = lambda: None
        self.direct = Direct(self, self, self.epochs, lambda: self.now, ranks=2)
        self.direct.reserve(Reservation("x", PEER, 3, (11, 12, 13), 0, 100.0, self.committed.append))

    def write(self, job: WriteJob, deadline: float) -> None:
        self.orders.append((job, deadline))
        self.meanwhile()

    def request(
        self,
        to: Address,
        message: Request,
        timeout: float,
        on_reply: Callable[[Reply | None], None],
        at_once: Callable[[Reply], None] | None = None,
    ) -> None:
        assert isinstance(message, Commit)
        assert at_once is not None
        self.commits.append(message)
        self.on_reply, self.at_once = on_reply, at_once

    def answer(self, token: Token, reply: Reply) -> None: ...

    def probe(self, address: Address, on_refused: Callable[[], None]) -> None: ...

    def begin(self) -> None:
        self.direct.answered("x", GRANT)
        assert self.orders

    def tell(self, *tallies: Tally) -> None:
        for rank, tally in enumerate(tallies):
            self.direct.told(rank, "x", tally)


def test_a_grant_is_handed_to_the_ranks_with_the_time_that_its_lease_leaves() -> None:
    setting = Setting()
    setting.now = 103.0
    setting.direct.answered("x", GRANT)
    assert setting.orders == [(WriteJob("x", PEER, (12, 13), (70, 80), 26.0), 129.0)]
    begun = setting.direct.settle("x")
    assert begun == Begun(GRANT, *setting.orders[0], 103.0)


def test_it_is_committed_when_all_ranks_are_through() -> None:
    setting = Setting()
    setting.begin()
    setting.tell(WELL)
    assert not setting.commits
    setting.tell(WELL, WELL)
    setting.tell(WELL, WELL)
    assert setting.commits == [Commit("peer", 6, "x", True, True)], "once"
    setting.now = 101.0
    setting.at_once(Taken(2))
    setting.now = 105.0
    setting.on_reply(Taken(2))
    assert setting.committed == [Committed(GRANT, Tally(2, 0, 2, 40, 0.5), Taken(2), 101.0)]
    assert setting.direct.end("x"), "the engine thread has nothing to say"


@pytest.mark.parametrize(
    "reply",
    [
        Refused(NO_BLOCKS, "peer"),
        Grant(4, [], 6, 30),
        Grant(2, [70, 80], 6, 30),
        Grant(4, [70, 80, 90], 6, 30),
        Grant(4, [70, 80], 6, 1.0),
    ],
    ids=["refused", "nothing", "not reserved before", "not reserved behind", "no time left"],
)
def test_what_is_not_a_grant_for_the_reserved_blocks_is_left_alone(reply: Reply) -> None:
    setting = Setting()
    setting.direct.answered("x", reply)
    assert not setting.orders
    assert setting.direct.settle("x") is None


@pytest.mark.parametrize("what", ["epoch", "closed", "lost", "not ready"])
def test_nothing_begins_that_is_out_of_date_or_cannot_be_told(what: str) -> None:
    setting = Setting()
    match what:
        case "epoch":
            setting.epochs.advance()
        case "closed":
            setting.epochs.close("paused")
        case "lost":
            setting.is_lost = True
        case _:
            setting.is_ready = False
    setting.direct.answered("x", GRANT)
    assert not setting.orders
    assert setting.direct.settle("x") is None


def test_what_the_engine_thread_has_settled_never_begins() -> None:
    setting = Setting()
    assert setting.direct.settle("x") is None
    setting.direct.answered("x", GRANT)
    assert not setting.orders


def test_what_is_being_handed_over_has_begun() -> None:
    setting = Setting()
    seen: list[Begun | None] = []
    setting.meanwhile = lambda: seen.append(setting.direct.settle("x"))
    setting.direct.answered("x", GRANT)
    assert seen[0] is not None
    assert seen[0].job == setting.orders[0][0]


def test_a_grant_begins_one_write() -> None:
    setting = Setting()
    setting.begin()
    setting.direct.answered("x", GRANT)
    assert len(setting.orders) == 1


@pytest.mark.parametrize("what", ["failed", "revoked", "epoch", "closed", "ended"])
def test_what_has_not_gone_well_is_not_committed_here(what: str) -> None:
    setting = Setting()
    setting.begin()
    setting.tell(WELL)
    last = WELL
    match what:
        case "failed":
            last = Tally(done=1, failed=1)
        case "revoked":
            setting.direct.revoke("x")
        case "epoch":
            setting.epochs.advance()
        case "closed":
            setting.epochs.close("updating")
        case _:
            assert not setting.direct.end("x")
    setting.direct.told(1, "x", last)
    assert not setting.commits
    assert not setting.direct.end("x")


def test_a_write_that_was_ordered_with_a_step_is_committed_too() -> None:
    setting = Setting()
    assert setting.direct.settle("x") is None
    setting.direct.follow(Reservation("x", PEER, 4, (12, 13), 0, 100.0, setting.committed.append), GRANT)
    setting.direct.answered("x", GRANT)
    assert not setting.orders
    setting.tell(WELL, WELL)
    assert setting.commits == [Commit("peer", 6, "x", True, True)]
    assert setting.direct.end("x")


def test_a_rank_that_tells_twice_is_one_rank() -> None:
    setting = Setting()
    setting.begin()
    setting.direct.told(0, "x", WELL)
    setting.direct.told(0, "x", WELL)
    assert not setting.commits


def test_an_end_of_what_never_began_is_no_end() -> None:
    setting = Setting()
    setting.tell(WELL, WELL)
    setting.direct.told(0, "unknown", WELL)
    assert not setting.commits


def test_two_threads_agree_on_what_has_begun_and_on_who_commits() -> None:
    """The engine thread and the control thread come at the same time, over and over."""
    for _ in range(300):
        setting = Setting()
        barrier = threading.Barrier(2)

        def control(setting: Setting = setting, barrier: threading.Barrier = barrier) -> None:
            barrier.wait()
            setting.direct.answered("x", GRANT)
            setting.tell(WELL, WELL)

        thread = threading.Thread(target=control)
        thread.start()
        barrier.wait()
        begun = setting.direct.settle("x")
        ended = begun is not None and setting.direct.end("x")
        thread.join()
        assert len(setting.orders) == (begun is not None)
        assert len(setting.commits) == ended
