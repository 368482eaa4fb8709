"""A write-back with all its threads and sockets, while decode's engine thread does nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from connector.tests.unit.test_control_channel import End
from disagg_connector.direct import Committed, Direct, Reservation
from disagg_connector.epochs import Epochs
from disagg_connector.link import LinkServer, RankLink
from disagg_connector.ports import Posted, WriteJob
from disagg_connector.protocol import Commit, Grant, Offer, Peer, Reply, Request
from disagg_connector.protocol import Committed as Taken
from disagg_connector.ranks import Shard
from disagg_connector.worker import Worker

LIMIT = 120.0


@dataclass
class Transport:
    """Writes are through when looked at."""

    shard: Shard
    posted: list[WriteJob] = field(default_factory=list)

    def connect(self, peer: Peer) -> None:
        return None

    def post(self, job: WriteJob) -> Posted:
        self.posted.append(job)
        return Posted([job.xid], 10)

    def poll(self, handle: Any) -> str:
        return "done"

    def notifications(self) -> list[bytes]:
        return []

    def forget(self, engine_id: str) -> None: ...


@contextmanager
def rank(server: LinkServer, number: int, transport: Transport) -> Iterator[None]:
    """A worker with its writer thread and its link."""
    links: list[RankLink] = []
    worker = Worker(transport, tell=lambda xid, tally: links[0].tell(xid, tally))
    links.append(RankLink(server.path, number, worker.write))
    thread = threading.Thread(target=worker.run)
    thread.start()
    try:
        yield
    finally:
        links[0].close()
        worker.stop()
        thread.join()
        report = worker.take_report()
        assert report is not None, "it is told with a step, too"


def wait_until(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT
    while not what():
        assert time.monotonic() < deadline, "it does not happen"
        threading.Event().wait(0.005)


def test_offer_grant_write_and_commit_happen_without_the_engine_thread() -> None:
    heard: list[Commit] = []
    committed = threading.Event()

    def prefill_says(message: Request) -> Reply | None:
        if isinstance(message, Offer):
            return Grant(5, [70, 80], 6, LIMIT)
        assert isinstance(message, Commit)
        heard.append(message)
        committed.set()
        return Taken(2)

    with ExitStack() as stack:
        decode, prefill = (End(start=False) for _ in range(2))
        server = LinkServer(2, decode.channel)
        stack.callback(server.close)  # when the control thread has ended
        for end in (decode, prefill):
            stack.enter_context(closing(end))
        prefill.fast = prefill_says
        peer = Peer("p", prefill.address, "h", 1, 2, "fp")
        ended: list[Committed] = []
        direct = Direct(server, decode.channel, Epochs(), time.monotonic, ranks=2)
        server.serve(direct.told)
        for end in (decode, prefill):
            end.channel.start()
        transports = [Transport(Shard(number, 2, 8)) for number in range(2)]
        for number, transport in enumerate(transports):
            stack.enter_context(rank(server, number, transport))
        wait_until(lambda: direct.is_ready)

        me = Peer("d", decode.address, "h", 1, 2, "fp")
        direct.reserve(Reservation("x", peer, 4, (1, 2, 3), 0, time.monotonic(), ended.append))
        offer = Offer("p", 0, "x", me, [b"h" * 32] * 3, 4, "")
        decode.channel.request(peer.address, offer, LIMIT, lambda reply: None, partial(direct.answered, "x"))
        assert committed.wait(LIMIT), "nobody has drained decode's inbox"

        assert heard == [Commit("p", 6, "x", True, True)]
        for transport in transports:
            assert [(job.local, job.remote) for job in transport.posted] == [((2, 3), (70, 80))]
        decode.collect(lambda _: bool(ended))
        assert ended[0].reply == Taken(2)
        assert ended[0].tally.size == 20
        assert direct.end("x")
