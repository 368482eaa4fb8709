"""An engine without vLLM: requests, steps and a block pool around the connector's own `Scheduler`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from connector.tests.unit.sim_contents import BLOCK, ViolationError, chain, kv, next_token
from connector.tests.unit.sim_network import FakeChannel, Network
from connector.tests.unit.sim_pool import FakePool
from connector.tests.unit.sim_worker import SimWorker
from disagg_connector.config import ConnectorConfig, Role
from disagg_connector.context import Board
from disagg_connector.counters import Counts, merge
from disagg_connector.hashes import Fingerprint
from disagg_connector.ports import FinishKind
from disagg_connector.protocol import Address, Peer
from disagg_connector.ranks import Sharding
from disagg_connector.scheduler import FastAnswers, Identity, Scheduler


@dataclass
class FakeRequest:
    """A request, and the `RequestView` of it."""

    id: str
    prompt: list[int]
    max_tokens: int
    params: Any = None
    generated: list[int] = field(default_factory=list)
    computed: int = 0
    state: str = "waiting"
    blocks: list[int] = field(default_factory=list)
    held: list[bytes] = field(default_factory=list)
    """What its blocks held when they were hit, loaded or computed."""

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.generated

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_valid_tokens(self) -> int:
        return self.computed

    @property
    def hashes(self) -> list[bytes]:
        return [h for i, h in enumerate(chain(self.tokens)) if (i + 1) * BLOCK <= self.num_tokens]

    def token_ids(self, start: int, end: int) -> list[int]:
        return self.tokens[start:end]

    def prompt_digest(self) -> bytes:
        return chain(self.prompt)[-1]


def fingerprint(model: str) -> Fingerprint:
    return Fingerprint(
        model=model, revision="r", weights="w", dtype="f", kv_dtype="k", kv_scales="",
        quantization="", rope="", draft="",
        block_size=BLOCK, hash_algorithm="sha256", none_hash="0", kv_layout="l",
        vllm="v", connector="c", wire=1,
    )  # fmt: skip


class SimEngine:
    """An engine of one rank."""

    def __init__(
        self,
        name: str,
        role: Role,
        network: Network,
        total: int,
        boot: int = 0,
        *,
        model: str = "m",
        link: bool = True,
        kv_events: bool = False,
        **config: Any,
    ) -> None:
        self.name, self.role = name, role
        self.address = Address(name, 5700)
        self.engine_id = f"{name}-boot{boot}"
        self.weights = 0
        self.dirty = False
        """KV of older weights may be in the cache and in use: that is the operator's choice, and stays here."""
        self.paused = False
        self.requests: dict[str, FakeRequest] = {}
        self.done: dict[str, FakeRequest] = {}
        self.counts: Counts = {}
        self.recomputed: list[str] = []
        self.pool = FakePool(total)
        self.pool.events = [] if kv_events else None
        self.channel = FakeChannel(self.engine_id, network)
        self.worker = SimWorker(name, role, self.pool, self.channel)
        self.config = ConnectorConfig(role=role, **config)
        board = Board(network.clock)
        identity = Identity(
            lambda: fingerprint(model),
            lambda d: Peer(self.engine_id, self.address, name, 5600, 1, d, events=self.pool.tells),
        )
        fast = FastAnswers(self.config, self.engine_id, identity, board)
        self.scheduler = Scheduler(
            self.config, BLOCK, Sharding(1, 1), identity, self.channel, board, self.pool, network.clock,
            self.worker.link if link and role == "decode" else None,
        )  # fmt: skip
        fast.peek = self.scheduler.offers.peek
        self.channel.fast = fast
        self.channel.epoch = lambda: self.scheduler.context.epochs.epoch
        self.worker.told = lambda xid, tally: self.scheduler.context.direct.told(0, xid, tally)
        network.channels[self.address] = self.channel

    def add(self, request: FakeRequest) -> FakeRequest:
        self.requests[request.id] = request
        self.scheduler.arrived(request, request.params, True)
        return request

    def abort(self, request_id: str) -> None:
        request = self.requests[request_id]
        held_back = request.state == "loading" and request_id not in self.worker.received
        self._finish(request, "aborted", keep=held_back)

    def step(self) -> None:
        """One engine step, with what vLLM does in it in vLLM's order."""
        for request in list(self.requests.values()):
            if request.state == "loaded":
                request.computed = request.num_prompt_tokens - 1
                self.scheduler.allocated(request, request.blocks, 0)
                self._publish(request, request.num_prompt_tokens)
                request.state = "running"
            elif request.state == "waiting" and not self.paused:
                self._admit(request)
        for request in list(self.requests.values()):
            while request.state == "running" and not self._make_room(request):
                self._preempt([r for r in self.requests.values() if r.state == "running"][-1])
        running = [r for r in self.requests.values() if r.state == "running"]
        for request in running:
            self._publish(request, request.num_tokens)
        self.worker.work(self.scheduler.orders())
        for request in running:
            self._compute(request)
        self._after_step()
        for request in running:
            if len(request.generated) >= request.max_tokens:
                self._finish(request, "complete")

    def reset(self, preempting: bool = False) -> bool:
        """What vLLM's reset_prefix_cache does, with or without `reset_running_requests`, seen from here."""
        if preempting:
            for request in [r for r in self.requests.values() if r.state == "running"]:
                self._preempt(request)
        self.scheduler.lifecycle.resetting()
        if self.pool.free() != self.pool.total:
            return False
        self.pool.reset()
        self.scheduler.lifecycle.was_reset()
        self.dirty = False
        return True

    def pause(self) -> None:
        """What a pause that clears the cache does at its begin: nothing that is there goes on."""
        self.paused = True
        self.scheduler.lifecycle.pausing()
        for request_id in list(self.requests):
            self.abort(request_id)

    def resume(self) -> None:
        self.paused = False
        self.scheduler.lifecycle.resumed()

    def change_weights(self) -> None:
        """New weights, whatever is in the cache and running now; vLLM itself goes on with that."""
        self.scheduler.lifecycle.changing_weights()
        self.weights += 1
        self.dirty = self.dirty or not self.pool.pristine
        self.scheduler.lifecycle.changed_weights()

    def check_cache(self) -> None:
        if not self.dirty:
            self.pool.check_cache(self.weights)

    @property
    def wants_steps(self) -> bool:
        return bool(self.requests) or self.scheduler.needs_steps

    def _admit(self, request: FakeRequest) -> None:
        limit = (request.num_tokens - 1) // BLOCK
        local: list[int] = []
        for block_hash in request.hashes[:limit]:
            block = self.pool.find(block_hash)
            if block is None:
                break
            local.append(block)
        external, is_async = self.scheduler.matched_tokens(request, len(local) * BLOCK)
        if external is None:
            return
        end = len(local) * BLOCK + external if is_async else request.num_tokens
        missing = -(-end // BLOCK) - len(local)
        self.pool.pin(local)
        if missing > self.pool.free():
            self.pool.unpin(local)
            return
        request.blocks = local + self.pool.take(missing)
        request.held = [self.pool.content[block] for block in local]
        if not self.dirty and request.held != kv(request.tokens, self.weights)[: len(local)]:
            raise ViolationError(f"{self.name}: a hit for {request.id} holds other KV")
        self.scheduler.allocated(request, request.blocks, external)
        request.computed = len(local) * BLOCK
        request.state = "loading" if is_async else "running"

    def _take_up(self, request: FakeRequest) -> None:
        """A load is complete: from here on its blocks are the request's like any other."""
        request.state = "loaded"
        self.channel.check_epoch(self.worker.loaded_by[request.id], 0)
        request.held = [self.pool.content[block] for block in request.blocks]
        if request.held != kv(request.prompt, self.weights):
            raise ViolationError(f"{self.name}: what was loaded for {request.id} is other KV")

    def _make_room(self, request: FakeRequest) -> bool:
        missing = -(-request.num_tokens // BLOCK) - len(request.blocks)
        if missing > self.pool.free():
            return False
        request.blocks += self.pool.take(missing)
        return True

    def _preempt(self, request: FakeRequest) -> None:
        self.pool.unpin(request.blocks)
        request.blocks, request.computed, request.state = [], 0, "waiting"

    def _publish(self, request: FakeRequest, num_tokens: int) -> None:
        """Hashes become visible before the KV is computed, as in vLLM."""
        for index, block_hash in enumerate(request.hashes[: num_tokens // BLOCK]):
            if request.blocks[index] not in self.pool.hash_of:
                self.pool.insert(block_hash, request.blocks[index], (index + 1) * BLOCK)
                self.pool.landed.discard(request.blocks[index])

    def _compute(self, request: FakeRequest) -> None:
        contents = kv(request.tokens, self.weights)
        for block, content in zip(request.blocks, request.held, strict=False):
            if self.pool.content[block] != content:
                raise ViolationError(f"{self.name}: {request.id} goes on from other KV than its own")
        first = request.computed // BLOCK
        for index in range(first, len(contents)):
            self.pool.content[request.blocks[index]] = contents[index]
        request.held[first:] = contents[first:]
        request.computed = request.num_tokens
        request.generated.append(next_token(request.tokens))

    def _after_step(self) -> None:
        report, received, failed = self.worker.reported()
        for request_id in failed & received:
            request = self.requests.get(request_id)
            if request is not None and request.state == "loading":
                # vLLM frees all blocks, the request's local hits included, and starts again.
                self._preempt(request)
                self.recomputed.append(request_id)
        self.scheduler.reported(None if report.empty else report, received, failed)
        for request_id in received - failed:
            request = self.requests.get(request_id)
            if request is not None and request.state == "loading":
                self._take_up(request)
        for request_id in received:
            kept = self.done.get(request_id)
            if kept is not None and kept.state == "kept":
                self.pool.unpin(kept.blocks)
                kept.state = "over"
        merge(self.counts, self.scheduler.step_is_over())

    def _finish(self, request: FakeRequest, kind: FinishKind, keep: bool = False) -> None:
        self.scheduler.finished(request, request.blocks, kind)
        del self.requests[request.id]
        self.done[request.id] = request
        request.state = "kept" if keep else "over"
        if not keep:
            self.pool.unpin(request.blocks)
