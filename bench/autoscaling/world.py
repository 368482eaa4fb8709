"""Routers, pods and clients in simulated time, and a rule that sizes the pools.

The router chooses as the project's own does (disagg_router.pick: rendezvous hashing with bounded loads, the last turn's pods first), for every rule.
KV goes both ways for every rule too: decode writes a turn's end back to its prefill pod, and gives a conversation's KV to another one that
asks. What a rule decides is the number of pods, nothing else.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import count
from math import ceil
from typing import TypeVar

from bench.autoscaling.clock import Clock
from bench.autoscaling.engines import Decode, Pod, Prefill, State
from bench.autoscaling.figures import Engine
from bench.autoscaling.rules import WINDOW, Counters, DecodePod, PrefillPod, Rule, Seen
from bench.autoscaling.traces import Trace
from bench.autoscaling.turns import Conversation, Request, Script, Turned
from disagg_operator.naming import ENGINES, Component
from disagg_operator.scaling.inputs import Sizes
from disagg_router.pick import rank as _rank

rank = lru_cache(1 << 18)(_rank)
_NEW, _KNOWN = (1.25, 1), (1.5, 8)
"""disagg_router.pick's bounds (factor of the mean, floor) of turns in flight; a test compares the choices."""


@dataclass(frozen=True, slots=True)
class Sized:
    """The pools at one time: as decided, and the pods that cost (those that start or drain do)."""

    at: float
    decided: Sizes
    present: Sizes


@dataclass(frozen=True, slots=True)
class Load:
    """What there was to do: prompt tokens computed per second in the last minute, and KV of what runs or waits on decode."""

    at: float
    computed: float
    kv_tokens: float


@dataclass
class Result:
    """A run."""

    turns: list[Turned] = field(default_factory=list)
    sizes: list[Sized] = field(default_factory=list)
    counters: Counters = field(default_factory=Counters)
    loads: list[Load] = field(default_factory=list)
    reuse: list[tuple[float, float]] = field(default_factory=list)
    """By time."""


_P = TypeVar("_P", bound=Pod)


def choose(pods: Sequence[_P], name: bytes, wanted: str | None, known: bool) -> _P | None:
    """Of those that take turns, the last turn's or the first in the conversation's order that is not overloaded."""
    factor, floor = _KNOWN if known else _NEW
    total = sum(pod.inflight for pod in pods)
    if not pods:
        return None
    limit = max(floor, ceil(factor * (total + 1) / len(pods)))
    for pod in pods:
        if pod.name == wanted and pod.inflight < limit:
            return pod
    return max(
        (pod for pod in pods if pod.inflight < limit and pod.name != wanted),
        key=lambda pod: rank(name, pod.name),
    )


class World:
    """One trace under one rule."""

    def __init__(self, trace: Trace, rule: Rule, engine: Engine) -> None:
        self.clock = Clock()
        self.result = Result()
        self._trace, self._rule, self._engine = trace, rule, engine
        self._start = trace.start or engine.start
        self._by_name: dict[str, Prefill | Decode] = {}
        """All but those that are gone."""
        self._ready_prefills: list[Prefill] = []
        self._ready_decodes: list[Decode] = []
        self._sizes = Sizes(0, 0)
        self._held_back: list[Request] = []
        """Turns for which there is no pod."""
        self._snapshots: deque[tuple[float, Counters]] = deque()
        self._ttfts: deque[tuple[float, float]] = deque()
        self._itls: deque[tuple[float, float]] = deque()
        self._flushed = False

    def run(self) -> Result:
        """From the beginning to the trace's end."""
        trace, clock = self._trace, self.clock
        self._resize(Sizes(*trace.first_sizes), at_once=True)
        for script in trace.scripts:
            clock.at(script.begins, self._begin, script)
        if trace.flush_at is not None:
            clock.at(trace.flush_at, self._flush)
        for when, role, ordinal in trace.losses:
            clock.at(when, self._lose, role, ordinal)
        clock.at(0.0, self._tick)
        clock.run(trace.seconds)
        return self.result

    # Turns

    def _begin(self, script: Script) -> None:
        self._send(Conversation(script))

    def _send(self, conversation: Conversation) -> None:
        turn = conversation.script.turns[conversation.turn]
        prompt = turn.new + (conversation.tokens or self._trace.system)
        outcome = Turned(self.clock.now)
        self.result.turns.append(outcome)
        counters = self.result.counters
        counters.offered += prompt
        counters.sent += 1
        self._dispatch(Request(conversation, outcome, prompt, turn.answer))

    def _dispatch(self, request: Request) -> None:
        conversation = request.conversation
        name, known = conversation.script.name, conversation.turn > 0
        decode = choose(self._ready_decodes, name, conversation.decode, known)
        prefill = choose(self._ready_prefills, name, conversation.prefill, known)
        if decode is None or prefill is None:
            self._held_back.append(request)
            return
        request.decode, request.prefill = decode, prefill
        decode.inflight += 1
        prefill.inflight += 1
        seconds = self._engine.front + self._prepare(request, prefill)
        prefill.coming += request.left
        self.clock.after(seconds, self._arrive, request, prefill)

    def _prepare(self, request: Request, prefill: Prefill) -> float:
        """What of the prompt prefill has, and what decode brings: seconds until all of that is there."""
        conversation, engine, counters = request.conversation, self._engine, self.result.counters
        hit = 0 if self._flushed else prefill.kept.of(conversation)
        if prefill.knows_system:
            hit = max(hit, self._trace.system)
        holder = self._decode_of(conversation)
        held = 0 if self._flushed or holder is None else holder.kept.of(conversation)
        pushed = max(held - hit, 0)
        prefill.landed += pushed
        counters.pushed += pushed
        counters.hit += hit
        request.left = max(request.prompt - hit - pushed, 1)
        conversation.prefill = prefill.name
        return engine.remote_cost * engine.per_token * pushed

    def _arrive(self, request: Request, prefill: Prefill) -> None:
        prefill.coming -= request.left
        if prefill.state is State.GONE:
            self._again(request)
            return
        self.result.counters.computed += request.left
        prefill.compute(request)

    def _computed(self, request: Request, prefill: Prefill) -> None:
        prefill.inflight -= 1
        request.prefill = None
        prefill.knows_system = True
        prefill.kept.keep(request.conversation, request.prompt)
        self._leave_if_drained(prefill)
        decode, engine = request.decode, self._engine
        held = 0 if self._flushed or decode is None else decode.kept.of(request.conversation)
        moved = max(request.prompt - held, 0)
        seconds = engine.hand_over + engine.remote_cost * engine.per_token * moved
        self.clock.after(seconds, self._generate, request, decode)

    def _generate(self, request: Request, decode: Decode) -> None:
        if decode.state is State.GONE:
            self._again(request)
        else:
            decode.generate(request)

    def _began(self, request: Request) -> None:
        if request.outcome.ttft is None:
            now = self.clock.now
            request.outcome.ttft = now - request.outcome.sent
            self._ttfts.append((now, request.outcome.ttft))

    def _ended(self, request: Request, decode: Decode) -> None:
        clock, conversation = self.clock, request.conversation
        decode.inflight -= 1
        self.result.counters.answered += request.answer
        self._itls.append((clock.now, (clock.now - request.joined) / request.answer))
        self._leave_if_drained(decode)
        turn = conversation.script.turns[conversation.turn]
        conversation.decode = decode.name
        conversation.tokens = request.prompt + request.answer
        conversation.turn += 1
        if conversation.turn < len(conversation.script.turns):
            clock.after(self._engine.write_back, self._write_back, conversation, request.answer)
            clock.after(turn.pause, self._send, conversation)

    def _write_back(self, conversation: Conversation, answer: int) -> None:
        """If prefill has evicted the prompt, there is nothing to append to: it will ask for all of it."""
        prefill = self._prefill_of(conversation)
        if prefill is None or prefill.kept.of(conversation) + answer != conversation.tokens:
            return
        prefill.kept.keep(conversation, conversation.tokens)
        prefill.landed += answer
        self.result.counters.written_back += answer

    def _again(self, request: Request) -> None:
        """On other pods, from the beginning: a pod of it is gone."""
        for pod in (request.decode, request.prefill):
            if pod is not None:
                pod.inflight -= 1
        self._dispatch(Request(request.conversation, request.outcome, request.prompt, request.answer))

    # Pods

    def _prefill_of(self, conversation: Conversation) -> Prefill | None:
        pod = self._by_name.get(conversation.prefill or "")
        return pod if isinstance(pod, Prefill) else None

    def _decode_of(self, conversation: Conversation) -> Decode | None:
        pod = self._by_name.get(conversation.decode or "")
        return pod if isinstance(pod, Decode) else None

    def _resize(self, sizes: Sizes, *, at_once: bool = False) -> None:
        self._sizes = sizes
        for role in ENGINES:
            staying = [pod for pod in self._pods(role) if pod.state is not State.DRAINING]
            for _ in range(len(staying), sizes.of(role)):
                self._add(role, 0.0 if at_once else self._start)
            for pod in staying[sizes.of(role) :]:
                self._drain(pod)

    def _pods(self, role: Component) -> list[Pod]:
        """By ordinal."""
        kind = Prefill if role is Component.PREFILL else Decode
        return sorted(
            (pod for pod in self._by_name.values() if isinstance(pod, kind)), key=lambda pod: pod.ordinal
        )

    def _add(self, role: Component, seconds: float) -> None:
        taken = {pod.ordinal for pod in self._pods(role)}
        ordinal = next(n for n in count() if n not in taken)
        self._create(role, ordinal, seconds)

    def _create(self, role: Component, ordinal: int, seconds: float) -> None:
        name = f"{role}-{ordinal}"
        pod: Pod
        if role is Component.PREFILL:
            pod = Prefill(name, ordinal, self.clock, self._engine, self._computed)
        else:
            pod = Decode(name, ordinal, self.clock, self._engine, self._began, self._ended)
        self._by_name[name] = pod
        self.clock.after(seconds, self._become_ready, pod)

    def _become_ready(self, pod: Pod) -> None:
        if pod.state is State.STARTING:
            pod.state = State.READY
            self._look_at_pods()
            held_back, self._held_back = self._held_back, []
            for request in held_back:
                self._dispatch(request)

    def _look_at_pods(self) -> None:
        pods = self._by_name.values()
        self._ready_prefills = [p for p in pods if isinstance(p, Prefill) and p.state is State.READY]
        self._ready_decodes = [p for p in pods if isinstance(p, Decode) and p.state is State.READY]

    def _drain(self, pod: Pod) -> None:
        """No new turns; it goes when those that it has are through, or after the time for that."""
        pod.state = State.DRAINING
        self._look_at_pods()
        self.clock.after(self._engine.drain, self._remove, pod)
        self._leave_if_drained(pod)

    def _leave_if_drained(self, pod: Pod) -> None:
        if pod.state is State.DRAINING and not pod.inflight:
            self._remove(pod)

    def _remove(self, pod: Pod) -> None:
        if pod.state is State.GONE:
            return
        pod.state = State.GONE
        if self._by_name.get(pod.name) is pod:
            del self._by_name[pod.name]
        self._look_at_pods()
        for request in pod.requests():
            self._again(request)

    def _lose(self, role: Component, ordinal: int) -> None:
        """A pod dies with all that it has; the next one of its name starts at once."""
        pod = self._by_name.get(f"{role}-{ordinal}")
        if pod is not None and pod.state is State.READY:
            self._remove(pod)
            self._create(role, ordinal, self._start)

    def _flush(self) -> None:
        self._flushed = True

    # What is seen and decided

    def _tick(self) -> None:
        now = self.clock.now
        sizes = self._rule.sizes(self._see())
        if sizes != self._sizes:
            self._resize(sizes)
        present = [len(self._pods(role)) for role in ENGINES]
        self.result.sizes.append(Sized(now, self._sizes, Sizes(*present)))
        self.clock.after(self._rule.period, self._tick)

    def _see(self) -> Seen:
        now, counters = self.clock.now, self.result.counters
        self._snapshots.append((now, replace(counters)))
        while len(self._snapshots) > 1 and self._snapshots[1][0] <= now - WINDOW:
            self._snapshots.popleft()
        since, before = self._snapshots[0]
        latest = counters.minus(self._snapshots[-2][1]) if len(self._snapshots) > 1 else Counters()
        for values in (self._ttfts, self._itls):
            while values and values[0][0] < now - WINDOW:
                values.popleft()
        window = counters.minus(before)
        self.result.reuse.append((now, window.reuse))
        kv_tokens = sum(d.usage + d.waiting_kv for d in self._ready_decodes) * self._engine.kv_tokens
        if now > since:
            self.result.loads.append(Load(now, window.computed / (now - since), kv_tokens))
        return Seen(
            now=now,
            sizes=self._sizes,
            ready=Sizes(len(self._ready_prefills), len(self._ready_decodes)),
            prefill=tuple(PrefillPod(p.waiting, p.queued + p.coming) for p in self._ready_prefills),
            decode=tuple(
                DecodePod(d.usage, d.running, len(d.waiting), d.waiting_kv) for d in self._ready_decodes
            ),
            held_back=len(self._held_back),
            window=window,
            seconds=now - since,
            ttft_p95=_p95(self._ttfts),
            itl_p95=_p95(self._itls),
            draining=any(pod.state is State.DRAINING for pod in self._by_name.values()),
            latest=latest,
        )


def _p95(values: Sequence[tuple[float, float]]) -> float | None:
    if not values:
        return None
    ordered = sorted(value for _, value in values)
    return ordered[int(len(ordered) * 0.95)]
