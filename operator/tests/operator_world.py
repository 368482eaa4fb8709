"""A cluster in memory for tests of pure code: it applies plans and plays the controllers, one step at a time.

It knows what the decisions depend on: server-side apply with generations and uids, StatefulSets with Parallel pods that
are updated highest ordinal first, Deployments that surge by one. It is not the API server; tests/live has that one.
"""

import itertools
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from disagg_operator.api.types import DisaggInferenceSpec
from disagg_operator.config import Settings
from disagg_operator.control_secret import KeyPolicy, SecretWrite
from disagg_operator.naming import FIELD_MANAGER, LABEL_REVISION, LABEL_ROLE
from disagg_operator.observe import Observed, observe
from disagg_operator.plan import Plan, Report, make_plan, report
from disagg_operator.wanted import Wanted, key_of, read

Manifest = dict[str, Any]
SETTINGS = Settings(router_image="router:1", connector_image="connector:1")
START = datetime(2026, 1, 1, tzinfo=UTC)
ROTATE = timedelta(days=7)


def _copy(value: Any) -> Any:
    """As copy.deepcopy, several times as fast: most of a simulation is copies of manifests."""
    return pickle.loads(pickle.dumps(value, pickle.HIGHEST_PROTOCOL))


def key_policy() -> KeyPolicy:
    """Keys that are told apart at a glance: 32 times the same byte, never the same byte twice."""
    numbers = itertools.count(1)
    return KeyPolicy(ROTATE, lambda size: bytes([next(numbers)]) * size)


def minimal_spec(**changes: Any) -> Manifest:
    """The shortest spec that serves, with top-level fields replaced."""
    return {
        "model": {"uri": "hf://org/model"},
        "engine": {"image": "vllm:1"},
        "prefill": {"replicas": 2},
        "decode": {"replicas": 2},
        **changes,
    }


def parsed_spec(**changes: Any) -> DisaggInferenceSpec:
    return DisaggInferenceSpec.model_validate(minimal_spec(**changes))


def resource(spec: Manifest | None = None, *, name: str = "demo", **metadata: Any) -> Manifest:
    """A DisaggInference as the API server returns it."""
    return {
        "apiVersion": "inference.disagg.dev/v1alpha1",
        "kind": "DisaggInference",
        "metadata": {"namespace": "default", "name": name, "uid": "uid-1", "generation": 1, **metadata},
        "spec": minimal_spec() if spec is None else spec,
    }


@dataclass
class SimulatedPod:
    name: str
    owner: str
    labels: dict[str, str]
    template: Manifest
    ready_at: datetime | None = None
    answers: bool = True
    """Its readiness probe, once its container has started."""


@dataclass
class World:
    """The cluster, and the DisaggInference in it."""

    resource: Manifest = field(default_factory=resource)
    can_start: Callable[[Manifest], bool] = lambda template: True
    """Whether a pod of this template ever becomes ready."""
    live: dict[tuple[str, str], Manifest] = field(default_factory=dict)
    pods: dict[str, SimulatedPod] = field(default_factory=dict)
    now: datetime = START
    deleted: list[str] = field(default_factory=list)
    told: list[SecretWrite] = field(default_factory=list)
    """What was written to the Secret."""
    policy: KeyPolicy = field(default_factory=key_policy)
    _uids: Any = field(default_factory=lambda: itertools.count(1))

    def edit(self, **changes: Any) -> None:
        """The user changes top-level fields of the spec."""
        self.resource["spec"] = {**self.resource["spec"], **changes}
        self.resource["metadata"]["generation"] += 1

    def look(self) -> tuple[Wanted, Observed]:
        wanted = read(self.resource, SETTINGS)
        return wanted, observe(wanted.owner.uid, self.items())

    def items(self) -> list[Manifest]:
        """All children and pods, as the API server would list them."""
        pods = [self._pod_manifest(pod) for pod in self.pods.values()]
        return list(_copy([*self.live.values(), *pods]))

    def plan(self) -> Plan:
        return make_plan(*self.look(), self.now, KeyPolicy(self.policy.every, bytes))

    def reconcile(self) -> Report:
        """One pass, as reconcile.py makes it."""
        return self._pass()[1]

    def _pass(self) -> tuple[Plan, Report]:
        wanted, observed = self.look()
        plan = make_plan(wanted, observed, self.now, self.policy)
        if plan.secret is not None:
            self.write_secret(plan.secret)
        for manifest in plan.apply:
            self.apply(manifest)
        for item in plan.prune:
            self.delete(key_of(item))
        said = report(wanted, observed, plan, [], self.now)
        self.resource["status"] = said.status.to_wire()
        return plan, said

    def write_secret(self, write: SecretWrite) -> None:
        """Create, or update of the version that was looked at."""
        key, item = key_of(write.manifest), _copy(write.manifest)
        if write.exists:
            assert item["metadata"]["resourceVersion"] == self.live[key]["metadata"]["resourceVersion"]
        else:
            assert key not in self.live, "created over an object that is there"
            item["metadata"]["uid"] = f"child-{next(self._uids)}"
        item["metadata"]["resourceVersion"] = str(next(self._uids))
        self.live[key] = item
        self.told.append(write)

    def apply(self, manifest: Manifest) -> None:
        key, old = key_of(manifest), self.live.get(key_of(manifest))
        item = _copy(manifest)
        meta = item["metadata"]
        moment = self.now.isoformat()
        version = str(next(self._uids))
        meta["managedFields"] = [{"manager": FIELD_MANAGER, "operation": "Apply", "time": moment}]
        if old is None:
            meta |= {"uid": f"child-{next(self._uids)}", "generation": 1, "creationTimestamp": moment}
        else:
            last = old["metadata"]
            assert meta["uid"] == last["uid"], "applied over an object that was not looked at"
            assert meta.get("resourceVersion", last["resourceVersion"]) == last["resourceVersion"]
            same = item.get("spec") == old.get("spec")
            generation = old["metadata"]["generation"] + (0 if same else 1)
            meta |= {"generation": generation, "creationTimestamp": old["metadata"]["creationTimestamp"]}
            item["status"] = old.get("status", {})
        meta["resourceVersion"] = version
        self.live[key] = item

    def delete(self, key: tuple[str, str]) -> None:
        del self.live[key]
        self.deleted.append(key[1])
        self.pods = {name: pod for name, pod in self.pods.items() if pod.owner != key[1]}

    def tick(self, seconds: float = 10) -> None:
        """Time passes: controllers act once, pods that can start become ready."""
        self.now += timedelta(seconds=seconds)
        for item in list(self.live.values()):
            if item["kind"] in ("StatefulSet", "Deployment"):
                self._control(item)

    def settle(self, passes: int = 60) -> Report:
        """Passes and ticks until three passes in a row change nothing and no pod is leaving; fails if that does not happen."""
        quiet = 0
        for _ in range(passes):
            before = (_copy(self.resource.get("status")), len(self.deleted), sorted(self.pods))
            plan, said = self._pass()
            self.tick()
            after = (self.resource["status"], len(self.deleted), sorted(self.pods))
            leaving = any(pool.leaving_since is not None for pool in plan.pools.values())
            quiet = quiet + 1 if before == after and not (plan.apply or plan.prune or leaving) else 0
            if quiet == 3:
                return said
        raise AssertionError(f"not settled after {passes} passes: {self.resource['status']}")

    def ready(self, role: str, revision: str | None = None) -> int:
        return sum(
            pod.ready_at is not None
            for pod in self.pods.values()
            if pod.labels[LABEL_ROLE] == role and revision in (None, pod.labels.get(LABEL_REVISION))
        )

    def condition(self, type_: str) -> Manifest | None:
        conditions = self.resource.get("status", {}).get("conditions", [])
        return next((c for c in conditions if c["type"] == type_), None)

    def _control(self, item: Manifest) -> None:
        meta, spec = item["metadata"], item["spec"]
        owned = [pod for pod in self.pods.values() if pod.owner == meta["name"]]
        for pod in owned:
            if pod.ready_at is None and self.can_start(pod.template):
                pod.ready_at = self.now
        wanted, template = spec["replicas"], spec["template"]
        for pod in owned[wanted:]:
            del self.pods[pod.name]
        owned = owned[:wanted]
        # Highest ordinal first, and only while no updated pod is still unready.
        for pod in reversed(owned):
            if pod.template != template:
                del self.pods[pod.name]
                owned.remove(pod)
                break
            if pod.ready_at is None:
                break
        present = {pod.name for pod in owned}
        for ordinal in range(wanted):
            name = f"{meta['name']}-{ordinal}"
            if name not in present:
                pod = SimulatedPod(name, meta["name"], template["metadata"]["labels"], _copy(template))
                self.pods[name] = pod
                owned.append(pod)
        item["status"] = {
            "observedGeneration": meta["generation"],
            "replicas": len(owned),
            "updatedReplicas": sum(pod.template == template for pod in owned),
        }

    def _pod_manifest(self, pod: SimulatedPod) -> Manifest:
        moment = pod.ready_at.isoformat() if pod.ready_at else None
        started, is_ready = moment is not None, moment is not None and pod.answers
        ready = {"type": "Ready", "status": str(is_ready), "lastTransitionTime": moment}
        main = {"name": "main", "started": started, "ready": is_ready}
        return {
            "kind": "Pod",
            "metadata": {"name": pod.name, "labels": pod.labels},
            "status": {
                "phase": "Running",
                "podIP": "10.0.0.1",
                "conditions": [ready],
                "containerStatuses": [main],
            },
        }
