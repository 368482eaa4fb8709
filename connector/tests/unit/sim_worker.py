"""The worker of a simulated engine, of one rank: its writes, and those that it awaits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from connector.tests.unit.sim_contents import Clock, ViolationError
from connector.tests.unit.sim_network import FakeChannel
from connector.tests.unit.sim_pool import FakePool
from disagg_connector.config import Role
from disagg_connector.ports import Orders, Tally, WorkerReport, WriteJob


@dataclass
class Write:
    """A write that has been posted: `World.land` puts the contents there, once."""

    job: WriteJob
    source: SimWorker
    contents: list[bytes]


class FakeLink:
    """`direct.Link` to an engine's only rank, which gets an order at once unless that is lost."""

    path = "link"

    def __init__(self, worker: SimWorker, clock: Clock) -> None:
        self.worker = worker
        self.clock = clock
        self.is_ready = False
        self.is_lost = False
        self.loses_next = False
        """Whether the next order does not arrive, which is the end of the link."""
        self.orders = 0

    def write(self, job: WriteJob, deadline: float) -> None:
        if deadline <= self.clock():
            raise ViolationError(f"{job.xid} is ordered after its time")
        self.is_lost |= self.loses_next
        if not self.is_lost:
            self.orders += 1
            self.worker.order(job)


class SimWorker:
    """Gets its orders with a step or over its link; what has come of them is `reported` after a step."""

    def __init__(self, name: str, role: Role, pool: FakePool, channel: FakeChannel) -> None:
        self.name, self.role, self.pool, self.channel = name, role, pool, channel
        self.link = FakeLink(self, channel.network.clock)
        self.told: Callable[[str, Tally], None] = lambda xid, tally: None
        """Hears over the link of writes that are through."""
        self.posted: list[Write] = []
        self.ordered: set[str] = set()
        self.cancelled: set[str] = set()
        self.connected: list[str] = []
        self.expected: dict[str, str] = {}
        self.early: set[str] = set()
        self.report = WorkerReport()
        self.received: set[str] = set()
        self.failed: set[str] = set()
        self.loaded_by: dict[str, str] = {}

    def work(self, orders: Orders) -> None:
        for incoming in orders.expect:
            self.expected[incoming.xid] = incoming.request
            if incoming.xid in self.early:
                self.announce(incoming.xid)
        for request in orders.failed:
            if request in self.received:
                self.failed.add(request)
            for xid, waiting in list(self.expected.items()):
                if waiting == request:
                    del self.expected[xid]
                    self.received.add(request)
                    self.failed.add(request)
        for xid in orders.ignore:
            self.expected.pop(xid, None)
        self.cancelled.update(xid for xid in orders.cancels if xid not in self.ordered)
        self.connected += [peer.engine_id for peer in orders.connect]
        for job in orders.writes:
            self.order(job)
        if orders.link:
            self.link.is_ready = True

    def order(self, job: WriteJob) -> None:
        """Begin a write, of which an order may come both ways."""
        if job.xid in self.ordered:
            return
        self.ordered.add(job.xid)
        if job.xid in self.cancelled:
            self._through(job.xid, Tally(1, 1, 0))
            return
        self.channel.check_epoch(job.xid, 1 if self.role == "prefill" else 0)
        contents = [self.pool.content[block] for block in job.local]
        self.posted.append(Write(job, self, contents))

    def announce(self, xid: str) -> None:
        """NIXL tells that a write into this engine is complete."""
        if xid not in self.expected:
            self.early.add(xid)
            return
        request = self.expected.pop(xid)
        if request:
            self.received.add(request)
            self.loaded_by[request] = xid
        else:
            self.report.landed[xid] = 1

    def through(self, write: Write, failed: bool) -> None:
        """The writer's own rank is through with a write."""
        self._through(write.job.xid, Tally(1, int(failed), 1, len(write.job.local) * 10, 0.001))

    def _through(self, xid: str, tally: Tally) -> None:
        self.report.merge(WorkerReport(sent={xid: tally}))
        if self.link.is_ready and not self.link.is_lost:
            self.told(xid, tally)

    def reported(self) -> tuple[WorkerReport, set[str], set[str]]:
        """What has come of orders since the last call: the report, the requests whose loads are over, and those of them
        that failed."""
        reported = self.report, self.received, self.failed
        self.report, self.received, self.failed = WorkerReport(), set(), set()
        return reported
