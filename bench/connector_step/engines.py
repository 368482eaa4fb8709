"""Two engines without a model: the connector's real schedulers, vLLM's real block pools where vLLM can be imported.

Messages are handed over as objects and writes are done at once, so that what is measured is the scheduler's side
alone. Every hook is called as vLLM calls it, and its CPU time is noted.
"""

from __future__ import annotations

import hashlib
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from disagg_connector.config import ConnectorConfig, Role
from disagg_connector.context import Board
from disagg_connector.hashes import Fingerprint
from disagg_connector.ports import Inbound, Outcome, Tally, WorkerReport
from disagg_connector.protocol import Address, Peer
from disagg_connector.ranks import Sharding
from disagg_connector.scheduler import FastAnswers, Identity, Scheduler

BLOCK = 16
STEP_SECONDS = 0.02
"""What a step of a real engine would take; drives leases and status questions."""
STEP_HOOKS = ("needs_steps", "orders", "reported", "step_is_over")
TURN_HOOKS = ("arrived", "matched_tokens", "allocated", "finished")


# --- Blocks ---------------------------------------------------------------------------------------


class RealBlocks:
    """vLLM's block pool, as the engine uses it and as the connector sees it."""

    name = "vLLM's"

    def __init__(self, total: int) -> None:
        from vllm.v1.core import kv_cache_utils
        from vllm.v1.core.block_pool import BlockPool

        from disagg_connector.compat import load

        self._key = kv_cache_utils.make_block_hash_with_group_id
        self._pool = BlockPool(total + 1, True, BLOCK)
        self.seen = load().EnginePool(self._pool)

    def allocate(self, count: int) -> list[int]:
        return [block.block_id for block in self._pool.get_new_blocks(count)]

    def publish(self, block_hash: bytes, block: int, num_tokens: int) -> None:
        self._pool._insert_block_hash(
            self._key(block_hash, 0), self._pool.blocks[block], num_tokens=num_tokens
        )


class FakeBlocks:
    """The pool of the connector's own tests."""

    name = "the tests'"

    def __init__(self, total: int) -> None:
        from connector.tests.unit.sim_pool import FakePool

        self.seen = FakePool(total)

    def allocate(self, count: int) -> list[int]:
        return self.seen.take(count, 0)

    def publish(self, block_hash: bytes, block: int, num_tokens: int) -> None:
        self.seen.insert(block_hash, block, num_tokens)


def blocks_class() -> type[RealBlocks] | type[FakeBlocks]:
    """vLLM's pool if this interpreter has it."""
    try:
        import vllm.v1.core.block_pool  # noqa: F401
    except ImportError:
        return FakeBlocks
    return RealBlocks


# --- Requests -------------------------------------------------------------------------------------


@dataclass
class Request:
    """A request and the view of it; every property costs as little as vLLM's own."""

    id: str
    seed: bytes
    num_prompt_tokens: int
    max_tokens: int
    num_tokens: int = 0
    num_valid_tokens: int = 0
    hashes: list[bytes] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    state: str = "waiting"

    def __post_init__(self) -> None:
        self.num_tokens = self.num_prompt_tokens
        self.extend()

    def extend(self) -> None:
        while (len(self.hashes) + 1) * BLOCK <= self.num_tokens:
            parent = self.hashes[-1] if self.hashes else self.seed
            self.hashes.append(hashlib.sha256(parent).digest())

    def prompt_digest(self) -> bytes:
        return hashlib.sha256(self.seed).digest()

    def token_ids(self, start: int, end: int) -> Sequence[int]:
        return range(start, end)


# --- Channel --------------------------------------------------------------------------------------


class Wire:
    """Messages under way, and who is at which address."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.channels: dict[Address, Channel] = {}
        self.messages: deque[Callable[[], None]] = deque()

    def deliver(self) -> None:
        for _ in range(len(self.messages)):
            self.messages.popleft()()


class Channel:
    """`ports.Inbox` whose messages arrive between steps. Nothing is lost, so nothing expires."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._events: list[Any] = []
        self.fast: Callable[[Any], Any] = lambda message: None

    def request(
        self,
        to: Address,
        message: Any,
        timeout: float,
        on_reply: Callable[[Any], None],
        at_once: Callable[[Any], None] | None = None,
    ) -> None:
        def reply(body: Any) -> None:
            self._wire.messages.append(lambda: self._events.append(Outcome(lambda: on_reply(body))))

        def arrive() -> None:
            there = self._wire.channels[to]
            body = there.fast(message)
            if body is None:
                there._events.append(Inbound(reply, message))  # type: ignore[arg-type]  # any token will do
            else:
                reply(body)

        self._wire.messages.append(arrive)

    def answer(self, token: Any, reply: Any) -> None:
        token(reply)

    def probe(self, address: Address, on_refused: Callable[[], None]) -> None: ...

    def drain(self) -> list[Any]:
        events, self._events = self._events, []
        return events

    @property
    def has_events(self) -> bool:
        return bool(self._events)

    def wake_at(self, when: float | None) -> None: ...


def fingerprint() -> Fingerprint:
    """The same for all engines here, whatever parts it has."""
    parts: dict[str, Any] = {
        name: 1 if kind == "int" else "x" for name, kind in Fingerprint.__annotations__.items()
    }
    return Fingerprint(**parts)


# --- Engines --------------------------------------------------------------------------------------


class Engine:
    """One engine of one rank: admits, computes a token a step for every running request, ends them."""

    def __init__(self, role: Role, wire: Wire, total: int, **config: Any) -> None:
        self.address = Address(role, 5700)
        self.engine_id = f"{role}-boot"
        self.blocks = blocks_class()(total)
        self.requests: dict[str, Request] = {}
        self.waiting: dict[str, Request] = {}
        self.running: dict[str, Request] = {}
        self.spent: dict[str, list[int]] = defaultdict(list)
        self.writes_held_back = False
        self._wire = wire
        self._writes: list[Any] = []
        self._report = WorkerReport()
        self._received: set[str] = set()
        self._expected: dict[str, str] = {}
        made = fingerprint()
        parsed = ConnectorConfig(role=role, **config)
        board = Board(lambda: wire.now)
        identity = Identity(
            lambda: made, lambda digest: Peer(self.engine_id, self.address, role, 5600, 1, digest)
        )
        self.channel = wire.channels[self.address] = Channel(wire)
        fast = FastAnswers(parsed, self.engine_id, identity, board)
        self.channel.fast = fast
        self.scheduler = Scheduler(
            parsed, BLOCK, Sharding(1, 1), identity, self.channel, board, self.blocks.seen, lambda: wire.now
        )
        fast.peek = self.scheduler.offers.peek

    def _timed(self, hook: str, *arguments: Any) -> Any:
        call = getattr(self.scheduler, hook)
        start = time.thread_time_ns()
        result = call(*arguments)
        self.spent[hook].append(time.thread_time_ns() - start)
        return result

    def add(self, request: Request, params: Any) -> None:
        self.requests[request.id] = self.waiting[request.id] = request
        self._timed("arrived", request, params, True)

    def step(self) -> None:
        """One engine step, hooks in vLLM's order."""
        start = time.thread_time_ns()
        _ = self.scheduler.needs_steps
        self.spent["needs_steps"].append(time.thread_time_ns() - start)
        for request in list(self.waiting.values()):
            self._admit(request)
        self._work(self._timed("orders"))
        ended = [request for request in self.running.values() if self._compute(request)]
        report, self._report = self._report, WorkerReport()
        received, self._received = self._received, set()
        self._timed("reported", None if report.empty else report, received, set())
        for request_id in received:
            request = self.requests[request_id]
            request.num_valid_tokens = request.num_prompt_tokens - 1
            self.running[request_id] = request
        self._timed("step_is_over")
        for request in ended:
            self._finish(request)

    def _admit(self, request: Request) -> None:
        view = self.blocks.seen
        local = 0
        while local < (request.num_tokens - 1) // BLOCK and view.find(request.hashes[local]) is not None:
            local += 1
        external, is_async = self._timed("matched_tokens", request, local * BLOCK)
        if external is None:
            return
        found = [view.find(block_hash) for block_hash in request.hashes[:local]]
        hits = [block for block in found if block is not None]
        view.pin(hits)
        request.blocks = hits + self.blocks.allocate(-(-request.num_tokens // BLOCK) - local)
        self._timed("allocated", request, request.blocks, external)
        del self.waiting[request.id]
        if not is_async:
            self.running[request.id] = request

    def _compute(self, request: Request) -> bool:
        """A token more; True if it was the last."""
        known = min(len(request.hashes), request.num_valid_tokens // BLOCK)
        request.num_valid_tokens = request.num_tokens
        for index in range(known, min(len(request.hashes), request.num_valid_tokens // BLOCK)):
            self.blocks.publish(request.hashes[index], request.blocks[index], (index + 1) * BLOCK)
        request.num_tokens += 1
        request.extend()
        if request.num_tokens > len(request.blocks) * BLOCK:
            request.blocks += self.blocks.allocate(1)
        return request.num_tokens - request.num_prompt_tokens >= request.max_tokens

    def _finish(self, request: Request) -> None:
        self._timed("finished", request, request.blocks, "complete")
        self.blocks.seen.unpin(request.blocks)
        del self.requests[request.id], self.running[request.id]

    def _work(self, orders: Any) -> None:
        """What the worker does: writes are through at once, unless they are held back."""
        for item in orders.expect:
            self._expected[item.xid] = item.request
        self._writes += orders.writes
        if not self.writes_held_back:
            for job in self._writes:
                self._report.merge(WorkerReport(sent={job.xid: Tally(1, 0, 1, 10)}))
                self._wire.messages.append(lambda job=job: self._land(job))  # type: ignore[misc]
            self._writes = []

    def _land(self, job: Any) -> None:
        self._wire.channels[job.peer.address].owner._announced(job.xid)  # type: ignore[attr-defined]

    def _announced(self, xid: str) -> None:
        request_id = self._expected.pop(xid, "")
        if request_id:
            self._received.add(request_id)
        else:
            self._report.landed[xid] = 1


class Pair:
    """A prefill and a decode engine that exchange turns."""

    def __init__(self, total: int, **config: Any) -> None:
        self.wire = Wire()
        self.prefill = Engine("prefill", self.wire, total, **config)
        self.decode = Engine("decode", self.wire, total, **config)
        for engine in (self.prefill, self.decode):
            engine.channel.owner = engine  # type: ignore[attr-defined]
        self._turns = 0

    @property
    def engines(self) -> tuple[Engine, Engine]:
        return self.prefill, self.decode

    def turn(self, prompt: int, tokens: int, *, prefill_tokens: int = 1, legs: str = "both") -> None:
        """A turn of so many prompt tokens, with a prompt of its own."""
        self._turns += 1
        key, seed = f"cmpl-{self._turns:032x}-0", self._turns.to_bytes(32, "big")
        if legs != "decode":
            at = {"host": "decode", "control_port": 5700}
            params = {"do_remote_decode": True, "disagg": {"version": 1, "decode": at}}
            self.prefill.add(Request(f"{key}-{1:08x}", seed, prompt, prefill_tokens), params)
        if legs != "prefill":
            at = {"host": "prefill", "control_port": 5700}
            params = {"do_remote_prefill": True, "disagg": {"version": 1, "prefill": at}}
            self.decode.add(Request(f"{key}-{2:08x}", seed, prompt, tokens), params)

    def round(self) -> None:
        """One step of each engine, and what passes between them."""
        for engine in self.engines:
            engine.step()
        self.wire.deliver()
        self.wire.now += STEP_SECONDS
