"""The operator's own metrics, in a registry of their own."""

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

from .api.status import Condition, ConditionStatus


class Metrics:
    """What /metrics shows."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.reconcile_seconds = Histogram(
            "disagg_operator_reconcile_seconds",
            "Duration of one pass over one DisaggInference.",
            buckets=(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30),
            registry=self.registry,
        )
        self.reconcile_errors = Counter(
            "disagg_operator_reconcile_errors",
            "Passes that failed and are tried again, by the kind of failure.",
            ["kind"],
            registry=self.registry,
        )
        self._queue_depth = Gauge(
            "disagg_operator_queue_depth", "DisaggInferences waiting for a worker.", registry=self.registry
        )
        self._condition = Gauge(
            "disagg_operator_condition",
            "1 if the condition holds, 0 if not. Conditions that are absent have no series.",
            ["namespace", "name", "type"],
            registry=self.registry,
        )
        self._shown: dict[tuple[str, str], set[str]] = {}

    def watch_queue(self, depth: Callable[[], int]) -> None:
        """Reads the queue's depth from `depth` whenever somebody scrapes."""
        self._queue_depth.set_function(depth)

    def show_conditions(self, namespace: str, name: str, conditions: Iterable[Condition]) -> None:
        """Replaces an object's series; without conditions they go away."""
        present = {str(c.type): c.status is ConditionStatus.TRUE for c in conditions}
        for gone in self._shown.pop((namespace, name), set()) - present.keys():
            self._condition.remove(namespace, name, gone)
        for type_, is_true in present.items():
            self._condition.labels(namespace, name, type_).set(is_true)
        if present:
            self._shown[namespace, name] = set(present)

    def render(self) -> bytes:
        """The text exposition."""
        return generate_latest(self.registry)
