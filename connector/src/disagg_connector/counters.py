"""What the connector counts. Pure; `metrics` brings it to Prometheus under the names given here.

Names and labels are those of docs/wire-contract.md, section 2. Everything is counted on the engine thread, once
per engine: ranks tell what they did, and the scheduler's side counts a transfer when all of them are through.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

PUSH_TOKENS = "disagg_kv_push_tokens"
PUSH_BLOCKS = "disagg_kv_push_blocks"
PUSH_BYTES = "disagg_kv_push_bytes"
INSERTED_TOKENS = "disagg_kv_writeback_inserted_tokens"
HIT_TOKENS = "disagg_kv_writeback_hit_tokens"
EVICTED_UNUSED = "disagg_kv_writeback_evicted_unused_blocks"
OFFERS = "disagg_kv_writeback_offers"
ABORTED = "disagg_kv_writeback_aborted"
ONDEMAND = "disagg_kv_ondemand_requests"
ONDEMAND_TOKENS = "disagg_kv_ondemand_tokens"
RECOMPUTED = "disagg_kv_recomputed_requests"
REFUSED = "disagg_kv_refused_messages"
WRITE_SECONDS = "disagg_kv_write_seconds"
GRANT_SECONDS = "disagg_kv_grant_seconds"
WRITEBACK_SECONDS = "disagg_kv_writeback_seconds"
WAIT_SECONDS = "disagg_kv_prefill_wait_seconds"
LANDING_BLOCKS = "disagg_kv_landing_blocks"
RESERVE_BLOCKS = "disagg_kv_reserve_blocks"
PINNED_BLOCKS = "disagg_kv_writeback_pinned_blocks"
QUARANTINED = "disagg_kv_blocks_quarantined"
CONTROL_DROPPED = "disagg_kv_control_dropped"

Kind = Literal["counter", "gauge", "histogram"]
Amount = int | list[float]
"""Of a counter what to add, of a gauge the value, of a histogram the observations."""
Counts = dict[str, dict[str, Amount]]
"""By metric and by the value of its own label (empty for none)."""


@dataclass(frozen=True)
class Definition:
    """One metric: its help text, and its label beside vLLM's own (empty for none) with the values that
    are exported from the start, so that a rate over a first event is not lost."""

    help: str
    label: str = ""
    values: tuple[str, ...] = ()
    kind: Kind = "counter"


# A write takes milliseconds inside a zone, a whole write-back some tens; a prefill step in between, seconds.
BUCKETS_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)

_DIRECTIONS = ("prefill_to_decode", "decode_to_prefill")

DEFINITIONS: dict[str, Definition] = {
    PUSH_TOKENS: Definition(
        "Tokens whose KV was written to a peer and acknowledged.", "direction", _DIRECTIONS
    ),
    PUSH_BLOCKS: Definition("KV blocks written to a peer and acknowledged.", "direction", _DIRECTIONS),
    PUSH_BYTES: Definition("Bytes of KV written to a peer and acknowledged.", "direction", _DIRECTIONS),
    INSERTED_TOKENS: Definition("Tokens written back by decode that are now in prefill's prefix cache."),
    HIT_TOKENS: Definition("Tokens written back by decode that a later prompt found in the prefix cache."),
    EVICTED_UNUSED: Definition("KV blocks written back by decode that were evicted before any prompt used them."),
    OFFERS: Definition(
        "Write-backs that decode offered to prefill, by what became of the offer.",
        "result",
        ("granted", "have", "dup", "no_blocks", "fingerprint", "epoch", "closed", "evicted", "peer", "timeout", "error"),
    ),
    ABORTED: Definition(
        "Write-backs that prefill had granted and did not take up, by reason.",
        "reason",
        ("writer", "epoch", "notification", "lease"),
    ),
    ONDEMAND: Definition(
        "Times that prefill asked decode for KV it lacked, by result.",
        "result",
        ("served", "nothing", "timeout", "error"),
    ),
    ONDEMAND_TOKENS: Definition("Tokens that decode wrote because prefill asked for them, now in its cache."),
    RECOMPUTED: Definition("Turns whose KV did not arrive and were computed locally.", "reason"),
    CONTROL_DROPPED: Definition(
        "Messages on the control port that were dropped, by reason.",
        "reason",
        ("malformed", "unauthenticated", "unknown_key", "forged", "replayed", "overload"),
    ),
    REFUSED: Definition(
        "Messages of peers about KV that is not interchangeable with this engine's, by what differs.",
        "reason",
        ("epoch", "fingerprint", "closed", "gone"),
    ),
    WRITE_SECONDS: Definition(
        "From the start of a write to its completion on the slowest rank.",
        "direction", _DIRECTIONS, kind="histogram",
    ),
    GRANT_SECONDS: Definition("From an offer to the grant that answers it.", kind="histogram"),
    WRITEBACK_SECONDS: Definition(
        "From the end of a turn until its KV is in prefill's prefix cache and decode knows.", kind="histogram"
    ),
    WAIT_SECONDS: Definition(
        "How long prompts were held back for KV that decode might bring, of those that were.", kind="histogram"
    ),
    LANDING_BLOCKS: Definition("KV blocks granted to decode that are not published yet.", kind="gauge"),
    RESERVE_BLOCKS: Definition("KV blocks that prefill holds ready for write-backs.", kind="gauge"),
    PINNED_BLOCKS: Definition("KV blocks that decode keeps for write-backs under way.", kind="gauge"),
    QUARANTINED: Definition("KV blocks that a lost peer might still write into.", kind="gauge"),
}  # fmt: skip


@dataclass
class Counters:
    """Increments since the last `drain`, and gauges. Engine thread only."""

    _counts: dict[str, dict[str, int]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(int)))
    _observed: dict[str, dict[str, list[float]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(list))
    )
    _gauges: dict[str, Callable[[], int]] = field(default_factory=dict)
    _shown: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    def add(self, name: str, amount: int = 1, label: str = "") -> None:
        """Count `amount` under a counter of `DEFINITIONS`."""
        self._counts[name][label] += amount

    def observe(self, name: str, seconds: float, label: str = "") -> None:
        """One observation of a histogram of `DEFINITIONS`."""
        self._observed[name][label].append(seconds)

    def watch(self, name: str, read: Callable[[], int]) -> None:
        """Show what `read` returns under a gauge of `DEFINITIONS`."""
        self._gauges[name] = read

    @property
    def has_news(self) -> bool:
        """Whether `drain` would return anything."""
        if self._counts or self._observed:
            return True
        return any(read() != self._shown[name] for name, read in self._gauges.items())

    def drain(self) -> Counts:
        """All that was counted since the last call; gauges are included when they have changed."""
        counts: Counts = {}
        for source in (self._counts, self._observed):
            counts.update((name, dict(labels)) for name, labels in source.items())
            source.clear()
        for name, read in self._gauges.items():
            value = read()
            if value != self._shown[name]:
                self._shown[name] = value
                counts[name] = {"": value}
        return counts


def merge(into: Counts, more: Counts) -> None:
    """Add one drained set of counts to a later one's; of a gauge the later value stands."""
    for name, labels in more.items():
        mine = into.setdefault(name, {})
        for label, amount in labels.items():
            before = mine.get(label)
            if before is None or DEFINITIONS[name].kind == "gauge":
                mine[label] = amount
            else:
                mine[label] = before + amount  # type: ignore[operator]  # numbers or lists, by the metric's kind
