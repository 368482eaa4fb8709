"""The operator's own metrics, in a registry of their own."""

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from .api.status import Condition, ConditionStatus
from .autoscale import Course, need
from .naming import ENGINES


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
        self._courses: dict[tuple[str, str], Course] = {}
        self.registry.register(_Scaling(self._courses))
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

    def show_course(self, namespace: str, name: str, course: Course | None) -> None:
        """Replaces what is shown of an object's autoscaling; None takes it away."""
        if course is None:
            self._courses.pop((namespace, name), None)
        else:
            self._courses[namespace, name] = course

    def render(self) -> bytes:
        """The text exposition."""
        return generate_latest(self.registry)


class _Scaling(Collector):
    """The latest look at the load of each object, computed when asked for. What is not known has no series, so that an HPA that
    goes by one of these holds."""

    def __init__(self, courses: Mapping[tuple[str, str], Course]) -> None:
        self._courses = courses

    def collect(self) -> Iterator[Metric]:
        of = ["namespace", "name"]
        recommended = GaugeMetricFamily(
            "disagg_scaling_recommended_replicas",
            "Pods that the load asks for, bounded and damped.",
            labels=[*of, "role"],
        )
        needed = GaugeMetricFamily(
            "disagg_scaling_needed_replicas", "The same before bounds and damping.", labels=[*of, "role"]
        )
        limited = GaugeMetricFamily(
            "disagg_scaling_limited",
            "1 for what limited or moved a role's size.",
            labels=[*of, "role", "reason"],
        )
        reuse = GaugeMetricFamily(
            "disagg_reuse_ratio",
            "Share of prompt tokens that prefill did not compute: local, found in its own cache; remote, brought by decode.",
            labels=[*of, "kind"],
        )
        offered = GaugeMetricFamily(
            "disagg_scaling_offered_tokens_per_second", "Prompt tokens sent to prefill per second.", labels=of
        )
        missing = GaugeMetricFamily(
            "disagg_scaling_missing_pods", "Pods whose metrics could not be used.", labels=of
        )
        for (namespace, name), course in sorted(self._courses.items()):
            decision, load = course.decision, course.inputs.prefill
            missing.add_metric([namespace, name], len(course.inputs.missing))
            if load is not None:
                offered.add_metric([namespace, name], load.offered)
            if load is not None and load.tokens:
                reuse.add_metric([namespace, name, "local"], load.reuse.local)
                reuse.add_metric([namespace, name, "remote"], load.reuse.remote)
            if decision is None:
                continue
            for role in ENGINES:
                labels = [namespace, name, str(role)]
                recommended.add_metric(labels, decision.desired.of(role))
                pods, because = need(decision, role), decision.because(role)
                if pods is not None:
                    needed.add_metric(labels, pods)
                if because is not None:
                    limited.add_metric([*labels, str(because)], 1)
        yield from (recommended, needed, limited, reuse, offered, missing)
