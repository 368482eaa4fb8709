from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from disagg_connector.ports import Incoming, Orders, Posted, Tally, WriteJob
from disagg_connector.protocol import Address, Peer
from disagg_connector.ranks import Shard
from disagg_connector.worker import Worker

PEER = Peer("peer", Address("h", 1), "h", 2, 1, "fp")


class Transport:
    """Writes 10 bytes of a block to each rank of the peer."""

    def __init__(self, shard: Shard) -> None:
        self.shard = shard
        self.handshake: Future[Any] | None = None
        self.on_connect: Callable[[Peer], None] = lambda peer: None
        self.posted: list[WriteJob] = []
        self.states: dict[int, str] = {}
        self.notes: list[bytes] = []
        self.forgotten: list[str] = []
        self.broken = False
        self.refused = 0
        """The last so many writes of a job."""

    def connect(self, peer: Peer) -> Future[Any] | None:
        self.on_connect(peer)
        return self.handshake

    def post(self, job: WriteJob) -> Posted:
        if self.broken:
            raise RuntimeError("no")
        self.posted.append(job)
        targets = self.shard.writes_into(job.peer.tensor_parallel)
        taken = max(0, len(targets) - self.refused)
        handles = [len(self.states) + 1 + index for index in range(taken)]
        self.states.update(dict.fromkeys(handles, "pending"))
        return Posted(handles, 10 * len(job.local) * taken, whole=taken == len(targets))

    def poll(self, handle: int) -> str:
        return self.states[handle]

    def notifications(self) -> list[bytes]:
        notes, self.notes = self.notes, []
        return notes

    def forget(self, engine_id: str) -> None:
        self.forgotten.append(engine_id)


ONLY = Shard(0, 1, 8)


class Setting:
    def __init__(self, shard: Shard = ONLY) -> None:
        self.now = 0.0
        self.transport = Transport(shard)
        self.told: list[tuple[str, Tally]] = []
        self.worker = Worker(
            self.transport, lambda: self.now, lambda xid, tally: self.told.append((xid, tally))
        )

    def write(self, xid: str = "x", start_within: float = 10, peer: Peer = PEER) -> None:
        self.worker.submit(Orders(writes=[WriteJob(xid, peer, (1, 2), (3, 4), start_within)]))

    def expect(self, xid: str, request: str = "", writers: int = 1) -> None:
        self.worker.submit(Orders(expect=[Incoming(xid, writers, request)]))

    def announce(self, *notes: bytes) -> None:
        self.transport.notes += notes
        self.worker.turn()

    def sent(self) -> dict[str, Tally]:
        report = self.worker.take_report()
        return {} if report is None else report.sent


def test_a_write_is_reported_once_when_it_is_through() -> None:
    setting = Setting()
    setting.write()
    assert setting.worker.turn()
    assert setting.sent() == {}
    setting.transport.states[1] = "done"
    assert not setting.worker.turn()
    assert setting.sent() == {"x": Tally(done=1, posted=1, size=20)}
    assert setting.sent() == {}


def test_a_failed_write_is_reported_as_failed_and_posted() -> None:
    setting = Setting()
    setting.write()
    setting.worker.turn()
    setting.transport.states[1] = "failed"
    setting.worker.turn()
    assert setting.sent() == {"x": Tally(done=1, failed=1, posted=1)}


def test_a_write_that_nixl_refuses_is_reported_as_failed() -> None:
    setting = Setting()
    setting.transport.broken = True
    setting.write()
    setting.worker.turn()
    assert setting.sent() == {"x": Tally(done=1, failed=1, posted=1)}


def test_a_write_waits_for_the_handshake() -> None:
    setting = Setting()
    waiting: Future[Any] = Future()
    setting.transport.handshake = waiting
    setting.write()
    setting.worker.turn()
    assert not setting.transport.posted
    setting.transport.handshake = None
    waiting.set_result(None)
    setting.worker.turn()
    assert len(setting.transport.posted) == 1


def test_a_handshake_that_fails_or_takes_too_long_starts_nothing() -> None:
    for error, seconds in ((RuntimeError("no"), 0.0), (None, 11.0)):
        setting = Setting()
        waiting: Future[Any] = Future()
        setting.transport.handshake = waiting
        setting.write(start_within=10)
        setting.worker.turn()
        setting.transport.handshake = None
        setting.now += seconds
        if error is not None:
            waiting.set_exception(error)
        else:
            waiting.set_result(None)
        setting.worker.turn()
        assert not setting.transport.posted
        assert setting.sent() == {"x": Tally(done=1, failed=1)}


def test_a_handshake_may_be_over_before_there_is_anything_to_write() -> None:
    setting = Setting()
    early: Future[Any] = Future()
    setting.transport.handshake = early
    setting.worker.submit(Orders(connect=[PEER]))
    setting.worker.turn()
    setting.transport.handshake = None
    early.set_result(None)
    setting.write()
    setting.worker.turn()
    assert len(setting.transport.posted) == 1


def test_an_early_handshake_that_fails_leaves_it_to_the_first_write() -> None:
    setting = Setting()
    early: Future[Any] = Future()
    setting.transport.handshake = early
    setting.worker.submit(Orders(connect=[PEER]))
    setting.worker.turn()
    early.set_exception(RuntimeError("no"))
    setting.transport.handshake = None
    setting.write()
    setting.worker.turn()
    assert len(setting.transport.posted) == 1
    assert "x" not in setting.sent(), "an early handshake is no transfer"


def test_a_peer_is_not_forgotten_in_the_middle_of_an_early_handshake() -> None:
    setting = Setting()
    early: Future[Any] = Future()
    setting.transport.handshake = early
    setting.worker.submit(Orders(connect=[PEER]))
    setting.worker.turn()
    setting.worker.submit(Orders(forget=["peer"]))
    setting.worker.turn()
    assert not setting.transport.forgotten
    early.set_result(None)
    setting.worker.turn()
    assert setting.transport.forgotten == ["peer"]


def test_an_order_to_shake_hands_wakes_the_thread() -> None:
    setting = Setting()
    asked = threading.Event()
    setting.transport.on_connect = lambda peer: asked.set()
    thread = threading.Thread(target=setting.worker.run)
    thread.start()
    try:
        setting.worker.submit(Orders(connect=[PEER]))
        assert asked.wait(60), "it sleeps until there is something to write"
    finally:
        setting.worker.stop()
        thread.join()


def test_a_peer_that_cannot_even_be_asked_for_costs_no_other_write() -> None:
    def refuse_the_lost(peer: Peer) -> None:
        if peer.engine_id == "lost":
            raise RuntimeError("no")

    setting = Setting()
    setting.transport.on_connect = refuse_the_lost
    setting.write("x", peer=Peer("lost", Address("h", 1), "h", 2, 1, "fp"))
    setting.write("y")
    setting.worker.turn()
    assert [job.xid for job in setting.transport.posted] == ["y"]
    assert setting.sent() == {"x": Tally(done=1, failed=1)}


def test_a_cancellation_that_comes_too_late_is_not_kept() -> None:
    setting = Setting()
    setting.write()
    setting.worker.turn()
    setting.transport.states[1] = "done"
    setting.worker.turn()
    # Other ranks may still be writing, or the report may be on its way.
    setting.worker.submit(Orders(cancels=["x"]))
    assert not setting.worker._cancelled


def test_a_cancelled_write_is_not_started() -> None:
    setting = Setting()
    setting.worker.submit(Orders(cancels=["x"], writes=[WriteJob("x", PEER, (1,), (2,), 10)]))
    setting.worker.turn()
    assert not setting.transport.posted
    assert setting.sent() == {"x": Tally(done=1, failed=1)}


def test_an_announced_load_finishes_its_request() -> None:
    setting = Setting()
    setting.expect("x", "request")
    assert setting.worker.turn(), "it must poll while something is expected"
    setting.transport.notes = [b"x:0"]
    assert not setting.worker.turn()
    assert setting.worker.take_results() == ({"request"}, set())


def test_an_announcement_may_come_before_its_order() -> None:
    setting = Setting()
    setting.expect("other")
    setting.transport.notes = [b"x:0"]
    setting.worker.turn()
    setting.expect("x", "request")
    assert setting.worker.take_results() == ({"request"}, set())


def test_a_load_that_is_called_off_fails_even_if_it_was_complete_in_the_last_moment() -> None:
    setting = Setting()
    setting.worker.submit(Orders(expect=[Incoming("x", 1, "one"), Incoming("y", 1, "two")]))
    setting.transport.notes = [b"x:0"]
    setting.worker.turn()
    setting.worker.submit(Orders(failed=["one", "two"]))
    assert setting.worker.take_results() == ({"one", "two"}, {"one", "two"})
    setting.transport.notes = [b"y:0"]
    setting.worker.turn()
    setting.worker.submit(Orders(failed=["one", "two"]))
    assert setting.worker.take_results() == (set(), set()), "never twice"


def test_a_landing_is_counted_for_the_scheduler() -> None:
    setting = Setting()
    setting.expect("x")
    setting.transport.notes = [b"x:0", b"\xff\xfe", b"nonsense"]
    setting.worker.turn()
    report = setting.worker.take_report()
    assert report is not None
    assert report.landed == {"x": 1}


def test_a_peer_is_forgotten_when_nothing_is_on_its_way_to_it() -> None:
    setting = Setting()
    setting.write()
    setting.worker.turn()
    setting.worker.submit(Orders(forget=["peer"]))
    setting.worker.turn()
    assert not setting.transport.forgotten
    setting.transport.states[1] = "failed"
    setting.worker.turn()
    assert setting.transport.forgotten == ["peer"]


def test_a_transfer_lands_when_all_ranks_that_write_here_have_announced_it() -> None:
    setting = Setting(Shard(0, 1, 8))
    setting.expect("x", "request", writers=2)
    setting.expect("y", writers=2)
    setting.announce(b"x:0", b"y:1")
    assert setting.worker.take_results() == (set(), set())
    setting.announce(b"x:0", b"y:1", b"y:7")
    assert setting.worker.take_results() == (set(), set()), "one rank told twice is not two"
    assert setting.worker.take_report() is None
    setting.announce(b"x:1", b"y:0")
    assert setting.worker.take_results() == ({"request"}, set())
    report = setting.worker.take_report()
    assert report is not None
    assert report.landed == {"y": 1}


def test_early_announcements_of_several_ranks_are_kept_apart() -> None:
    setting = Setting(Shard(0, 1, 8))
    setting.expect("other")
    setting.announce(b"x:1", b"x:1", b"y:0", b"y:1")
    setting.expect("x", "first", writers=2)
    setting.expect("y", "second", writers=2)
    assert setting.worker.take_results() == ({"second"}, set())
    setting.announce(b"x:0")
    assert setting.worker.take_results() == ({"first"}, set())


def test_a_rank_waits_only_for_those_who_write_into_it() -> None:
    setting = Setting(Shard(1, 2, 8))
    setting.expect("x", "request", writers=4)
    setting.announce(b"x:0", b"x:1", b"x:3")
    assert setting.worker.take_results() == (set(), set())
    setting.announce(b"x:2")
    assert setting.worker.take_results() == ({"request"}, set())


TWO = Peer("peer", Address("h", 1), "h", 2, 2, "fp")


def test_a_write_to_two_ranks_is_through_when_both_are() -> None:
    setting = Setting()
    setting.write(peer=TWO)
    setting.worker.turn()
    setting.transport.states[1] = "done"
    assert setting.worker.turn()
    assert setting.sent() == {}
    setting.transport.states[2] = "done"
    setting.worker.turn()
    assert setting.sent() == {"x": Tally(done=1, posted=1, size=40)}


def test_a_write_of_which_a_part_failed_or_was_refused_has_failed_when_the_rest_is_through() -> None:
    setting = Setting()
    setting.write(peer=TWO)
    setting.worker.turn()
    setting.transport.states[1] = "failed"
    setting.worker.turn()
    assert setting.sent() == {}, "the other part may still be written"
    setting.transport.states[2] = "done"
    setting.worker.turn()
    assert setting.sent() == {"x": Tally(done=1, failed=1, posted=1)}
    setting.transport.refused = 1
    setting.write("y", peer=TWO)
    setting.worker.turn()
    assert setting.sent() == {}
    setting.transport.states[3] = "done"
    setting.worker.turn()
    assert setting.sent() == {"y": Tally(done=1, failed=1, posted=1)}


def test_a_write_of_which_every_part_was_refused_was_not_posted() -> None:
    setting = Setting()
    setting.transport.refused = 2
    setting.write(peer=TWO)
    setting.worker.turn()
    assert setting.sent() == {"x": Tally(done=1, failed=1)}


def test_a_rank_whose_kv_others_write_is_through_at_once_and_well() -> None:
    setting = Setting(Shard(1, 2, 1))
    setting.write()
    setting.worker.turn()
    assert setting.sent() == {"x": Tally(done=1)}


def test_the_thread_stops() -> None:
    setting = Setting()
    setting.worker.stop()
    setting.worker.run()


# --- Orders between steps -------------------------------------------------------------------------


def test_a_write_ordered_between_steps_is_told_of_at_once_and_with_the_step() -> None:
    setting = Setting()
    setting.worker.write(WriteJob("x", PEER, (1, 2), (3, 4), 5), 5.0)
    assert setting.worker.turn()
    assert not setting.told
    setting.transport.states[1] = "done"
    setting.worker.turn()
    tally = Tally(done=1, posted=1, size=20)
    assert setting.told == [("x", tally)]
    assert setting.sent() == {"x": tally}


def test_a_write_ordered_with_a_step_is_told_of_at_once_too() -> None:
    setting = Setting()
    setting.write()
    setting.worker.turn()
    setting.transport.states[1] = "done"
    setting.worker.turn()
    assert [xid for xid, _ in setting.told] == ["x"]
    assert setting.sent().keys() == {"x"}


def test_an_order_that_comes_both_ways_is_one_write() -> None:
    job = WriteJob("x", PEER, (1, 2), (3, 4), 5)
    for first in ("step", "between"):
        setting = Setting()
        for way in (first, "between", "step"):
            if way == "step":
                setting.worker.submit(Orders(writes=[job]))
            else:
                setting.worker.write(job, 5.0)
        setting.worker.turn()
        assert len(setting.transport.posted) == 1
        setting.transport.states[1] = "done"
        setting.worker.turn()
        setting.worker.submit(Orders(writes=[job]))
        assert not setting.worker.turn(), "not after its end either"
        assert setting.sent() == {"x": Tally(done=1, posted=1, size=20)}


def test_a_write_ordered_between_steps_is_not_begun_after_its_time() -> None:
    setting = Setting()
    setting.worker.write(WriteJob("x", PEER, (1, 2), (3, 4), 5), 5.0)
    setting.now = 5.0
    setting.worker.turn()
    assert not setting.transport.posted
    assert setting.told == [("x", Tally(done=1, failed=1))]


def test_a_cancellation_that_comes_before_the_order_is_heeded() -> None:
    setting = Setting()
    setting.worker.submit(Orders(cancels=["x"]))
    setting.worker.write(WriteJob("x", PEER, (1, 2), (3, 4), 5), 5.0)
    setting.worker.turn()
    assert not setting.transport.posted
    assert setting.sent() == {"x": Tally(done=1, failed=1)}
