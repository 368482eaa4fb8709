"""Engines without vLLM in one world: their network, their time, and the writes between their blocks.

The connector's own `Scheduler` runs in all. Every write checks that its target still belongs to its transfer.
"""

from __future__ import annotations

from typing import Any

from connector.tests.unit.sim_contents import Clock, ViolationError
from connector.tests.unit.sim_engine import FakeRequest, SimEngine
from connector.tests.unit.sim_network import Network
from connector.tests.unit.sim_worker import Write


class World:
    """A prefill engine, decode engines, their network and time."""

    def __init__(self, decodes: int = 1, total: int = 64, **config: Any) -> None:
        self.clock = Clock()
        self.network = Network(self.clock)
        self.config = config
        self.prefill = SimEngine("p", "prefill", self.network, total, **config)
        self.decodes = [SimEngine(f"d{i}", "decode", self.network, total, **config) for i in range(decodes)]
        self.dead: list[SimEngine] = []
        self._turns = 0

    @property
    def engines(self) -> list[SimEngine]:
        return [self.prefill, *self.decodes]

    def land(self, write: Write, *, fail: bool = False, announce: bool = True) -> None:
        """A posted write reaches its target (or breaks), and its writer sees that."""
        write.source.posted.remove(write)
        writer_lives = any(engine.worker is write.source for engine in self.engines)
        if writer_lives:
            now = [write.source.pool.content[block] for block in write.job.local]
            if now != write.contents:
                raise ViolationError(f"{write.job.xid}: a source block has changed during its write")
        arrived = not fail and self.put(write, announce=announce)
        if writer_lives:
            write.source.through(write, failed=not arrived)

    def put(self, write: Write, *, announce: bool = True) -> bool:
        """What was on its way arrives, without its writer; returns whether its target is still there."""
        target = next((e for e in self.engines if e.engine_id == write.job.peer.engine_id), None)
        if target is None:
            return False
        for block, content in zip(write.job.remote, write.contents, strict=True):
            self._check_owned(target, write.job.xid, block)
            target.pool.content[block] = content
        if announce:
            target.worker.announce(write.job.xid)
        return True

    def _check_owned(self, target: SimEngine, xid: str, block: int) -> None:
        """Nobody but the transfer's own request may be using the block that is written."""
        if target.pool.refs[block] == 0:
            raise ViolationError(f"{xid} writes into block {block} of {target.name}, which is free")
        if block in target.pool.hash_of:
            raise ViolationError(f"{xid} writes into block {block} of {target.name}, which is cached")
        for request in target.requests.values():
            if block in request.blocks and request.state != "loading":
                raise ViolationError(f"{xid} writes into a block of {request.id}, which is {request.state}")

    def turn(
        self,
        prompt: list[int],
        decode: SimEngine,
        tokens: int = 6,
        *,
        prefill_leg: bool = True,
        decode_leg: bool = True,
    ) -> str:
        """Both legs of a turn; returns the key they share."""
        self._turns += 1
        key = f"cmpl-{self._turns:032x}-0"
        if prefill_leg:
            params = {
                "do_remote_decode": True,
                "do_remote_prefill": False,
                "disagg": {"version": 1, "decode": {"host": decode.name, "control_port": 5700}},
            }
            self.prefill.add(FakeRequest(f"{key}-{1:08x}", prompt, 1, params))
        if decode_leg:
            params = {
                "do_remote_prefill": True,
                "do_remote_decode": False,
                "disagg": {"version": 1, "prefill": {"host": "p", "control_port": 5700}},
            }
            decode.add(FakeRequest(f"{key}-{2:08x}", prompt, tokens, params))
        return key

    def run(self, rounds: int = 50, seconds: float = 0.01) -> None:
        """Let everything go on without trouble for a while."""
        for _ in range(rounds):
            for engine in self.engines:
                if engine.wants_steps:
                    engine.step()
            self.network.deliver_all()
            for engine in [*self.engines, *self.dead]:
                for write in list(engine.worker.posted):
                    self.land(write)
            self.clock.now += seconds
            self._alarms()

    def run_without_landing(self, seconds: float = 0.01) -> None:
        """One round in which no write gets on."""
        for engine in self.engines:
            if engine.wants_steps:
                engine.step()
        self.network.deliver_all()
        self.clock.now += seconds
        self._alarms()

    def settle(self, seconds: float = 3000.0) -> None:
        """Let so much time pass that every lease and hold has ended."""
        end = self.clock.now + seconds
        while self.clock.now < end:
            if not self._idle:
                self.run(rounds=3)
            self.clock.now += 5.0
            self._alarms()

    @property
    def _idle(self) -> bool:
        """Nothing happens before the next alarm."""
        return not (
            self.network.messages
            or any(engine.worker.posted for engine in [*self.engines, *self.dead])
            or any(engine.wants_steps for engine in self.engines)
        )

    def _alarms(self) -> None:
        for engine in self.engines:
            if engine.channel.alarm is not None and self.clock.now >= engine.channel.alarm:
                engine.channel.alarm = None
                engine.step()

    def kill(self, engine: SimEngine) -> None:
        """The process is gone. What it had posted may still land."""
        self.dead.append(engine)
        engine.channel.waiting.clear()  # nobody is there to hear an answer
        if engine in self.decodes:
            self.decodes.remove(engine)
        del self.network.channels[engine.address]

    def check(self) -> None:
        for engine in self.engines:
            engine.check_cache()

    def check_nothing_leaks(self) -> None:
        for engine in self.engines:
            if engine.pool.free() != engine.pool.total:
                held = [b for b, refs in enumerate(engine.pool.refs) if refs]
                raise ViolationError(f"{engine.name} still holds blocks {held}")
