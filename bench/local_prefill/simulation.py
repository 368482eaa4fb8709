"""Two engines in simulated time, and the router's own decisions in front of them.

They are one for prefill and one for decode, or, colocated, two that do both for half of the conversations each.

An engine works in steps, as vLLM does: a step computes one token of every running answer and up to a budget of prompt tokens, first
come first, and takes `step` + `per_answer` x answers + `per_token` x prompt tokens. What is computed on decode therefore makes everybody
there wait, and what waits for prefill waits for all prompts before it.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from math import inf

from bench.local_prefill.mixes import Mix, Speed, Turn
from disagg_router.backlog import Backlog
from disagg_router.config import LocalPrefill
from disagg_router.placer import Lacking, Placer

WARM_UP = 60.0
"""Seconds at the beginning that are left out of the results: conversations all begin at once, and Auto learns."""


class Clock:
    """Simulated time and what happens in it. Of two things at one time the one that was asked for first is first."""

    def __init__(self) -> None:
        self.now = 0.0
        self._order = count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []

    def __call__(self) -> float:
        return self.now

    def after(self, seconds: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._order), what))

    def run(self, seconds: float) -> None:
        while self._events and self._events[0][0] <= seconds:
            self.now, _, what = heapq.heappop(self._events)
            what()


@dataclass
class Prompt:
    left: int
    then: Callable[[], None]
    """At the end of the step in which its last token is computed, which is when the first of its answer is there."""


@dataclass
class Answer:
    """`tokens` are to be generated, one a step. `began` and `ended` are at the end of a step."""

    tokens: int
    began: Callable[[], None]
    ended: Callable[[], None]


class Engine:
    def __init__(self, clock: Clock, speed: Speed) -> None:
        self.gaps: Counter[float] = Counter()
        """Seconds between two tokens of an answer, and how many there were."""
        self._clock = clock
        self._speed = speed
        self._prompts: deque[Prompt] = deque()
        self._new: list[Answer] = []
        self._running: dict[int, list[Answer]] = {}
        """Answers that have begun, by the step that ends them."""
        self._answers = 0
        self._steps = 0
        self._stepping = False

    def compute(self, prompt: Prompt) -> None:
        self._prompts.append(prompt)
        self._step()

    def generate(self, answer: Answer) -> None:
        self._new.append(answer)
        self._step()

    def go_on(self, answer: Answer) -> None:
        """Generate an answer whose first token is there already, with its prompt."""
        self._running.setdefault(self._steps + answer.tokens - 1, []).append(answer)
        self._answers += 1

    def _step(self) -> None:
        if self._stepping or not (self._prompts or self._new or self._answers):
            return
        self._stepping = True
        new, self._new, waited = self._new, [], self._answers
        computed, done = self._take_prompts()
        speed = self._speed
        seconds = speed.step + speed.per_answer * (waited + len(new)) + speed.per_token * computed

        def end() -> None:
            self._steps += 1
            if waited and self._clock.now >= WARM_UP:
                self.gaps[round(seconds, 4)] += waited
            for answer in new:
                self.go_on(answer)
                answer.began()
            for prompt in done:
                prompt.then()
            for answer in self._running.pop(self._steps, ()):
                self._answers -= 1
                answer.ended()
            self._stepping = False
            self._step()

        self._clock.after(seconds, end)

    def _take_prompts(self) -> tuple[int, list[Prompt]]:
        """How many prompt tokens the next step computes, and the prompts that it completes."""
        room, done = self._speed.budget, []
        while self._prompts and room:
            prompt = self._prompts[0]
            taken = min(prompt.left, room)
            prompt.left -= taken
            room -= taken
            if not prompt.left:
                done.append(self._prompts.popleft())
        return self._speed.budget - room, done


class Memory:
    """What conversations an engine holds KV of. Those that rest go, the longest first, when there is no room."""

    def __init__(self, tokens: int | None) -> None:
        self._room = inf if tokens is None else tokens
        self._resting: dict[object, int] = {}

    def take(self, conversation: object) -> int:
        """Tokens of a conversation that are still there, whose next turn begins: it rests no longer."""
        found = self._resting.pop(conversation, 0)
        self._room += found
        return found

    def use(self, tokens: int) -> None:
        """A turn that is under way needs them."""
        self._room -= tokens
        while self._room < 0 and self._resting:
            oldest = next(iter(self._resting))
            self._room += self._resting.pop(oldest)

    def rest(self, conversation: object, tokens: int) -> None:
        """The turn is over, and what it used may go when others need it."""
        self._resting[conversation] = tokens


@dataclass(eq=False)
class Client:
    """One of a mix. `conversation` is another object for each; `context` its tokens so far."""

    turns: Iterator[Turn]
    home: int
    conversation: object = None
    context: int = 0
    estimate: int = 0
    """What the router takes the context for."""


@dataclass
class Outcome:
    """`ttft` by turn, `gaps` by how often they were. Decisions by (placement, reason). All after the warm-up."""

    ttft: list[float]
    gaps: Counter[float]
    decisions: Counter[tuple[str, str]]


class Simulation:
    """A router with `settings` in front of the engines, and the clients of a mix."""

    def __init__(
        self, mix: Mix, settings: LocalPrefill | None, seed: int, *, colocated: bool = False
    ) -> None:
        self._clock = clock = Clock()
        self._speed = speed = mix.speed
        self._seconds = mix.seconds
        self._prefill = Engine(clock, speed)
        self._decodes = [Engine(clock, speed) for _ in range(2 if colocated else 1)]
        self._running = [0 for _ in self._decodes]
        self._kept = [Memory(mix.memory) for _ in self._decodes]
        self._kept_by_prefill = Memory(mix.memory)
        self._backlog = Backlog(clock)
        self._placer = Placer(settings, self._backlog, clock)
        self._ttft: list[float] = []
        self._decisions: Counter[tuple[str, str]] = Counter()
        for number in range(mix.sessions):
            self._next(Client(mix.session(seed, number), number % len(self._decodes)))

    def run(self) -> Outcome:
        self._clock.run(self._seconds)
        gaps = sum((engine.gaps for engine in self._decodes), Counter())
        return Outcome(self._ttft, gaps, self._decisions)

    def _next(self, client: Client) -> None:
        turn = next(client.turns)
        if turn.first:
            client.conversation, client.context, client.estimate = object(), 0, 0
        self._clock.after(turn.pause, lambda: self._dispatch(turn, client))

    def _dispatch(self, turn: Turn, client: Client) -> None:
        """One turn of a conversation whose decode engine is the client's home."""
        clock, speed, placer, decode = self._clock, self._speed, self._placer, self._decodes[client.home]
        sent, pod, kept = clock.now, f"decode-{client.home}", self._kept[client.home]
        rested = None if turn.first else turn.pause
        lacks = Lacking(turn.estimate, turn.estimate, client.estimate + turn.estimate, rested)
        decision = placer.place(lacks, pod, "prefill", self._running[client.home])
        self._running[client.home] += 1
        on_decode = decision.placement == "decode"
        work = self._backlog.add(pod if on_decode else "prefill", turn.estimate)
        began_at, leg = 0.0, None
        prompt = client.context + turn.new
        held = kept.take(client.conversation)
        lacking = prompt - held
        kept.use(prompt + turn.answer)
        client.context, client.estimate = (
            prompt + turn.answer,
            client.estimate + turn.estimate + turn.answer * 4 // 3,
        )

        def computed() -> None:
            nonlocal leg
            leg = clock.now - sent
            self._backlog.done(work)
            # Decode writes its answer back, so prefill has it for the next turn.
            self._kept_by_prefill.use(turn.answer)
            self._kept_by_prefill.rest(client.conversation, client.context)
            moved = speed.hand_over + speed.transfer_per_token * lacking
            clock.after(moved, lambda: decode.generate(answer))

        def began() -> None:
            nonlocal began_at
            began_at = clock.now
            self._backlog.done(work)
            placer.learn(decision, began_at - sent, leg)
            if clock.now >= WARM_UP:
                self._ttft.append(began_at - sent)
                self._decisions[decision.placement, decision.reason] += 1

        def ended() -> None:
            self._running[client.home] -= 1
            kept.rest(client.conversation, client.context)
            placer.learn_gap(turn.answer - 1, clock.now - began_at)
            self._next(client)

        def computed_on_decode() -> None:
            began()
            decode.go_on(answer)

        answer = Answer(turn.answer, began, ended)
        if on_decode:
            clock.after(speed.front, lambda: decode.compute(Prompt(lacking, computed_on_decode)))
        else:
            # What decode has it asks for, which takes no time to speak of.
            new_to_prefill = prompt - max(self._kept_by_prefill.take(client.conversation), held)
            self._kept_by_prefill.use(prompt)
            clock.after(speed.front, lambda: self._prefill.compute(Prompt(new_to_prefill, computed)))
