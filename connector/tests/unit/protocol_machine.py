"""One prefill and two decode engines as a state machine that hypothesis explores.

A rule is one thing that can happen: a turn begins, an engine steps, a message arrives, is lost, arrives twice or
overtakes others, a write lands (in time, late, never, unannounced), an engine dies and comes back as another
boot, caches are reset, requests are preempted or left by their clients, time passes. `run_up_to` lets all go on
without trouble until the next message of a kind is on its way, so that trouble strikes at any point between
OFFER, GRANT, WRITE, COMMIT and ABORT although most of what is random never gets that far.

After every rule the invariants hold; in the end, without any more trouble, everything is free again.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from connector.tests.unit.sim_contents import ViolationError, answer
from connector.tests.unit.sim_engine import FakeRequest, SimEngine
from connector.tests.unit.sim_network import Message
from connector.tests.unit.sim_worker import Write
from connector.tests.unit.simulation import World

# How long data may still be on its way after its writer has reported it, or has died.
REPORTED_LATE = 1.0
DEAD_LATE = 5.0

MESSAGES = (
    "Hello", "Welcome", "Load", "Accepted", "Status", "StatusReply", "Want", "Held", "Offer", "Grant",
    "Commit", "Committed", "Cancel", "Released", "Refused",
)  # fmt: skip
WRITES = ("write of p", "write of d0", "write of d1")

ANSWER = 4
STREAMED_ANSWER = 14
LONGEST = 36
OPEN_REQUESTS = 12
ENGINES = st.integers(0, 2)
DECODES = st.integers(0, 1)
# Which of what there is, modulo how much there is: small values shrink well.
PICKS = st.integers(0, 5)
Turn = tuple[int, int, int, int]
# Of which conversation, on which decode engine, how many new tokens, and which legs come.
TURNS = st.tuples(st.integers(0, 1), DECODES, st.integers(1, 6), st.integers(0, 7))


def owners(engine: SimEngine) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Everything that holds blocks of an engine, each once per reference."""
    scheduler = engine.scheduler
    for request in [*engine.requests.values(), *(r for r in engine.done.values() if r.state == "kept")]:
        yield request.id, tuple(request.blocks)
    for prompt in scheduler.prefill._prompts.values():
        yield "prompt", prompt.blocks
    for reserved in scheduler.context.sender._reserved.values():
        yield "reserved", reserved.blocks
    for sending in scheduler.context.sender._sending.values():
        yield "sending", sending.job.local
    for landing in scheduler.writeback._landings.by_xid.values():
        yield "landing", landing.blocks
        yield "prefix", landing.prefix
    yield "reserve", tuple(scheduler.writeback._reserve)
    for held in scheduler.context.held._held.values():
        yield "held", held.blocks


def check_ownership(engine: SimEngine) -> None:
    """Every reference has an owner, and where a peer may write there is no second one."""
    counts: Counter[int] = Counter()
    for _, blocks in owners(engine):
        counts.update(blocks)
    if any(counts[block] != refs for block, refs in enumerate(engine.pool.refs)):
        raise ViolationError(f"{engine.name}: references {engine.pool.refs}, owners {list(owners(engine))}")
    for who, blocks in owners(engine):
        if who == "landing" and any(counts[block] != 1 for block in blocks):
            raise ViolationError(f"{engine.name}: landing blocks {blocks} have other users")


class _Survived(logging.Handler):
    """Errors that the connector has logged and lived through: here they are failures."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.records: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[1] is not None:
            self.records.append(f"{record.getMessage()}: {record.exc_info[1]!r}")


class ProtocolMachine(RuleBasedStateMachine):
    """See the module's docstring."""

    def __init__(self) -> None:
        super().__init__()
        self.survived = _Survived()
        logging.getLogger("disagg_connector").addHandler(self.survived)
        self.late: list[tuple[float, Write]] = []
        self.kept_back: list[Message] = []
        self.boots = 0
        self.histories: list[list[int]] = [[1] * 9, [2] * 6]

    @initialize(
        total=st.sampled_from([18, 40, 80]),
        acquainted=st.booleans(),
        streaming=st.booleans(),
        link=st.booleans(),
    )
    def begin(self, total: int, acquainted: bool, streaming: bool = False, link: bool = True) -> None:
        self.answer_tokens = STREAMED_ANSWER if streaming else ANSWER
        mode: dict[str, Any] = (
            {"writeback_mode": "streaming", "writeback_batch_blocks": 1} if streaming else {}
        )
        self.world = World(
            decodes=2, total=total, kv_lease_duration=20, load_timeout_seconds=8, link=link, **mode
        )
        if acquainted:
            for decode in self.world.decodes:
                self.world.turn([0, 0, 0, 0, 0], decode, 1)
            self.world.run(rounds=15)

    # --- What happens in any case -----------------------------------------------------------------

    @precondition(lambda self: sum(len(engine.requests) for engine in self.world.engines) < OPEN_REQUESTS)
    @rule(turn=TURNS)
    def turn(self, turn: Turn) -> None:
        """A conversation goes on, on either decode engine; one of the legs may never come, or come twice."""
        history, decode, more, legs = turn
        prompt = self.histories[history] + [more] * more
        if len(prompt) > LONGEST:
            prompt = self.histories[history][:5]
        self.histories[history] = prompt + answer(prompt, self.answer_tokens)
        engine = self.world.decodes[decode]
        key = self.world.turn(prompt, engine, self.answer_tokens, prefill_leg=legs != 7, decode_leg=legs != 6)
        if legs == 5:
            leg = engine.requests[f"{key}-{2:08x}"]
            engine.add(FakeRequest(f"1_{key}-{3:08x}", prompt, self.answer_tokens, leg.params))

    @rule(rounds=st.integers(1, 6), pace=st.sampled_from([0.01, 0.3]))
    def go_on(self, rounds: int, pace: float) -> None:
        for _ in range(rounds):
            self.world.run(rounds=1, seconds=pace)
            self.land_what_is_late()

    @rule(seconds=st.sampled_from([2, 5, 12, 25]))
    def stall(self, seconds: int) -> None:
        """Everything goes on but the writes."""
        for _ in range(seconds * 2):
            for engine in self.world.engines:
                if engine.wants_steps:
                    engine.step()
            self.world.network.deliver_all()
            self.pass_time(0.5)

    @rule(what=st.sampled_from(MESSAGES + WRITES))
    def run_up_to(self, what: str) -> None:
        for _ in range(30):
            for engine in self.world.engines:
                if engine.wants_steps:
                    engine.step()
                if self.is_there(what):
                    return
            while self.world.network.messages:
                self.world.network.messages.pop(0).deliver()
                if self.is_there(what):
                    return
            for write in self.writes():
                self.world.land(write)
            self.pass_time(0.02)

    @rule(engine=ENGINES)
    def step(self, engine: int) -> None:
        self.world.engines[engine].step()

    @precondition(lambda self: self.world.network.messages)
    @rule(pick=PICKS)
    def deliver(self, pick: int) -> None:
        """Not always the oldest first: messages overtake each other."""
        self.take_message(pick).deliver()

    @precondition(lambda self: self.writes())
    @rule(pick=PICKS)
    def land(self, pick: int) -> None:
        self.world.land(self.pick_write(pick))

    @rule(tenths=st.integers(1, 30))
    def wait(self, tenths: int) -> None:
        self.pass_time(tenths / 10)

    # --- Trouble ----------------------------------------------------------------------------------

    @rule(what=st.sampled_from(MESSAGES), trouble=st.sampled_from(("lose", "twice", "later")), turn=TURNS)
    def trouble_with_a_message(self, what: str, trouble: str, turn: Turn) -> None:
        self.begin_if_idle(turn)
        self.run_up_to(what)
        there = [message for message in self.world.network.messages if message.text == what]
        if not there:
            return
        if trouble != "twice":
            self.world.network.messages.remove(there[0])
        if trouble == "twice":
            there[0].deliver()
        elif trouble == "later":
            self.kept_back.append(there[0])

    @rule(
        what=st.sampled_from(WRITES), trouble=st.sampled_from(("late", "broken", "silent", "crash")),
        turn=TURNS, tenths=st.integers(0, 10), failed=st.booleans(),
    )  # fmt: skip
    def trouble_with_a_write(self, what: str, trouble: str, turn: Turn, tenths: int, failed: bool) -> None:
        self.begin_if_idle(turn)
        self.run_up_to(what)
        for write in [write for write in self.writes() if f"write of {write.source.name}" == what][:1]:
            match trouble:
                case "late":
                    self.let_land_late(write, tenths, failed)
                case "broken":
                    self.world.land(write, fail=True)
                case "silent":
                    self.world.land(write, announce=False)
                case "crash":
                    writers = [engine.worker for engine in self.world.engines]
                    self.crash(writers.index(write.source), not failed, tenths)

    @rule(
        what=st.sampled_from(MESSAGES + WRITES), trouble=st.sampled_from(("crash", "reset", "weights", "leave", "preempt")),
        turn=TURNS, engine=ENGINES, pick=PICKS,
    )  # fmt: skip
    def trouble_with_an_engine(self, what: str, trouble: str, turn: Turn, engine: int, pick: int) -> None:
        self.begin_if_idle(turn)
        self.run_up_to(what)
        match trouble:
            case "crash":
                self.crash(engine, pick % 2 == 0, pick * 2)
            case "reset":
                self.reset(engine, pick % 2 == 0)
            case "weights":
                self.change_weights({engine} if pick % 3 else {0, 1, 2}, pick % 2 == 0)
            case "leave":
                self.leave(engine, pick)
            case "preempt":
                self.preempt(engine, pick)

    @precondition(lambda self: self.kept_back)
    @rule(pick=PICKS)
    def deliver_at_last(self, pick: int) -> None:
        """Others have overtaken it meanwhile, and its sender may have died."""
        self.kept_back.pop(pick % len(self.kept_back)).deliver()

    @rule(engine=ENGINES, still_lands=st.booleans(), tenths=st.integers(0, 10))
    def crash(self, engine: int, still_lands: bool, tenths: int) -> None:
        """The process is gone, another boot is at its address; what was posted may still land."""
        world, dead = self.world, self.world.engines[engine]
        world.kill(dead)
        end = world.clock() + tenths / 10 * DEAD_LATE
        self.late = [(min(at, end) if w.source is dead.worker else at, w) for at, w in self.late]
        self.late += [(end, write) for write in dead.worker.posted if still_lands]
        dead.worker.posted.clear()
        self.boots += 1
        again = SimEngine(dead.name, dead.role, world.network, dead.pool.total, self.boots, **world.config)
        if dead.role == "prefill":
            world.prefill = again
        else:
            world.decodes.append(again)
            world.decodes.sort(key=lambda decode: decode.name)

    @rule(decode=DECODES, with_an_order=st.booleans())
    def lose_link(self, decode: int, with_an_order: bool) -> None:
        """The ranks of a decode engine get and tell nothing between steps any more, now or from the next order on."""
        link = self.world.decodes[decode].worker.link
        link.loses_next = True
        link.is_lost |= not with_an_order

    @rule(engine=ENGINES, preempting=st.booleans())
    def reset(self, engine: int, preempting: bool) -> None:
        self.world.engines[engine].reset(preempting)

    @rule(engine=ENGINES, pick=PICKS)
    def preempt(self, engine: int, pick: int) -> None:
        target = self.world.engines[engine]
        running = [request for request in target.requests.values() if request.state == "running"]
        if running:
            target._preempt(running[pick % len(running)])

    @rule(engines=st.sets(ENGINES, min_size=1), patient=st.booleans())
    def change_weights(self, engines: set[int], patient: bool) -> None:
        """As it should be done, paused and with a cleared cache, or without any care."""
        chosen = [self.world.engines[engine] for engine in sorted(engines)]
        if patient:
            for engine in chosen:
                engine.pause()
            for _ in range(40):
                self.go_on(1, 0.3)
            for engine in chosen:
                engine.reset()
        for engine in chosen:
            engine.change_weights()
        for engine in chosen:
            engine.resume()

    @rule(engine=ENGINES, pick=PICKS)
    def leave(self, engine: int, pick: int) -> None:
        target = self.world.engines[engine]
        if target.requests:
            target.abort(list(target.requests)[pick % len(target.requests)])

    # --- What must hold ---------------------------------------------------------------------------

    @invariant()
    def everything_is_as_it_must_be(self) -> None:
        if self.survived.records:
            raise ViolationError(self.survived.records[0])
        for engine in self.engines():
            check_ownership(engine)
            engine.check_cache()

    def teardown(self) -> None:
        logging.getLogger("disagg_connector").removeHandler(self.survived)
        if not hasattr(self, "world"):
            return
        for _ in range(200):
            self.land_what_is_late()
            self.world.run(rounds=1, seconds=0.3)
            if not any(engine.wants_steps for engine in self.world.engines):
                break
        self.world.settle(150)
        self.everything_is_as_it_must_be()
        self.world.check_nothing_leaks()
        for engine in self.world.engines:
            if engine.requests or not engine.scheduler.context.held.empty:
                raise ViolationError(f"{engine.name} never ended {list(engine.requests)}")

    # --- Helpers ----------------------------------------------------------------------------------

    def engines(self) -> list[SimEngine]:
        return self.world.engines if hasattr(self, "world") else []

    def is_there(self, what: str) -> bool:
        if what in WRITES:
            return any(write.source.name == what.rpartition(" ")[2] for write in self.writes())
        return any(message.text == what for message in self.world.network.messages)

    def writes(self) -> list[Write]:
        return [write for engine in self.world.engines for write in engine.worker.posted]

    def pick_write(self, pick: int) -> Write:
        writes = self.writes()
        return writes[pick % len(writes)]

    def begin_if_idle(self, turn: Turn) -> None:
        if not any(engine.requests for engine in self.world.engines):
            self.turn(turn)

    def let_land_late(self, write: Write, tenths: int, failed: bool) -> None:
        """The writer sees its write through before the data is there, as over some fabrics."""
        write.source.posted.remove(write)
        write.source.through(write, failed=failed)
        self.late.append((self.world.clock() + tenths / 10 * REPORTED_LATE, write))

    def take_message(self, pick: int) -> Message:
        messages = self.world.network.messages
        return messages.pop(pick % len(messages))

    def pass_time(self, seconds: float) -> None:
        self.world.clock.now += seconds
        # What is on its way arrives when it is due, whatever the engines do then.
        self.land_what_is_late()
        self.world._alarms()

    def land_what_is_late(self) -> None:
        now = self.world.clock()
        for item in [item for item in self.late if now >= item[0]]:
            self.late.remove(item)
            self.world.put(item[1])
