"""What becomes of a turn, and its account in metrics, log and trace."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from disagg_router import legs
from disagg_router.admission import Refusal
from disagg_router.cost import Decision
from disagg_router.http1 import EngineAnswer
from disagg_router.logs import event
from disagg_router.metrics import Metrics
from disagg_router.pick import Choice
from disagg_router.relay import CLIENT_GONE
from disagg_router.session import Placement, Session
from disagg_router.spans import Trace

_log = logging.getLogger("disagg_router.turn")


@dataclass(slots=True)
class Turn:
    """What is known of one request so far."""

    endpoint: legs.Endpoint
    body: legs.Body
    session: Session
    number: int  # of this replica's turns
    started: float
    client_id: str | None
    trace: Trace
    # Why decode has to compute the prompt itself, if it has to.
    local_reason: str | None
    last: Placement | None = None
    rested: float | None = None  # seconds since that turn
    attempts: int = 0
    decode_failures: int = 0
    avoid: set[str] = field(default_factory=set)
    choice: Choice | None = None
    request_id: str = ""
    sent: float = 0.0  # when the last attempt began
    code: int = CLIENT_GONE
    first_byte: float | None = None
    answer: EngineAnswer | None = None
    broken: str | None = None
    client_left: bool = False
    waited: float | None = None  # seconds until it was let in
    refusal: Refusal | None = None
    wants_decision: bool = False  # the client asks where its prompt is computed and why
    decision: Decision | None = None

    @property
    def small(self) -> bool:
        """Whether decode computes what is new by choice."""
        return self.local_reason is None and self.decision is not None and self.decision.placement == "decode"

    @property
    def asks_prefill(self) -> bool:
        return self.local_reason is None and not self.small


def record(turn: Turn, metrics: Metrics, seconds: float, mode: str) -> None:
    """A turn is over, after so long. `mode` is that of engines that name none."""
    metrics.requests.labels(turn.endpoint, str(turn.code)).inc()
    metrics.duration.labels(turn.endpoint).observe(seconds)
    if turn.first_byte is not None and turn.code < 400:
        streamed = "true" if turn.body.streamed else "false"
        metrics.first_byte.labels(turn.endpoint, streamed).observe(turn.first_byte)
        metrics.turns.labels("remote" if turn.asks_prefill else "small" if turn.small else "local").inc()
        if turn.local_reason is not None:
            metrics.recomputed.labels(turn.local_reason).inc()
    if turn.waited is not None:
        metrics.queue_wait.observe(turn.waited)
    if turn.refusal is not None:
        metrics.shed.labels(turn.refusal.value).inc()
    if turn.broken is not None:
        metrics.broken.inc()
    choice = turn.choice
    prefill = choice.prefill if choice and turn.asks_prefill else None
    facts = {
        "request_id": turn.request_id or None,
        "client_request_id": turn.client_id,
        "endpoint": turn.endpoint,
        "status": turn.code,
        "streamed": turn.body.streamed,
        "session": turn.session.key.hex(),
        "session_by": turn.session.origin,
        "mode": (choice.decode.mode or mode) if choice else None,
        "revision": choice.decode.revision if choice else None,
        "decode": choice.decode.name if choice else None,
        "decode_by": choice.decode_reason if choice else None,
        "prefill": prefill.name if prefill else None,
        "prefill_by": choice.prefill_reason if choice and turn.asks_prefill else None,
        "recomputed": turn.local_reason,
        "small": turn.small or None,
        "decision": turn.decision.reason if turn.decision else None,
        "attempts": turn.attempts,
        "refused": turn.refusal.value if turn.refusal else None,
        "waited_seconds": round(turn.waited, 4) if turn.waited else None,
        "first_byte_seconds": None if turn.first_byte is None else round(turn.first_byte, 4),
        "seconds": round(seconds, 4),
        "body_bytes": turn.answer.body_bytes if turn.answer else None,
        "broken": turn.broken,
        "client_left": turn.client_left or None,
    }
    turn.trace.end(facts)
    level = logging.WARNING if turn.broken or turn.code >= 500 else logging.INFO
    event(_log, level, "turn", **facts)
