"""A turn from the client's request to the end of its answer: pick engines, attempt, recover, relay, record."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from hashlib import blake2b

from disagg_router import legs
from disagg_router.admission import Refusal
from disagg_router.attempt import Attempt, Engines, LegPlan, Outcome
from disagg_router.backends import Backend, Fleet
from disagg_router.config import Config
from disagg_router.cost import Decision, Reason
from disagg_router.errors import error_response, model_not_found, not_ready, overloaded
from disagg_router.gate import Gate, OverloadedError
from disagg_router.handles import Handle
from disagg_router.http1 import EngineAnswer, Exchange, Response, UpstreamError
from disagg_router.legs.handback import split
from disagg_router.logs import event
from disagg_router.metrics import Metrics
from disagg_router.pick import Choice, choose
from disagg_router.placer import Placer, lacking
from disagg_router.record import Turn, record
from disagg_router.recovery import Action, Failure, RetryBudget, next_action
from disagg_router.recovery import Attempt as AttemptFacts
from disagg_router.relay import client_id, named, relay
from disagg_router.session import KEY_BYTES, Memory, Placement, identify
from disagg_router.sharing import SharedHandles
from disagg_router.spans import Tracer

_log = logging.getLogger("disagg_router.turn")

_DECISION = b"x-disagg-decision"
# Of an answer that is read whole, with the tokens of its prompt.
_ANSWER_BYTES = 256 * 1024 * 1024


class Turns:
    """Serves the completions endpoints. `new_id` makes the id that joins the legs: 32 hex digits, never the same."""

    def __init__(
        self,
        config: Config,
        fleet: Fleet,
        gate: Gate,
        engines: Engines,
        modes: Mapping[str, legs.Mode],
        memory: Memory,
        handles: SharedHandles,
        placer: Placer,
        metrics: Metrics,
        tracer: Tracer,
        clock: Callable[[], float],
        new_id: Callable[[], str],
    ) -> None:
        self._config = config
        self._fleet = fleet
        self._gate = gate
        self._engines = engines
        self._modes = modes
        self._memory = memory
        self._handles = handles
        self._placer = placer
        self._metrics = metrics
        self._tracer = tracer
        self._clock = clock
        self._new_id = new_id
        self._budget = RetryBudget()
        self._numbers = itertools.count()

    async def serve(self, endpoint: legs.Endpoint, exchange: Exchange) -> None:
        """Answer one request. Cancelled when the client goes, which closes both legs."""
        try:
            body = legs.parse(exchange.request.body, endpoint)
        except legs.BadBodyError as exc:
            self._refuse(endpoint, exchange, error_response(400, str(exc)))
            return
        model = body.model
        if model is not None and model != self._config.model.name:
            self._refuse(endpoint, exchange, model_not_found(model))
            return
        refused = legs.why_refused(body)
        if refused is not None:
            field, message = refused
            response = error_response(400, message, param=field, code="unsupported_parameter")
            self._refuse(endpoint, exchange, response)
            return
        turn = self._open(endpoint, exchange, body)
        try:
            async with self._gate.place(turn.session.key) as turn.waited:
                turn.trace.event("admitted")
                # Asked for only now: the conversation's turn before may have ended in the meantime.
                turn.last = self._memory.recall(turn.session.key)
                turn.rested = self._memory.rested(turn.session.key)
                await self._run(turn, exchange)
        except OverloadedError as exc:
            turn.refusal = exc.refusal
            self._respond(turn, exchange, self._overloaded(exc.refusal))
        except asyncio.CancelledError:
            turn.client_left = True
            raise
        except Exception:
            turn.code = 500
            raise
        finally:
            if turn.answer is not None and turn.answer.status < 400:
                self._memory.ended(turn.session.key)
            record(turn, self._metrics, self._clock() - turn.started, self._config.mode)

    def _refuse(self, endpoint: legs.Endpoint, exchange: Exchange, response: Response) -> None:
        self._metrics.requests.labels(endpoint, str(response.status)).inc()
        self._tracer.turn(endpoint, exchange.request.head).end({"status": response.status})
        exchange.respond(named(response, exchange.request.head.headers, self._new_id))

    def _open(self, endpoint: legs.Endpoint, exchange: Exchange, body: legs.Body) -> Turn:
        headers = exchange.request.head.headers
        names = self._config.session
        session = identify(headers, names.keys, names.body_fields, body)
        return Turn(
            endpoint=endpoint,
            body=body,
            session=session,
            number=next(self._numbers),
            started=self._clock(),
            client_id=client_id(headers),
            trace=self._tracer.turn(endpoint, exchange.request.head),
            local_reason=legs.why_local(body),
            wants_decision=headers.get(_DECISION) is not None,
        )

    # -- attempts --------------------------------------------------------------------------------------------

    async def _run(self, turn: Turn, exchange: Exchange) -> None:
        self._budget.earn()
        turn.choice = self._pick(turn)
        while turn.choice is not None:
            turn.attempts += 1
            turn.request_id = self._new_id()
            plan = self._plan(turn, turn.choice, exchange)
            turn.sent = self._clock()
            with Attempt(self._engines, plan) as attempt:
                outcome = await attempt.begin()
                if outcome.failure is None:
                    assert outcome.answer is not None
                    self._learn(turn, attempt)
                    await self._relay(turn, exchange, plan, outcome.answer)
                    if turn.broken is not None:
                        attempt.broke_off(silent=not outcome.answer.ended.done())
                    return
                action = self._after(turn, outcome.failure)
                self._note_failure(turn, plan, outcome, action)
                if action is Action.GIVE_UP:
                    await self._give_up(turn, exchange, plan, outcome)
                    return
            self._prepare(turn, action, outcome.failure)
        why = self._fleet.why_not_ready() or "no decode engine is left to try"
        self._respond(turn, exchange, not_ready(f"No engine can take this request: {why}."))

    def _pick(self, turn: Turn) -> Choice | None:
        choice = self._choose(turn, turn.avoid)
        if choice is not None:
            self._metrics.picks.labels("decode", choice.decode_reason).inc()
            self._metrics.picks.labels("prefill", choice.prefill_reason).inc()
        return choice

    def _choose(self, turn: Turn, avoid: Collection[str]) -> Choice | None:
        backends = self._fleet.backends
        load = self._engines.loads.snapshot(backends)
        return choose(backends, turn.session, turn.last, load, avoid, self._config.policy, turn.number)

    def _plan(self, turn: Turn, choice: Choice, exchange: Exchange) -> LegPlan:
        mode = self._modes.get(choice.decode.mode or self._config.mode)
        if turn.local_reason is None:
            turn.local_reason = self._why_local(turn.body, choice, mode)
        mode = mode or self._modes[self._config.mode]
        turn.decision = decision = self._decide(turn, choice, mode)
        self._metrics.decisions.labels(decision.placement, decision.reason).inc()
        prefill = choice.prefill if turn.asks_prefill else None
        at = decision.situation
        hands_back = prefill is not None and mode.hands_back
        return LegPlan(
            endpoint=turn.endpoint,
            body=turn.body.under(turn.request_id),
            decode=choice.decode,
            prefill=prefill,
            holder=choice.holder,
            request_id=turn.request_id,
            trace=turn.trace,
            decoded=exchange.request.head.http10,
            mode=mode,
            whole=hands_back and not turn.body.streamed,
            handle=partial(self._handle, turn, prefill) if prefill is not None and hands_back else None,
            decode_tokens=at.decode_tokens if at and prefill is None else 0,
            prefill_tokens=at.prefill_tokens if at and prefill is not None else 0,
        )

    def _why_local(self, body: legs.Body, choice: Choice, mode: legs.Mode | None) -> str | None:
        if choice.prefill is None:
            return "no_prefill"
        if mode is None:
            return "unknown_mode"
        return mode.why_local(body)

    def _decide(self, turn: Turn, choice: Choice, mode: legs.Mode) -> Decision:
        """Where the prompt is computed: on decode if it has to be, else as `router.localPrefill` wants it."""
        if turn.local_reason is not None:
            return Decision("decode", turn.local_reason)
        if self._config.local_prefill is None:
            return Decision("prefill", Reason.DISABLED)
        assert choice.prefill is not None  # else it has to be decode
        running = self._engines.loads.inflight.get(choice.decode.name, 0)
        tokens = lacking(turn.body, turn.last, turn.rested, choice, mode.asks_holder)
        return self._placer.place(tokens, choice.decode.name, choice.prefill.name, running)

    def _learn(self, turn: Turn, attempt: Attempt) -> None:
        """From a first attempt only: those after it were not what was decided first."""
        if turn.decision is not None and turn.attempts == 1 and attempt.first_piece is not None:
            first_piece = attempt.first_piece if turn.body.streamed else None
            self._placer.learn(turn.decision, first_piece, attempt.prefill_leg)

    async def _handle(self, turn: Turn, prefill: Backend) -> Handle | None:
        """What a decode engine keeps of the conversation's last turn, if it is still there to be read by `prefill`."""
        if "messages" in turn.body.fields and not turn.session.earlier_turn:
            return None  # a chat without any answer in it continues none
        handle = await self._handles.take(_handle_key(turn))
        if handle is None:
            return None
        if not handle.readable(self._fleet.backends, prefill):
            self._engines.count_handle("gone")
            return None
        return handle

    def _after(self, turn: Turn, failure: Failure) -> Action:
        assert turn.choice is not None
        if not failure.of_prefill:
            turn.decode_failures += 1
        others = self._choose(turn, turn.avoid | {turn.choice.decode.name})
        facts = AttemptFacts(
            with_prefill=turn.asks_prefill,
            decode_failures=turn.decode_failures,
            other_decode=others is not None,
            budget_left=self._budget.left,
        )
        return next_action(failure, facts)

    def _prepare(self, turn: Turn, action: Action, failure: Failure) -> None:
        """Set the turn up for the attempt that follows a failed one."""
        assert turn.choice is not None
        self._metrics.retries.labels(failure.value).inc()
        if not failure.of_prefill:
            self._budget.spend()
        if action is not Action.PAIR_OTHER:
            turn.local_reason = failure.value
        if action is not Action.LOCAL_SAME:
            turn.avoid.add(turn.choice.decode.name)
            turn.choice = self._pick(turn)

    def _note_failure(self, turn: Turn, plan: LegPlan, outcome: Outcome, action: Action) -> None:
        assert outcome.failure is not None
        event(
            _log,
            logging.WARNING,
            "attempt failed",
            request_id=turn.request_id,
            reason=outcome.failure.value,
            error=outcome.message,
            next=action.value,
            decode=plan.decode.name,
            prefill=plan.prefill.name if plan.prefill else None,
        )

    # -- answers ---------------------------------------------------------------------------------------------

    async def _relay(self, turn: Turn, exchange: Exchange, plan: LegPlan, answer: EngineAnswer) -> None:
        turn.code = answer.status
        turn.answer = answer
        turn.first_byte = self._clock() - turn.started
        turn.trace.event("first byte")
        if answer.status < 400:
            self._remember(turn, plan)
        if plan.whole:
            await self._relay_whole(turn, exchange, plan, answer)
            return
        idle, began, pieces = self._config.deadlines.idle_seconds, self._clock(), answer.reads
        fields = self._fields(turn)
        turn.broken = await relay(exchange, answer, self._engines.pool, fields, idle, plan.decoded)
        if turn.broken is None and turn.code == 200 and turn.body.streamed and not answer.stalled:
            self._placer.learn_gap(answer.reads - pieces, self._clock() - began)

    async def _relay_whole(self, turn: Turn, exchange: Exchange, plan: LegPlan, answer: EngineAnswer) -> None:
        """Pass on a whole answer, less where decode keeps its KV, which is kept here for the next turn."""
        seconds = self._config.deadlines.idle_seconds
        try:
            async with asyncio.timeout(seconds):
                content = await answer.read(_ANSWER_BYTES)
        except (TimeoutError, UpstreamError) as exc:
            turn.broken = str(exc) or f"decode was silent for {seconds:g} s"
            message = f"The engine's answer broke off: {turn.broken}."
            self._respond(turn, exchange, error_response(502, message))
            return
        self._engines.pool.release(answer)
        if answer.status == 200:
            content, handback = split(turn.body, content)
            if handback is not None:
                # Not from now: decode's own time for it began when it had answered, however late that has come.
                self._handles.put(_handle_key(turn), Handle(plan.decode, handback), turn.sent)
        kind = answer.headers.get(b"content-type") or b"application/json"
        self._respond(turn, exchange, Response(answer.status, content, kind.decode("latin-1")))

    def _remember(self, turn: Turn, plan: LegPlan) -> None:
        """Note where the conversation's KV is now. A turn that decode computed leaves prefill's older KV where it was."""
        prefill = plan.prefill.name if plan.prefill else None
        if prefill is None and turn.last is not None and turn.last.revision == plan.decode.revision:
            prefill = turn.last.prefill
        self._memory.remember(turn.session.key, Placement(plan.decode.revision, plan.decode.name, prefill))

    async def _give_up(self, turn: Turn, exchange: Exchange, plan: LegPlan, outcome: Outcome) -> None:
        if outcome.answer is not None:
            await self._relay(turn, exchange, plan, outcome.answer)
            return
        if outcome.failure is Failure.DECODE_UNREACHABLE:
            response = not_ready(f"No decode engine could be reached: {outcome.message}.")
        elif outcome.failure is Failure.DECODE_DEADLINE:
            response = error_response(504, f"The engine did not answer in time: {outcome.message}.")
        else:
            response = error_response(502, f"The engine failed before it answered: {outcome.message}.")
        self._respond(turn, exchange, response)

    def _overloaded(self, refusal: Refusal) -> Response:
        limits = self._config.overload
        status, message = {
            Refusal.QUEUE_FULL: (
                429,
                f"All engines are busy and {limits.waiting_turns} requests wait already. Try again later.",
            ),
            Refusal.SESSION_QUEUE_FULL: (
                429,
                f"All engines are busy and {limits.waiting_turns_per_session} requests of this conversation wait "
                "already. Send its next request when the ones before are answered.",
            ),
            Refusal.QUEUE_DEADLINE: (
                503,
                f"All engines were busy for {limits.wait_seconds:g} s. Try again later.",
            ),
        }[refusal]
        return overloaded(status, message, refusal.value)

    def _respond(self, turn: Turn, exchange: Exchange, response: Response) -> None:
        turn.code = response.status
        exchange.respond(replace(response, headers={**response.headers, **self._fields(turn)}))

    def _fields(self, turn: Turn) -> dict[str, str]:
        """What an answer says of its turn in its head."""
        fields = {"x-request-id": turn.client_id or turn.request_id or self._new_id()}
        if turn.wants_decision and turn.decision is not None:
            fields[_DECISION.decode()] = str(turn.decision)
        return fields


def _handle_key(turn: Turn) -> bytes:
    """The name of a conversation and, behind that, of who may share its KV: clients choose how long a salt is."""
    salt = bytes(turn.body.fields.get("cache_salt", b""))
    return turn.session.key + (blake2b(salt, digest_size=KEY_BYTES).digest() if salt else b"")
