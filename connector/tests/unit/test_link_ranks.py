"""The link between an engine's control thread and its ranks, over real sockets."""

from __future__ import annotations

import os
import queue
import select
import socket
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from disagg_connector import link
from disagg_connector.link import LinkServer, RankLink, join
from disagg_connector.ports import Tally, WriteJob
from disagg_connector.protocol import Address, Peer
from disagg_connector.sending import RESERVED_AT_ONCE

PEER = Peer("peer", Address("h", 1), "h", 2, 2, "fp")
JOB = WriteJob("x", PEER, (1, 2), (7, 8), 9.0)
TALLY = Tally(1, 0, 1, 20, 0.5)
LIMIT = 120


class Control:
    """The control thread's part of a server, stepped by hand."""

    def __init__(self, ranks: int) -> None:
        self.watched: dict[int, Callable[[], None]] = {}
        self.told: list[tuple[int, str, Tally]] = []
        self.server = LinkServer(ranks, self)
        self.server.serve(lambda rank, xid, tally: self.told.append((rank, xid, tally)))

    def watch(self, fd: int, on_readable: Callable[[], None] | None) -> None:
        if on_readable is None:
            del self.watched[fd]
        else:
            self.watched[fd] = on_readable

    def go_on_until(self, what: Callable[[], bool]) -> None:
        while not what():
            ready, _, _ = select.select(list(self.watched), [], [], LIMIT)
            assert ready, "nothing more comes"
            for fd in ready:
                if fd in self.watched:
                    self.watched[fd]()


class Rank:
    def __init__(self, control: Control, rank: int) -> None:
        self.orders: queue.Queue[tuple[WriteJob, float]] = queue.Queue()
        self.link = RankLink(
            control.server.path, rank, lambda job, deadline: self.orders.put((job, deadline))
        )


@pytest.fixture
def control() -> Iterator[Control]:
    control = Control(2)
    yield control
    control.server.close()


@pytest.fixture
def ranks(control: Control) -> Iterator[list[Rank]]:
    ranks = [Rank(control, 0)]
    control.go_on_until(lambda: len(control.server._connections) == 1)
    assert not control.server.is_ready, "one of two"
    ranks.append(Rank(control, 1))
    control.go_on_until(lambda: control.server.is_ready)
    yield ranks
    for rank in ranks:
        rank.link.close()


def test_every_rank_gets_an_order_and_its_report_comes_back(control: Control, ranks: list[Rank]) -> None:
    control.server.write(JOB, 123.5)
    for rank in ranks:
        assert rank.orders.get(timeout=LIMIT) == (JOB, 123.5)
    ranks[1].link.tell("x", TALLY)
    control.go_on_until(lambda: bool(control.told))
    assert control.told == [(1, "x", TALLY)]
    assert not control.server.is_lost


def test_an_order_for_very_many_blocks_arrives(control: Control, ranks: list[Rank]) -> None:
    blocks = tuple(range(10_000_000, 10_000_000 + RESERVED_AT_ONCE))
    job = WriteJob("x" * 256, PEER, blocks, blocks, 9.0)
    control.server.write(job, 1.0)
    assert ranks[0].orders.get(timeout=LIMIT) == (job, 1.0)


def test_a_rank_that_goes_is_the_links_end(control: Control, ranks: list[Rank]) -> None:
    ranks[0].link.close()
    control.go_on_until(lambda: control.server.is_lost)
    assert not control.server.is_ready
    ranks[1].link.tell("x", TALLY)  # goes nowhere, and harms nobody


def test_a_rank_that_takes_no_orders_is_the_links_end_and_blocks_nobody(control: Control) -> None:
    silent = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2)]
    for rank, end in enumerate(silent):
        end.connect(control.server.path)
        end.send(msgspec.msgpack.encode(rank))
    control.go_on_until(lambda: control.server.is_ready)
    for _ in range(100_000):
        control.server.write(JOB, 1.0)
        if control.server.is_lost:
            break
    assert control.server.is_lost
    assert not control.server.is_ready
    for end in silent:
        end.close()


def test_what_was_handed_over_before_the_links_end_arrives(control: Control, ranks: list[Rank]) -> None:
    """So it may come both ways, since the scheduler repeats it with a step."""
    ranks[1].link.close()
    control.server.write(JOB, 1.0)
    control.server.write(JOB, 1.0)
    control.go_on_until(lambda: control.server.is_lost)
    assert ranks[0].orders.get(timeout=LIMIT) == (JOB, 1.0)


@pytest.mark.parametrize("words", [b"\xc1", msgspec.msgpack.encode(2), msgspec.msgpack.encode(-1), b""])
def test_who_is_no_rank_is_sent_away(control: Control, ranks: list[Rank], words: bytes) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        stranger.connect(control.server.path)
        if words:
            stranger.send(words)
        else:
            stranger.shutdown(socket.SHUT_WR)
        control.go_on_until(lambda: bool(select.select([stranger], [], [], 0)[0]))
        assert stranger.recv(100) == b""
    assert control.server.is_ready
    assert not control.server.is_lost


def test_a_rank_that_talks_nonsense_is_the_links_end(control: Control) -> None:
    ends = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2)]
    for rank, end in enumerate(ends):
        end.connect(control.server.path)
        end.send(msgspec.msgpack.encode(rank))
    control.go_on_until(lambda: control.server.is_ready)
    ends[0].send(b"nonsense")
    control.go_on_until(lambda: control.server.is_lost)
    assert not control.told
    for end in ends:
        end.close()


def test_nobody_else_may_enter_and_nothing_is_left_behind() -> None:
    control = Control(1)
    folder = Path(control.server.path).parent
    mode = os.stat(folder).st_mode
    assert stat.S_IMODE(mode) == 0o700
    control.server.close()
    assert not folder.exists()


def test_a_rank_that_finds_nobody_goes_on(tmp_path: Path) -> None:
    link = RankLink(str(tmp_path / "link"), 0, lambda job, deadline: None)
    link.tell("x", TALLY)
    link.close()


def test_a_rank_that_has_no_socket_left_is_ordered_with_steps(
    control: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left() -> socket.socket:
        raise OSError("Too many open files")

    monkeypatch.setattr(link, "_socket", none_left)
    assert join(control.server.path, 0, lambda job, deadline: None) is None
