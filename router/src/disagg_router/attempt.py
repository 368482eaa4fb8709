"""One attempt at a turn: both legs at once, until decode's answer has begun or the attempt has failed."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from disagg_router import legs
from disagg_router.backends import Backend
from disagg_router.breaker import Blame
from disagg_router.config import Deadlines
from disagg_router.http1 import ConnectError, EngineAnswer, EnginePool, UpstreamError
from disagg_router.http1.message import request_head
from disagg_router.http1.upstream import Framing
from disagg_router.load import Hold, LoadTable
from disagg_router.logs import event
from disagg_router.recovery import Failure, blame

_log = logging.getLogger(__name__)

# Prefill's answer is one token and its usage.
_PREFILL_ANSWER_BYTES = 1024 * 1024
# Answers that say "I could not", after which another engine may be able to. All others are passed on.
_ENGINE_ERRORS = frozenset({500, 502, 503, 504})
# vLLM sends its head before it knows whether the engine can answer; an engine error is then the first event.
_STREAM_ERROR = re.compile(rb'(?:\A|\n)data: \{"error":.*?"code":\s*5\d\d', re.DOTALL)


@dataclass(frozen=True, slots=True)
class Engines:
    """What an attempt needs to reach engines."""

    pool: EnginePool
    loads: LoadTable
    mode: legs.Mode
    deadlines: Deadlines
    count_prompt_tokens: Callable[[int], None]
    count_prefill_failure: Callable[[Failure], None]
    dismiss: Callable[[Backend, str], None]
    """Tell a prefill engine that the prompt of the turn with this request id will not be fetched."""


@dataclass(frozen=True, slots=True)
class LegPlan:
    """One attempt: the engines, the request id that joins the legs, and how the answer is wanted."""

    endpoint: legs.Endpoint
    body: legs.Body
    decode: Backend
    prefill: Backend | None
    holder: Backend | None
    request_id: str
    passed_on: dict[str, str]
    decoded: bool  # the client cannot take chunked framing


@dataclass(frozen=True, slots=True)
class Outcome:
    """`answer` is decode's, also with a failure if decode itself answered an error. `message` says what failed."""

    failure: Failure | None
    answer: EngineAnswer | None = None
    message: str = ""


class _PrefillError(Exception):
    def __init__(self, failure: Failure, message: str) -> None:
        super().__init__(message)
        self.failure = failure


class Attempt:
    """Use as a context: leaving it closes what is still open on either engine and gives the counts back."""

    def __init__(self, engines: Engines, plan: LegPlan) -> None:
        self._engines = engines
        self._plan = plan
        self._stack = ExitStack()
        self._decode: asyncio.Task[EngineAnswer] | None = None
        self._prefill: asyncio.Task[None] | None = None
        self._began = False
        self._hold: Hold

    def __enter__(self) -> Self:
        self._hold = self._stack.enter_context(self._engines.loads.hold(self._plan.decode))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._prefill is not None:
            if not self._began and self._plan.prefill is not None and not self._prefill_failed:
                # Prefill may have computed the prompt already, and decode's engine may never hear of the turn.
                self._engines.dismiss(self._plan.prefill, self._plan.request_id)
            self._prefill.cancel()
        if self._decode is not None:
            if not self._decode.done():
                self._decode.cancel()
            elif not self._decode.cancelled() and self._decode.exception() is None:
                self._decode.result().close()
        self._stack.close()

    @property
    def _prefill_failed(self) -> bool:
        task = self._prefill
        return task is not None and task.done() and not task.cancelled() and task.exception() is not None

    async def begin(self) -> Outcome:
        """Send both legs and wait for decode's answer to begin."""
        plan, deadlines = self._plan, self._engines.deadlines
        self._decode = decode = asyncio.create_task(self._ask_decode())
        waiting: set[asyncio.Task[EngineAnswer] | asyncio.Task[None]] = {decode}
        if plan.prefill is not None:
            # Held before anything else can be chosen: of two turns only one may be a suspect pod's probe.
            hold = self._engines.loads.hold(plan.prefill)
            self._prefill = asyncio.create_task(self._ask_prefill(plan.prefill, hold))
            self._prefill.add_done_callback(lambda _: hold.give_back())
            self._prefill.add_done_callback(self._prefill_done)
            waiting.add(self._prefill)
        limit = deadlines.first_byte_seconds if plan.body.streamed else deadlines.answer_seconds
        while True:
            # While prefill computes, its own deadline bounds the wait; decode's runs from prefill's end.
            timeout = limit if self._prefill not in waiting else None
            done, _ = await asyncio.wait(waiting, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if decode in done:
                return self._judge(decode)
            if not done:
                message = f"{plan.decode.name} did not answer in {limit:g} s"
                return self._decode_failed(Failure.DECODE_DEADLINE, message)
            assert self._prefill is not None
            failed = self._prefill.exception()
            if isinstance(failed, _PrefillError):
                return Outcome(failed.failure, message=str(failed))
            if failed is not None:
                raise failed
            waiting.discard(self._prefill)

    def _judge(self, decode: asyncio.Task[EngineAnswer]) -> Outcome:
        plan = self._plan
        try:
            answer = decode.result()
        except UpstreamError as exc:
            unreachable = isinstance(exc, ConnectError)
            failure = Failure.DECODE_UNREACHABLE if unreachable else Failure.DECODE_BROKE
            return self._decode_failed(failure, f"decode {plan.decode.name}: {exc}")
        if answer.status in _ENGINE_ERRORS:
            message = f"decode {plan.decode.name} answered {answer.status}"
            return self._decode_failed(Failure.DECODE_ERROR, message, answer)
        if plan.body.streamed and _STREAM_ERROR.search(answer.first_bytes()):
            message = f"decode {plan.decode.name} began its stream with an engine error"
            return self._decode_failed(Failure.DECODE_ERROR, message)
        self._began = answer.status < 400
        if self._began:
            self._hold.succeeded()
        return Outcome(None, answer)

    def _decode_failed(self, failure: Failure, message: str, answer: EngineAnswer | None = None) -> Outcome:
        self._hold.failed(blame(failure, streamed=self._plan.body.streamed), failure.value)
        return Outcome(failure, answer, message)

    def broke_off(self) -> None:
        """Decode's answer, which had begun, did not come to its end."""
        self._hold.failed(Blame.FULL, "broken_answer")

    async def _ask_decode(self) -> EngineAnswer:
        plan = self._plan
        if plan.prefill is None:
            body = legs.local_leg(plan.body)
        else:
            body = self._engines.mode.decode_leg(plan.body, self._pair(plan.prefill))
        head = self._head(plan.decode, body)
        framing: Framing = "decoded" if plan.decoded else "raw"
        return await self._engines.pool.ask(plan.decode.address, head, body, framing)

    async def _ask_prefill(self, prefill: Backend, hold: Hold) -> None:
        """Have prefill compute the prompt, and say of it how it did. Raises _PrefillError."""
        try:
            await self._compute_prompt(prefill)
        except _PrefillError as exc:
            hold.failed(blame(exc.failure, streamed=False), exc.failure.value)
            raise
        hold.succeeded()

    async def _compute_prompt(self, prefill: Backend) -> None:
        engines, seconds = self._engines, self._engines.deadlines.first_byte_seconds
        body = engines.mode.prefill_leg(self._plan.body, self._pair(prefill))
        try:
            async with asyncio.timeout(seconds):
                status, answer = await self._read_answer(prefill, body)
        except TimeoutError:
            message = f"prefill {prefill.name} was not done in {seconds:g} s"
            raise _PrefillError(Failure.PREFILL_DEADLINE, message) from None
        except UpstreamError as exc:
            unreachable = isinstance(exc, ConnectError)
            failure = Failure.PREFILL_UNREACHABLE if unreachable else Failure.PREFILL_BROKE
            raise _PrefillError(failure, f"prefill {prefill.name}: {exc}") from exc
        if status >= 400:
            refused = Failure.PREFILL_REFUSED if status < 500 else Failure.PREFILL_ERROR
            text = answer[:500].decode(errors="replace")
            raise _PrefillError(refused, f"prefill {prefill.name} answered {status}: {text}")
        tokens = legs.prompt_tokens(answer)
        if tokens is not None:
            engines.count_prompt_tokens(tokens)

    def _prefill_done(self, task: asyncio.Task[None]) -> None:
        """Count a failure, also one that comes when decode has answered already and nobody waits for prefill."""
        error = None if task.cancelled() else task.exception()
        if isinstance(error, _PrefillError):
            self._engines.count_prefill_failure(error.failure)
            event(
                _log, logging.DEBUG, "prefill leg failed", request_id=self._plan.request_id, error=str(error)
            )

    async def _read_answer(self, prefill: Backend, body: bytes) -> tuple[int, bytes]:
        pool = self._engines.pool
        answer = await pool.ask(prefill.address, self._head(prefill, body), body, "decoded")
        try:
            content = await answer.read(_PREFILL_ANSWER_BYTES)
        except BaseException:
            answer.close()
            raise
        pool.release(answer)
        return answer.status, content

    def _pair(self, prefill: Backend) -> legs.Pair:
        return legs.Pair(prefill, self._plan.decode, self._plan.holder)

    def _head(self, backend: Backend, body: bytes) -> bytes:
        fields = {
            "content-type": "application/json",
            "x-request-id": self._plan.request_id,
            **self._plan.passed_on,
        }
        return request_head("POST", legs.PATHS[self._plan.endpoint], str(backend.address), fields, len(body))
