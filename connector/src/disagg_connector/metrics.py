"""Brings the connector's counters, and upstream's of NIXL, to the engine's /metrics.

vLLM carries `PushStats.data` from workers and scheduler to the API server with every engine step, and hands
it to `PushMetrics.observe` there.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from disagg_connector.compat import load
from disagg_connector.counters import BUCKETS_SECONDS, DEFINITIONS, Counts, Definition, merge

OURS, NIXL = "disagg", "nixl"


class PushStats(KVConnectorStats):  # type: ignore[misc]
    """Counts of one step: ``{"disagg": counters.Counts, "nixl": upstream's}``, both optional."""

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        super().__init__(data=data if data is not None else {})

    @classmethod
    def of(cls, counts: Counts, nixl: Any = None) -> PushStats | None:
        """None if there is nothing to tell."""
        data: dict[str, Any] = {}
        if counts:
            data[OURS] = counts
        if nixl is not None and not nixl.is_empty():
            data[NIXL] = nixl.data
        return cls(data) if data else None

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def is_empty(self) -> bool:
        return not self.data

    def aggregate(self, other: KVConnectorStats) -> PushStats:
        merge(self.data.setdefault(OURS, {}), other.data.get(OURS, {}))
        if NIXL in other.data:
            mine = load().NixlStats(data=self.data.get(NIXL) or {})
            self.data[NIXL] = mine.aggregate(load().NixlStats(data=other.data[NIXL])).data
        return self

    def reduce(self) -> dict[str, int | float]:
        """One line for vLLM's periodic log."""
        numbers: dict[str, int | float] = {}
        for name, labels in self.data.get(OURS, {}).items():
            for label, amount in labels.items():
                key = name.removeprefix("disagg_kv_") + (f".{label}" if label else "")
                if isinstance(amount, list):
                    numbers[f"{key}.mean"] = round(sum(amount) / len(amount), 6)
                else:
                    numbers[key] = amount
        if NIXL in self.data:
            numbers |= load().NixlStats(data=self.data[NIXL]).reduce()
        return numbers


class PushMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """The metrics of docs/wire-contract.md section 2, and upstream's ``vllm:nixl_*``."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._nixl = load().NixlMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._metrics: dict[str, Any] = {}
        for name, definition in DEFINITIONS.items():
            own = [definition.label] if definition.label else []
            metric = self._metrics[name] = self._make(name, definition, labelnames + own)
            for values in per_engine_labelvalues.values():
                for value in definition.values or (() if definition.label else ("",)):
                    metric.labels(*values, *([value] if definition.label else []))

    def _make(self, name: str, definition: Definition, labelnames: list[str]) -> Any:
        common: dict[str, Any] = {"name": name, "documentation": definition.help, "labelnames": labelnames}
        if definition.kind == "gauge":
            # With several API servers, each is told of some of the steps.
            return self._gauge_cls(multiprocess_mode="mostrecent", **common)
        if definition.kind == "histogram":
            return self._histogram_cls(buckets=BUCKETS_SECONDS, **common)
        return self._counter_cls(**common)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, labels in transfer_stats_data.get(OURS, {}).items():
            definition = DEFINITIONS[name]
            for label, amount in labels.items():
                values = [*self.per_engine_labelvalues[engine_idx], *([label] if definition.label else [])]
                child = self._metrics[name].labels(*values)
                if definition.kind == "gauge":
                    child.set(amount)
                elif definition.kind == "histogram":
                    for seconds in amount:
                        child.observe(seconds)
                else:
                    child.inc(amount)
        if NIXL in transfer_stats_data:
            self._nixl.observe(transfer_stats_data[NIXL], engine_idx)
