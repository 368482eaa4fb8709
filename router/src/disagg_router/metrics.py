"""The router's metrics. Nothing here is called for every chunk of a stream."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Iterator

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from disagg_router.backends import Fleet
from disagg_router.breaker import State
from disagg_router.handles import Handles
from disagg_router.load import LoadTable
from disagg_router.placer import Placer

disable_created_metrics()  # type: ignore[no-untyped-call]  # they double the page and say when a process saw a label first

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Metrics:
    """One registry a router, so that tests and embedders can have several."""

    def __init__(self, fleet: Fleet, loads: LoadTable, placer: Placer, handles: Handles | None) -> None:
        """`handles` are None if decode engines keep nothing for prefill to read."""
        self.registry = registry = CollectorRegistry()
        self.requests = Counter(
            "disagg_router_requests",
            "Requests answered, by endpoint and HTTP status; 499 if the client left before the answer began.",
            ["endpoint", "code"],
            registry=registry,
        )
        self.first_byte = Histogram(
            "disagg_router_time_to_first_byte_seconds",
            "From the whole request to the first piece of decode's answer; for a stream, the time to first token.",
            ["endpoint", "streamed"],
            buckets=_SECONDS,
            registry=registry,
        )
        self.duration = Histogram(
            "disagg_router_request_duration_seconds",
            "From the whole request to the end of the answer.",
            ["endpoint"],
            buckets=_SECONDS,
            registry=registry,
        )
        self.picks = Counter(
            "disagg_router_picks",
            "Engines picked for an attempt at a turn, by role and reason.",
            ["role", "reason"],
            registry=registry,
        )
        self.turns = Counter(
            "disagg_router_turns",
            "Turns that decode answered, by where the prompt was computed when the answer began.",
            ["prefill"],
            registry=registry,
        )
        self.recomputed = Counter(
            "disagg_router_recomputed_turns",
            "Turns that decode answered with a prompt it had to compute itself, by reason.",
            ["reason"],
            registry=registry,
        )
        self.decisions = Counter(
            "disagg_router_prefill_decisions",
            "Attempts at a turn, by where its prompt was to be computed and why.",
            ["placement", "reason"],
            registry=registry,
        )
        self.retries = Counter(
            "disagg_router_retries",
            "Attempts at a turn after the first, by what ended the one before.",
            ["reason"],
            registry=registry,
        )
        self.prefill_failures = Counter(
            "disagg_router_prefill_failures",
            "Prefill legs that failed, by reason, whether or not the turn had to wait for them.",
            ["reason"],
            registry=registry,
        )
        self.handles = Counter(
            "disagg_router_handles",
            "KV that decode kept for the next turn's prefill to read (mode BidirectionalPull), by what became of it here.",
            ["result"],
            registry=registry,
        )
        self.handle_messages_dropped = Counter(
            "disagg_router_handle_messages_dropped",
            "Messages of other replicas about handles that were not acted on, by reason.",
            ["reason"],
            registry=registry,
        )
        self.broken = Counter(
            "disagg_router_broken_answers",
            "Answers broken off after their first byte, because the engine failed or fell silent.",
            registry=registry,
        )
        self.prompt_tokens = Counter(
            "disagg_router_prompt_tokens",
            "Prompt tokens of turns, as prefill counted them.",
            registry=registry,
        )
        self.discovery_errors = Counter(
            "disagg_router_discovery_errors",
            "Times that watching the engines failed, by error.",
            ["error"],
            registry=registry,
        )
        self.running = Gauge(
            "disagg_router_running_turns", "Turns let in and not yet over.", registry=registry
        )
        self.waiting = Gauge(
            "disagg_router_waiting_turns", "Turns in the queue until others are over.", registry=registry
        )
        self.turn_limit = Gauge(
            "disagg_router_turn_limit",
            "Turns that may run at a time, by the decode engines that are ready now and not leaving.",
            registry=registry,
        )
        self.queue_wait = Histogram(
            "disagg_router_queue_wait_seconds",
            "How long turns waited before they were let in; those that were not are not in it.",
            buckets=_SECONDS,
            registry=registry,
        )
        self.shed = Counter(
            "disagg_router_shed_turns",
            "Turns that were not let in, because a queue was full or the wait too long.",
            ["reason"],
            registry=registry,
        )
        self.connections = Gauge(
            "disagg_router_client_connections", "Open client connections.", registry=registry
        )
        if handles is not None:
            Gauge(
                "disagg_router_retained_kv_blocks",
                "KV blocks that decode engines keep for prefill to read, by the handles that this replica keeps.",
                registry=registry,
            ).set_function(handles.blocks)
        registry.register(_Engines(fleet, loads))
        if placer.learns:
            registry.register(_Learned(placer))

    def render(self) -> bytes:
        return generate_latest(self.registry)


class _Engines(Collector):
    """Gauges of engines, computed when asked for, so that no series of a pod outlives the pod."""

    def __init__(self, fleet: Fleet, loads: LoadTable) -> None:
        self._fleet = fleet
        self._loads = loads

    def collect(self) -> Iterator[Metric]:
        engines = GaugeMetricFamily(
            "disagg_router_engines", "Engines known, by state.", labels=["role", "revision", "state"]
        )
        inflight = GaugeMetricFamily(
            "disagg_router_inflight_legs", "Legs of turns in flight on an engine.", labels=["role", "pod"]
        )
        breakers = GaugeMetricFamily(
            "disagg_router_breakers",
            "1 for the state that an engine's breaker is in: closed, open (no turns if there is another engine) or "
            "half_open (one turn at a time probes it).",
            labels=["role", "pod", "state"],
        )
        opened = CounterMetricFamily(
            "disagg_router_breaker_openings",
            "Times that an engine's breaker has opened, by what the last failure was.",
            labels=["role", "reason"],
        )
        tally = Tally((b.role, b.revision, b.state) for b in self._fleet.backends)
        for labels, count in sorted(tally.items()):
            engines.add_metric(list(labels), count)
        for backend in self._fleet.backends:
            inflight.add_metric([backend.role, backend.name], self._loads.inflight.get(backend.name, 0))
            now = self._loads.state(backend)
            for state in State:
                breakers.add_metric([backend.role, backend.name, state.value], state is now)
        for (role, reason), count in sorted(self._loads.opened.items()):
            opened.add_metric([role, reason], count)
        yield engines
        yield inflight
        yield breakers
        yield opened


class _Learned(Collector):
    """What `localPrefill.mode: Auto` goes by."""

    def __init__(self, placer: Placer) -> None:
        self._placer = placer

    def collect(self) -> Iterator[Metric]:
        placer = self._placer
        fixed = GaugeMetricFamily(
            "disagg_router_cost_fixed_seconds",
            "What a prompt costs whatever its length, as learned: on prefill, its hand-over to decode, on decode.",
            labels=["step"],
        )
        per_token = GaugeMetricFamily(
            "disagg_router_cost_seconds_per_token", "And for each of its tokens.", labels=["step"]
        )
        used = CounterMetricFamily(
            "disagg_router_cost_measurements", "Turns that this was learned from.", labels=["step"]
        )
        ignored = CounterMetricFamily(
            "disagg_router_cost_measurements_ignored", "Times that were no positive number.", labels=["step"]
        )
        costs = placer.costs()
        for step, cost in (
            ("prefill", costs.prefill),
            ("hand_over", costs.hand_over),
            ("decode", costs.decode),
        ):
            fixed.add_metric([step], cost.fixed)
            per_token.add_metric([step], cost.per_token)
            used.add_metric([step], placer.counts[step])
        for step, count in sorted(placer.ignored.items()):
            ignored.add_metric([step], count)
        yield CounterMetricFamily(
            "disagg_router_dropped_conversations",
            "Turns that went to decode for a conversation which it had dropped, by when their answers began.",
            value=placer.gone,
        )
        yield fixed
        yield per_token
        yield used
        yield ignored
        yield GaugeMetricFamily(
            "disagg_router_stream_gap_seconds",
            "The mean time between two pieces of a stream, which stands for the time between tokens; 0 if not known yet.",
            value=placer.gap,
        )
