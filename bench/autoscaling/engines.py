"""Prefill and decode pods in simulated time.

Prefill works in steps, as vLLM does: up to a budget of prompt tokens, first come first. Decode gives a token to each running answer a step, and
a step takes longer the more there are and the more KV they have. Both keep the KV of conversations that do not run, as long as there is room.
"""

from collections import OrderedDict, deque
from collections.abc import Callable
from enum import Enum
from heapq import heappop, heappush
from itertools import count

from bench.autoscaling.clock import Clock
from bench.autoscaling.figures import Engine
from bench.autoscaling.turns import Conversation, Request


class State(Enum):
    """What a pod does."""

    STARTING = 1
    READY = 2
    DRAINING = 3
    GONE = 4


class Kept:
    """A prefix cache of so many tokens: by conversation, the least recently used goes first."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.used = 0
        self._kept: OrderedDict[Conversation, int] = OrderedDict()

    def of(self, conversation: Conversation) -> int:
        """Tokens of this conversation."""
        return self._kept.get(conversation, 0)

    def keep(self, conversation: Conversation, tokens: int) -> None:
        """As the most recently used."""
        self.used += tokens - self._kept.pop(conversation, 0)
        self._kept[conversation] = tokens
        self.fit(self.room)

    def take(self, conversation: Conversation) -> int:
        """Out of the cache."""
        tokens = self._kept.pop(conversation, 0)
        self.used -= tokens
        return tokens

    def fit(self, room: int) -> None:
        """Evict until no more than this is used."""
        while self.used > room and self._kept:
            _, tokens = self._kept.popitem(last=False)
            self.used -= tokens


class Pod:
    """What both roles have."""

    def __init__(self, name: str, ordinal: int, clock: Clock, engine: Engine) -> None:
        self.name, self.ordinal = name, ordinal
        self.clock, self.engine = clock, engine
        self.state = State.STARTING
        self.inflight = 0
        """Turns that the router has sent here and that are not through."""

    def requests(self) -> list[Request]:
        """All that are here."""
        raise NotImplementedError


class Prefill(Pod):
    """`done` is called with each request whose prompt is computed."""

    def __init__(
        self,
        name: str,
        ordinal: int,
        clock: Clock,
        engine: Engine,
        done: Callable[[Request, "Prefill"], None],
    ) -> None:
        super().__init__(name, ordinal, clock, engine)
        self.kept = Kept(engine.kv_tokens + engine.offloaded_tokens)
        self.knows_system = False
        """Whether what all conversations begin with was computed here."""
        self.queue: deque[Request] = deque()
        self.queued = 0
        """Prompt tokens that are to be computed, of all that is here."""
        self.coming = 0
        """And of what is on its way."""
        self.landed = 0.0
        """Tokens that were moved here and whose time was not taken yet."""
        self._done = done
        self._stepping = False
        self._in_step: list[Request] = []
        """What this step completes."""

    @property
    def waiting(self) -> int:
        """Requests that no step has begun on."""
        return len(self.queue) - (1 if self.queue and self.queue[0].begun else 0)

    def requests(self) -> list[Request]:
        """All that are here."""
        return [*self._in_step, *self.queue]

    def compute(self, request: Request) -> None:
        """Take one more, whose `left` is known."""
        self.queue.append(request)
        self.queued += request.left
        if not self._stepping:
            self._step()

    def _step(self) -> None:
        queue, engine = self.queue, self.engine
        room, finished = engine.budget, []
        while queue and room:
            request = queue[0]
            taken = min(request.left, room)
            request.left -= taken
            room -= taken
            if request.left:
                request.begun = True
                break
            finished.append(queue.popleft())
        self._stepping, self._in_step = True, finished
        computed = engine.budget - room
        self.queued -= computed
        seconds = engine.prefill_step + engine.per_token * (computed + engine.remote_cost * self.landed)
        self.landed = 0.0
        self.clock.after(seconds, self._stepped)

    def _stepped(self) -> None:
        if self.state is State.GONE:
            return
        finished, self._in_step, self._stepping = self._in_step, [], False
        for request in finished:
            self._done(request, self)
        if self.queue:
            self._step()


class Decode(Pod):
    """`began` and `ended` are called with each request at its first token and at its last."""

    def __init__(
        self,
        name: str,
        ordinal: int,
        clock: Clock,
        engine: Engine,
        began: Callable[[Request], None],
        ended: Callable[[Request, "Decode"], None],
    ) -> None:
        super().__init__(name, ordinal, clock, engine)
        self.kept = Kept(engine.kv_tokens)
        self.waiting: deque[Request] = deque()
        self.running = 0
        self.reserved = 0
        """KV tokens of what runs, with the answers to come."""
        self._began, self._ended = began, ended
        self._ends: list[tuple[float, int, Request]] = []
        """By the number of steps after which each ends."""
        self._order = count()
        self._steps = 0.0
        self._step_seconds = 1.0
        self._looked = clock.now
        self._version = 0

    @property
    def usage(self) -> float:
        """Share of the KV cache in use; what is kept for nobody who runs counts as free, as in vLLM."""
        return self.reserved / self.engine.kv_tokens

    @property
    def waiting_kv(self) -> float:
        """What waits would take this share of the KV cache."""
        return sum(r.prompt + r.answer for r in self.waiting) / self.engine.kv_tokens

    def generate(self, request: Request) -> None:
        """Take one more, whose prompt is here."""
        self.waiting.append(request)
        self._catch_up()
        self._admit()
        self._look_again()

    def requests(self) -> list[Request]:
        """All that are here."""
        return [*self.waiting, *(request for _, _, request in self._ends)]

    def _admit(self) -> None:
        engine = self.engine
        while self.waiting and self.running < engine.sequences:
            request = self.waiting[0]
            need = request.prompt + request.answer
            if self.running and self.reserved + need > engine.kv_tokens:
                return
            self.waiting.popleft()
            self.kept.take(request.conversation)
            self.running += 1
            self.reserved += need
            self.kept.room = engine.kv_tokens - self.reserved
            self.kept.fit(self.kept.room)
            heappush(self._ends, (self._steps + request.answer, next(self._order), request))
            request.joined = self.clock.now
            self.clock.after(engine.token_seconds(self.running, self.reserved), self._began, request)

    def _catch_up(self) -> None:
        now = self.clock.now
        self._steps += (now - self._looked) / self._step_seconds
        self._looked = now

    def _look_again(self) -> None:
        self._version += 1
        self._step_seconds = self.engine.token_seconds(self.running, self.reserved)
        if self._ends:
            seconds = max(self._ends[0][0] - self._steps, 0.0) * self._step_seconds
            self.clock.after(seconds, self._next_end, self._version)

    def _next_end(self, version: int) -> None:
        if version != self._version or self.state is State.GONE:
            return
        self._catch_up()
        ended = []
        while self._ends and self._ends[0][0] <= self._steps + 1e-6:
            _, _, request = heappop(self._ends)
            self.running -= 1
            self.reserved -= request.prompt + request.answer
            ended.append(request)
        self.kept.room = self.engine.kv_tokens - self.reserved
        for request in ended:
            self.kept.keep(request.conversation, request.prompt + request.answer)
            self._ended(request, self)
        self._admit()
        self._look_again()
