"""The worker's part: write blocks into peers, and notice what peers have written here.

One writer thread per rank owns NIXL: it starts writes, polls them while any is in flight, and reads
notifications while any is expected; it sleeps otherwise. The engine's main thread only hands orders over
and takes results, both under a lock, once a step. On decode, orders also come and reports also go between steps
(`direct`), so an order may come twice, and every report goes with a step as well.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from disagg_connector.ports import Clock, Orders, Posted, Tally, WorkerReport, WriteJob
from disagg_connector.protocol import Peer, read_announcement
from disagg_connector.ranks import Shard
from disagg_connector.remembered import Remembered

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.001
# Announcements of transfers that this rank has not been told of yet.
EARLY_LIMIT = 4096


class Transport(Protocol):
    """NIXL, as far as the writer thread uses it. See `compat`."""

    @property
    def shard(self) -> Shard: ...

    def connect(self, peer: Peer) -> Future[Any] | None: ...

    def post(self, job: WriteJob) -> Posted: ...

    def poll(self, handle: Any) -> str: ...

    def notifications(self) -> list[bytes]: ...

    def forget(self, engine_id: str) -> None: ...


@dataclass
class _Active:
    job: WriteJob
    handles: list[Any]
    size: int
    started: float
    failed: bool


@dataclass
class _Awaited:
    """An incoming transfer: who waits for it, and which ranks have yet to announce their part."""

    request: str
    missing: set[int]


class Worker:
    """One rank's transfers. `submit`, `take_results` and `take_report` are the main thread's.

    `tell` is called on the writer thread when a write is through.
    """

    def __init__(
        self,
        transport: Transport,
        clock: Clock = time.monotonic,
        tell: Callable[[str, Tally], None] = lambda xid, tally: None,
    ) -> None:
        self._transport = transport
        self._clock = clock
        self._tell = tell
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._stop = False
        # Under the lock:
        self._jobs: deque[tuple[WriteJob, float]] = deque()
        self._open: set[str] = set()  # not through yet
        self._ordered = Remembered()
        """Writes, since an order may come both ways."""
        self._cancelled: set[str] = set()
        self._connect: deque[Peer] = deque()
        self._forget: set[str] = set()
        self._expected: dict[str, _Awaited] = {}
        self._early: OrderedDict[str, set[int]] = OrderedDict()
        self._finished: set[str] = set()
        self._failed: set[str] = set()
        self._report = WorkerReport()
        self._handshakes: deque[tuple[str, BaseException | None]] = deque()
        # The writer thread's own:
        self._connecting: dict[str, tuple[WriteJob, float]] = {}
        self._greeting: dict[str, Future[Any]] = {}
        self._active: dict[str, _Active] = {}

    # --- Main thread ------------------------------------------------------------------------------

    def submit(self, orders: Orders) -> None:
        """Take a step's orders."""
        now = self._clock()
        with self._lock:
            for incoming in orders.expect:
                missing = set(self._transport.shard.written_by(incoming.writers))
                self._expected[incoming.xid] = _Awaited(incoming.request, missing)
                for rank in self._early.pop(incoming.xid, ()):
                    self._announced(incoming.xid, rank)
            for request in orders.failed:
                self._fail(request)
            for xid in orders.ignore:
                self._expected.pop(xid, None)
            self._connect.extend(orders.connect)
            self._forget.update(orders.forget)
            for job in orders.writes:
                if self._ordered.add(job.xid):
                    self._open.add(job.xid)
                    self._jobs.append((job, now + job.start_within))
            # This rank may be through with one while others are not, or may not have been told of it over the link yet.
            self._cancelled.update(
                xid for xid in orders.cancels if xid in self._open or xid not in self._ordered
            )
        if orders.connect or not orders.empty:
            self._wake.set()

    def write(self, job: WriteJob, deadline: float) -> None:
        """Take an order between steps. Any thread."""
        with self._lock:
            if not self._ordered.add(job.xid):
                return
            self._open.add(job.xid)
            self._jobs.append((job, deadline))
        self._wake.set()

    def take_results(self) -> tuple[set[str], set[str]]:
        """Requests whose load is over on this rank, and which of them failed."""
        with self._lock:
            results = self._finished, self._failed
            self._finished, self._failed = set(), set()
        return results

    def take_report(self) -> WorkerReport | None:
        """What became of transfers since the last call, or None."""
        with self._lock:
            report, self._report = self._report, WorkerReport()
        return None if report.empty else report

    def stop(self) -> None:
        self._stop = True
        self._wake.set()

    # --- Writer thread ----------------------------------------------------------------------------

    def run(self) -> None:
        """The writer thread's body; returns after `stop`."""
        while not self._stop:
            try:
                busy = self.turn()
            except Exception:
                logger.exception("Writer thread: an error was survived")
                busy = True
            self._wake.wait(POLL_SECONDS if busy else None)
            self._wake.clear()

    def turn(self) -> bool:
        """One round. Returns whether there is anything to poll for."""
        with self._lock:
            jobs, handshakes, new_peers = list(self._jobs), list(self._handshakes), list(self._connect)
            self._jobs.clear()
            self._handshakes.clear()
            self._connect.clear()
        for peer in new_peers:
            self._greet(peer)
        for xid, error in handshakes:
            self._connected(xid, error)
        for job, deadline in jobs:
            self._begin(job, deadline)
        for active in list(self._active.values()):
            self._poll(active)
        self._forget_peers()
        with self._lock:
            expecting = bool(self._expected)
        if expecting:
            self._read_notifications()
        with self._lock:
            return bool(self._active or self._expected or self._jobs or self._handshakes or self._forget)

    def _greet(self, peer: Peer) -> None:
        """Shake hands with a peer before there is anything to write. If that fails the first write tries again."""
        try:
            handshake = self._transport.connect(peer)
        except Exception as error:
            logger.warning("No NIXL connection to %s yet: %s", peer.address, error)
            return
        if handshake is not None:
            self._greeting[peer.engine_id] = handshake
            handshake.add_done_callback(lambda done: self._greeted(peer, done))

    def _greeted(self, peer: Peer, done: Future[Any]) -> None:
        """Any thread."""
        if error := done.exception():
            logger.warning("No NIXL connection to %s yet: %s", peer.address, error)
        self._wake.set()

    def _begin(self, job: WriteJob, deadline: float) -> None:
        with self._lock:
            cancelled = job.xid in self._cancelled
        if cancelled or self._clock() >= deadline:
            self._through(job, failed=True, posted=False)
            return
        try:
            handshake = self._transport.connect(job.peer)
        except Exception:
            logger.exception("No NIXL connection to %s", job.peer.address)
            self._through(job, failed=True, posted=False)
            return
        if handshake is not None:
            self._connecting[job.xid] = (job, deadline)
            handshake.add_done_callback(lambda done: self._on_handshake(job.xid, done))
            return
        started = self._clock()
        try:
            posted = self._transport.post(job)
        except Exception:
            logger.exception("The write %s to %s could not be started", job.xid, job.peer.address)
            # Taken for posted: what NIXL had done of it when it failed is not known.
            self._through(job, failed=True, posted=True)
            return
        if posted.handles:
            self._active[job.xid] = _Active(job, posted.handles, posted.size, started, not posted.whole)
        else:
            # Refused, or other ranks hold the same KV and write it.
            self._through(job, failed=not posted.whole, posted=False)

    def _on_handshake(self, xid: str, done: Future[Any]) -> None:
        """Any thread: a peer's memory is known now, or cannot be."""
        with self._lock:
            self._handshakes.append((xid, done.exception()))
        self._wake.set()

    def _connected(self, xid: str, error: BaseException | None) -> None:
        job, deadline = self._connecting.pop(xid)
        if error is None:
            self._begin(job, deadline)
            return
        logger.error("No NIXL connection to %s: %s", job.peer.address, error)
        self._through(job, failed=True, posted=False)

    def _poll(self, active: _Active) -> None:
        left = []
        for handle in active.handles:
            state = self._transport.poll(handle)
            if state == "pending":
                left.append(handle)
            elif state == "failed":
                active.failed = True
        active.handles = left
        if not left:
            del self._active[active.job.xid]
            if active.failed:
                logger.error("The write %s to %s failed", active.job.xid, active.job.peer.address)
            seconds = self._clock() - active.started
            self._through(active.job, failed=active.failed, posted=True, size=active.size, seconds=seconds)

    def _through(
        self, job: WriteJob, *, failed: bool, posted: bool, size: int = 0, seconds: float = 0.0
    ) -> None:
        tally = Tally(1, int(failed), int(posted), 0 if failed else size, seconds)
        with self._lock:
            self._open.discard(job.xid)
            self._cancelled.discard(job.xid)
            self._report.sent.setdefault(job.xid, Tally()).add(tally)
        self._tell(job.xid, tally)

    def _read_notifications(self) -> None:
        for note in self._transport.notifications():
            announced = read_announcement(note)
            if announced is None:
                continue
            xid, rank = announced
            with self._lock:
                if xid in self._expected:
                    self._announced(xid, rank)
                else:
                    self._early.setdefault(xid, set()).add(rank)
                    while len(self._early) > EARLY_LIMIT:
                        self._early.popitem(last=False)

    def _announced(self, xid: str, rank: int) -> None:
        """Under the lock: a peer's rank has written its part. Told twice, it is still one rank."""
        awaited = self._expected.get(xid)
        if awaited is None:
            return
        awaited.missing.discard(rank)
        if awaited.missing:
            return
        del self._expected[xid]
        if awaited.request:
            self._finished.add(awaited.request)
        else:
            self._report.landed[xid] = self._report.landed.get(xid, 0) + 1

    def _fail(self, request: str) -> None:
        """Under the lock: report a load as failed, unless it has been reported as complete already."""
        if request in self._finished:
            self._failed.add(request)
        for xid, awaited in list(self._expected.items()):
            if awaited.request == request:
                del self._expected[xid]
                self._finished.add(request)
                self._failed.add(request)

    def _forget_peers(self) -> None:
        with self._lock:
            gone = set(self._forget)
        busy = {active.job.peer.engine_id for active in self._active.values()}
        busy |= {job.peer.engine_id for job, _ in self._connecting.values()}
        self._greeting = {engine: future for engine, future in self._greeting.items() if not future.done()}
        busy |= self._greeting.keys()
        for engine_id in gone - busy:
            self._transport.forget(engine_id)
            with self._lock:
                self._forget.discard(engine_id)
