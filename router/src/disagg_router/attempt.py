"""One attempt at a turn: its legs, until decode's answer has begun or the attempt has failed.

Both legs go out at once if the mode knows beforehand what decode has to know of prefill, else decode's after prefill's answer.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from disagg_router import legs
from disagg_router.backends import Backend
from disagg_router.breaker import Blame
from disagg_router.config import Deadlines
from disagg_router.handles import Handle
from disagg_router.http1 import ConnectError, EngineAnswer, EnginePool, StaleConnectionError, UpstreamError
from disagg_router.http1.message import request_head
from disagg_router.http1.upstream import COMMENTS, Framing, Prelude
from disagg_router.legs import handback
from disagg_router.load import Hold, LoadTable
from disagg_router.logs import event
from disagg_router.recovery import Failure, blame
from disagg_router.spans import CANCELLED, Leg, Trace

_log = logging.getLogger(__name__)

# Prefill's answer is one token and its usage.
_PREFILL_ANSWER_BYTES = 1024 * 1024
# A prompt's tokens, as JSON.
_RENDERED_BYTES = 64 * 1024 * 1024
# What a prefill engine that has started anew may have answered to turns with the one before.
_LOST = frozenset({Failure.PREFILL_UNREACHABLE, Failure.PREFILL_BROKE, Failure.PREFILL_ERROR})
# Answers that say "I could not", after which another engine may be able to. All others are passed on.
_ENGINE_ERRORS = frozenset({500, 502, 503, 504})
# vLLM sends its head before it knows whether the engine can answer; an engine error is then the first event.
_STREAM_ERROR = re.compile(rb'(?:\A|\n)data: \{"error":.*?"code":\s*5\d\d', re.DOTALL)


# /v1/responses says that it has taken the request before the engine has done anything for it.
_PRELUDES: dict[legs.Endpoint, Prelude] = {"responses": Prelude(b"response.created", b"response.in_progress")}


@dataclass(frozen=True, slots=True)
class Engines:
    """What an attempt needs to reach engines."""

    pool: EnginePool
    loads: LoadTable
    deadlines: Deadlines
    count_prompt_tokens: Callable[[int], None]
    count_prefill_failure: Callable[[Failure], None]
    count_handle: Callable[[str], None]
    dismiss: Callable[[Backend, bytes], None]
    """Send a prefill engine the word that a prompt will not be fetched."""
    let_finish: Callable[[asyncio.Task[legs.Params]], None]
    """Keep a prefill leg that outlives its turn."""
    clock: Callable[[], float]


@dataclass(frozen=True, slots=True)
class LegPlan:
    """One attempt: the engines, the request id that joins the legs, and how the answer is wanted."""

    endpoint: legs.Endpoint
    body: legs.Body
    decode: Backend
    prefill: Backend | None
    holder: Backend | None
    request_id: str
    trace: Trace
    decoded: bool  # the client cannot take chunked framing
    mode: legs.Mode
    whole: bool = False
    """The answer is read before it is passed on, because decode hands back in it what the next turn needs."""
    handle: Callable[[], Awaitable[Handle | None]] | None = None
    """Asks, once, for KV of the turn before that a decode engine keeps, for prefill to read if this turn continues it."""
    decode_tokens: int = 0
    prefill_tokens: int = 0
    """What of the prompt is for either engine to compute, as far as that is known."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """`answer` is decode's, also with a failure if decode itself answered an error. `message` says what failed."""

    failure: Failure | None
    answer: EngineAnswer | None = None
    message: str = ""


class _PrefillError(Exception):
    def __init__(self, failure: Failure, message: str, fault: Blame) -> None:
        super().__init__(message)
        self.failure = failure
        self.fault = fault


def _failed(failure: Failure, message: str, *, excused: bool = False) -> _PrefillError:
    return _PrefillError(failure, message, Blame.NONE if excused else blame(failure, streamed=False))


def _is_stale(error: UpstreamError) -> bool:
    """Whether a kept connection was cut before anything came back: by the engine's own timer, if not by something between."""
    return isinstance(error, StaleConnectionError)


class Attempt:
    """Use as a context: leaving it closes what is still open on either engine and gives the counts back."""

    def __init__(self, engines: Engines, plan: LegPlan) -> None:
        self._engines = engines
        self._plan = plan
        self._stack = ExitStack()
        self._decode: asyncio.Task[EngineAnswer] | None = None
        self._prefill: asyncio.Task[legs.Params] | None = None
        self._told: legs.Params | None = None
        self._began = False
        self._decode_leg: Leg | None = None
        self._decode_error: str | None = None
        self._prefill_leg: Leg | None = None
        self._hold: Hold
        self._sent = engines.clock()
        self.first_piece: float | None = None
        """Seconds from the legs' dispatch until decode's answer had begun well."""
        self.prefill_leg: float | None = None
        """Seconds until prefill's leg had ended well."""

    def __enter__(self) -> Self:
        hold = self._engines.loads.hold(self._plan.decode, self._plan.decode_tokens)
        self._hold = self._stack.enter_context(hold)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._prefill is not None:
            mode, prefill = self._plan.mode, self._plan.prefill
            word = mode.dismissal(self._plan.request_id)
            if word is not None and prefill is not None and not self._began and not self._prefill_failed:
                # Prefill may have computed the prompt already, and decode's engine may never hear of the turn.
                self._engines.dismiss(prefill, word)
            if mode.finishes_prefill and self._decode is not None and not self._began:
                self._engines.let_finish(self._prefill)
            else:
                self._prefill.cancel()
        answered = False
        if self._decode is not None:
            if not self._decode.done():
                self._decode.cancel()
            elif not self._decode.cancelled() and self._decode.exception() is None:
                self._decode.result().close()
                answered = True
        if self._decode_leg is not None:
            self._decode_leg.end(self._decode_error or (None if answered and kind is None else CANCELLED))
        self._stack.close()

    @property
    def _prefill_failed(self) -> bool:
        task = self._prefill
        return task is not None and task.done() and not task.cancelled() and task.exception() is not None

    async def begin(self) -> Outcome:
        """Send the legs and wait for decode's answer to begin."""
        plan, deadlines = self._plan, self._engines.deadlines
        if plan.prefill is None:
            self._decode = asyncio.create_task(self._ask_decode(legs.local_leg(plan.body)))
        else:
            self._told = told = plan.mode.beforehand(self._pair(plan.prefill))
            if told is not None:
                self._decode = asyncio.create_task(self._ask_decode(plan.mode.decode_leg(plan.body, told)))
            # Held before anything else can be chosen: of two turns only one may be a suspect pod's probe.
            hold = self._engines.loads.hold(plan.prefill, plan.prefill_tokens)
            self._prefill = asyncio.create_task(self._ask_prefill(plan.prefill, hold))
            self._prefill.add_done_callback(lambda _: hold.give_back())
            self._prefill.add_done_callback(self._prefill_done)
            if told is None:
                await asyncio.wait({self._prefill})  # it has a deadline of its own
                failed = self._prefill_outcome(self._prefill)
                if failed is not None:
                    return failed
                body = plan.mode.decode_leg(plan.body, self._prefill.result())
                self._decode = asyncio.create_task(self._ask_decode(body))
        decode = self._decode
        assert decode is not None
        limit = deadlines.first_byte_seconds if plan.body.streamed else deadlines.answer_seconds
        waiting: set[asyncio.Task[EngineAnswer] | asyncio.Task[legs.Params]] = {decode}
        if self._prefill is not None and not self._prefill.done():
            waiting.add(self._prefill)
        while True:
            # Decode's deadline runs from prefill's end.
            prefilling = self._prefill in waiting
            timeout = self._prefill_patience if prefilling else limit
            done, _ = await asyncio.wait(waiting, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if decode in done:
                return self._judge(decode)
            if not done and prefilling:
                assert plan.prefill is not None
                message = f"prefill {plan.prefill.name} was not done in {timeout:g} s"
                self._engines.count_prefill_failure(Failure.PREFILL_DEADLINE)
                return Outcome(Failure.PREFILL_DEADLINE, message=message)
            if not done:
                message = f"{plan.decode.name} did not answer in {limit:g} s"
                return self._decode_failed(Failure.DECODE_DEADLINE, message)
            assert self._prefill is not None
            failed = self._prefill_outcome(self._prefill)
            if failed is not None:
                return failed
            waiting.discard(self._prefill)

    @property
    def _prefill_patience(self) -> float | None:
        """How long the turn waits for a prefill leg that may take longer; None if the leg's own deadline bounds the wait."""
        seconds = self._engines.deadlines.first_byte_seconds
        return seconds if self._prefill_limit != seconds else None

    def _prefill_outcome(self, prefill: asyncio.Task[legs.Params]) -> Outcome | None:
        """The end of the attempt if prefill's leg has failed."""
        error = prefill.exception()
        if isinstance(error, _PrefillError):
            return Outcome(error.failure, message=str(error))
        if error is not None:
            raise error
        return None

    def _judge(self, decode: asyncio.Task[EngineAnswer]) -> Outcome:
        plan = self._plan
        try:
            answer = decode.result()
        except UpstreamError as exc:
            unreachable = isinstance(exc, ConnectError)
            failure = Failure.DECODE_UNREACHABLE if unreachable else Failure.DECODE_BROKE
            # vLLM breaks a stream of /v1/responses off where others would be told of a mistake in their request.
            excused = _is_stale(exc) or (not unreachable and plan.endpoint == "responses")
            message = f"decode {plan.decode.name}: {exc}"
            return self._decode_failed(failure, message, excused=excused)
        assert self._decode_leg is not None
        self._decode_leg.answered(answer.status)
        if answer.status in _ENGINE_ERRORS:
            message = f"decode {plan.decode.name} answered {answer.status}"
            return self._decode_failed(Failure.DECODE_ERROR, message, answer)
        if plan.body.streamed and _STREAM_ERROR.search(answer.first_bytes()):
            message = f"decode {plan.decode.name} began its stream with an engine error"
            return self._decode_failed(Failure.DECODE_ERROR, message)
        self._began = answer.status < 400
        if self._began:
            self.first_piece = self._engines.clock() - self._sent
            self._hold.computed()
            self._hold.succeeded()
        return Outcome(None, answer)

    def _decode_failed(
        self, failure: Failure, message: str, answer: EngineAnswer | None = None, *, excused: bool = False
    ) -> Outcome:
        fault = Blame.NONE if excused else blame(failure, streamed=self._plan.body.streamed)
        self._hold.failed(fault, failure.value)
        self._decode_error = failure.value
        return Outcome(failure, answer, message)

    def broke_off(self, *, silent: bool) -> None:
        """Decode's answer, which had begun, did not come to its end. Silence a client can ask for (`stream_interval`)."""
        self._hold.failed(Blame.NONE if silent else Blame.FULL, "broken_answer")
        self._decode_error = "broken_answer"

    async def _ask_decode(self, body: bytes) -> EngineAnswer:
        plan = self._plan
        path = legs.PATHS[plan.endpoint]
        self._decode_leg = leg = plan.trace.leg(plan.decode, path, plan.request_id)
        head = self._head(plan.decode, path, body, leg)
        framing: Framing = "decoded" if plan.decoded or plan.whole else "raw"
        prelude = _PRELUDES.get(plan.endpoint, COMMENTS)
        # Transfer parameters name blocks that are read or written once.
        once = plan.prefill is not None
        return await self._engines.pool.ask(plan.decode.address, head, body, framing, prelude, once=once)

    async def _ask_prefill(self, prefill: Backend, hold: Hold) -> legs.Params:
        """Have prefill compute the prompt, and say of it how it did; return what decode has to know of it.

        Raises _PrefillError.
        """
        plan = self._plan
        self._prefill_leg = leg = plan.trace.leg(prefill, legs.PATHS[plan.endpoint], plan.request_id)
        try:
            params = await self._compute_prompt(prefill, leg)
        except _PrefillError as exc:
            hold.failed(exc.fault, exc.failure.value)
            if exc.failure in _LOST:
                plan.mode.failed(prefill)
            raise
        self.prefill_leg = self._engines.clock() - self._sent
        hold.succeeded()
        return params

    async def _compute_prompt(self, prefill: Backend, leg: Leg) -> legs.Params:
        engines, mode, pair = self._engines, self._plan.mode, self._pair(prefill)
        limit = self._prefill_limit
        try:
            async with asyncio.timeout(limit):
                body = mode.prefill_leg(self._plan.body, pair, await self._held(prefill, leg))
                path = legs.PATHS[self._plan.endpoint]
                # An answer of /v1/responses repeats much of its request.
                most = _PREFILL_ANSWER_BYTES + 8 * len(body)
                status, answer = await self._read_answer(prefill, path, body, most, leg, once=True)
        except TimeoutError:
            raise _failed(
                Failure.PREFILL_DEADLINE, f"prefill {prefill.name} was not done in {limit:g} s"
            ) from None
        except UpstreamError as exc:
            unreachable = isinstance(exc, ConnectError)
            failure = Failure.PREFILL_UNREACHABLE if unreachable else Failure.PREFILL_BROKE
            raise _failed(failure, f"prefill {prefill.name}: {exc}", excused=_is_stale(exc)) from exc
        leg.answered(status)
        if status >= 400:
            refused = Failure.PREFILL_REFUSED if status < 500 else Failure.PREFILL_ERROR
            # Not what it says: vLLM quotes the request, and messages are logged.
            raise _failed(refused, f"prefill {prefill.name} answered {status}")
        tokens = legs.prompt_tokens(answer)
        if tokens is not None:
            engines.count_prompt_tokens(tokens)
        try:
            return mode.heard(pair, answer, self._told)
        except legs.UnusableAnswerError as exc:
            raise _failed(Failure.PREFILL_ANSWER, f"prefill {prefill.name}: {exc}") from exc

    @property
    def _prefill_limit(self) -> float:
        """How long prefill's leg may take. One that has to run to its end may take longer than its turn waits for it."""
        deadlines = self._engines.deadlines
        outlives = self._told is not None and self._plan.mode.finishes_prefill
        return deadlines.answer_seconds if outlives else deadlines.first_byte_seconds

    async def _held(self, prefill: Backend, leg: Leg) -> legs.Params | None:
        """What decode keeps for prefill to read, if this turn's prompt continues it."""
        body = self._plan.body
        handle = await self._plan.handle() if self._plan.handle is not None else None
        if handle is None:
            return None
        prompt = handback.prompt_in(body)
        if prompt is None:
            prompt = await self._rendered(prefill, leg)
        if prompt is None:
            self._engines.count_handle("unread")
        elif handback.continues(handle.kv, prompt):
            self._engines.count_handle("used")
            return handle.kv.params
        else:
            self._engines.count_handle("other_prompt")
        return None

    async def _rendered(self, prefill: Backend, leg: Leg) -> list[int] | None:
        """The prompt's tokens, by prefill's word; None if it does not tell."""
        path = handback.render_path(self._plan.endpoint)
        try:
            status, answer = await self._read_answer(
                prefill, path, handback.render_body(self._plan.body), _RENDERED_BYTES, leg
            )
        except UpstreamError as exc:
            event(_log, logging.DEBUG, "not rendered", request_id=self._plan.request_id, error=str(exc))
            return None
        return handback.rendered(answer) if status == 200 else None

    def _prefill_done(self, task: asyncio.Task[legs.Params]) -> None:
        """Count a failure, also one that comes when decode has answered already and nobody waits for prefill."""
        error = None if task.cancelled() else task.exception()
        failure = error.failure.value if isinstance(error, _PrefillError) else None
        if self._prefill_leg is not None:
            self._prefill_leg.end(CANCELLED if task.cancelled() else failure)
        if isinstance(error, _PrefillError):
            self._engines.count_prefill_failure(error.failure)
            event(
                _log, logging.DEBUG, "prefill leg failed", request_id=self._plan.request_id, error=str(error)
            )

    async def _read_answer(
        self, prefill: Backend, path: str, body: bytes, limit: int, leg: Leg, *, once: bool = False
    ) -> tuple[int, bytes]:
        pool = self._engines.pool
        head = self._head(prefill, path, body, leg)
        answer = await pool.ask(prefill.address, head, body, "decoded", once=once)
        try:
            content = await answer.read(limit)
        except BaseException:
            answer.close()
            raise
        pool.release(answer)
        return answer.status, content

    def _pair(self, prefill: Backend) -> legs.Pair:
        return legs.Pair(prefill, self._plan.decode, self._plan.holder)

    def _head(self, backend: Backend, path: str, body: bytes, leg: Leg) -> bytes:
        fields = {
            "content-type": "application/json",
            "x-request-id": self._plan.request_id,
            **leg.headers,
        }
        return request_head("POST", path, str(backend.address), fields, len(body))
