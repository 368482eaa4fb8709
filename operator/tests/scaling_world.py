"""Autoscaled objects in a cluster in memory, for tests of whole passes: the reconciler against `operator_world`, with pods whose
pages of metrics follow a made-up load, and clocks that the test turns."""

import itertools
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

import jsonschema
from operator_world import SETTINGS, START, Manifest, World, resource

from disagg_operator.api.crd import disagginference_crd, scaler_crd
from disagg_operator.autoscale import Course
from disagg_operator.errors import KubeError
from disagg_operator.metrics import Metrics
from disagg_operator.naming import KIND, LABEL_KEEP, LABEL_ROLE, SCALER_KIND
from disagg_operator.pages import Answer, NoPage, Target
from disagg_operator.reconcile import Key, Reconciler
from disagg_operator.scrape import samples

STEP = 15.0
WINDOW = 300
"""Seconds of low load before a pool shrinks."""
PROMPT = 1000.0
"""Tokens of every prompt."""
SPEED = 1000
"""Prompt tokens that one prefill pod computes per second; three quarters are planned for."""
_SCHEMAS = {
    KIND: disagginference_crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"],
    SCALER_KIND: scaler_crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"],
}


def scaled_spec(mode: str = "Auto", **changes: Any) -> Manifest:
    """Both roles from 1 to 8 pods, prefill's speed given, and a short wait before a pool shrinks."""
    bounds = {"minReplicas": 1, "maxReplicas": 8}
    return {
        "model": {"uri": "hf://org/model"},
        "engine": {"image": "vllm:1"},
        "prefill": {"scaling": bounds, "drain": {"handoverSeconds": 60}},
        "decode": {"scaling": bounds, "drain": {"handoverSeconds": 60}},
        "router": {"replicas": 2},
        "autoscaling": autoscaling(mode),
        **changes,
    }


def autoscaling(mode: str = "Auto", down_window: int = WINDOW, **targets: Any) -> Manifest:
    return {
        "mode": mode,
        "ratio": {"minPercent": 1, "maxPercent": 10_000},
        "targets": {
            "prefillTokensPerSecond": SPEED,
            "prefillUtilizationPercent": 75,
            "remoteTokenCostMilli": 50,
            **targets,
        },
        "behavior": {"scaleDown": {"stabilizationWindowSeconds": down_window, "maxPods": 1}},
    }


def as_the_crd_asks(kind: str, status: Manifest) -> None:
    """Fails if the API server would refuse the status, or keep less than all of it."""
    schema = _SCHEMAS[kind]["properties"]["status"]
    json.dumps(status, allow_nan=False)
    jsonschema.Draft202012Validator(schema).validate(status)
    _known(schema, status, "status")


def _known(schema: Any, value: Any, path: str) -> None:
    assert not isinstance(value, float), f"{path} is {value}"
    if isinstance(value, int) and not isinstance(value, bool):
        assert abs(value) < 2**63, f"{path} is no int64"
    if isinstance(value, dict):
        assert value.keys() <= schema["properties"].keys(), path
        for key, item in value.items():
            _known(schema["properties"][key], item, f"{path}.{key}")
    if isinstance(value, list):
        for item in value:
            _known(schema["items"], item, f"{path}[]")


@dataclass
class Server:
    """An API server in memory, as far as a pass needs one. It checks each status against its CRD and keeps what it was told."""

    worlds: dict[str, World]
    refuse: Callable[[str, str, str], KubeError | None] = lambda verb, kind, name: None
    applied: list[tuple[str, str, Manifest]] = field(default_factory=list)
    """Kind, name and manifest of each write that was no status, in order."""
    statuses: list[tuple[str, str]] = field(default_factory=list)
    told: list[Manifest] = field(default_factory=list)
    _versions: Any = field(default_factory=lambda: itertools.count(1000))

    def _asked(self, verb: str, kind: str, name: str) -> World:
        error = self.refuse(verb, kind, name)
        if error is not None:
            raise error
        return next(world for key, world in self.worlds.items() if name == key or name.startswith(f"{key}-"))

    async def get(self, kind: str, namespace: str, name: str) -> Manifest | None:
        if kind == KIND and name not in self.worlds:
            return None
        world = self._asked("get", kind, name)
        return world.resource if kind == KIND else world.live.get((kind, name))

    async def children(self, namespace: str, name: str) -> list[Manifest]:
        world = self._asked("list", "", name)
        return [item for item in world.items() if item["kind"] != "Secret"]

    async def events(self, kind: str, namespace: str, name: str) -> list[Manifest]:
        return []

    async def apply(self, manifest: Manifest, *, status: bool = False) -> None:
        kind, name = manifest["kind"], manifest["metadata"]["name"]
        world = self._asked("status" if status else "apply", kind, name)
        if not status:
            self.applied.append((kind, name, manifest))
            world.apply(manifest)
            return
        as_the_crd_asks(kind, manifest["status"])
        self.statuses.append((kind, name))
        target = world.resource if kind == KIND else world.live[kind, name]
        target["status"] = manifest["status"]
        target["metadata"]["resourceVersion"] = str(next(self._versions))

    async def create(self, manifest: Manifest) -> None:
        if manifest["kind"] == "Event":
            self.told.append(manifest)
            return
        await self.replace(manifest)

    async def replace(self, manifest: Manifest) -> None:
        kind, name = manifest["kind"], manifest["metadata"]["name"]
        version = str(next(self._versions))
        meta = {**manifest["metadata"], "uid": f"uid-{version}", "resourceVersion": version}
        self._asked("write", kind, name).live[kind, name] = {**manifest, "metadata": meta}

    async def delete(self, kind: str, namespace: str, name: str, uid: str) -> None:
        self._asked("delete", kind, name).delete((kind, name))


@dataclass
class Load:
    """What clients ask of one object."""

    tokens: float = 0.0
    """Of prompts, per second."""
    cached: float = 0.0
    """Which share of them prefill finds in its own cache."""
    brought: float = 0.0
    """And which of what decode wrote back."""
    decode: float = 0.3
    """KV caches that the conversations would fill."""


@dataclass
class Counts:
    """What one pod has counted."""

    computed: float = 0.0
    cached: float = 0.0
    hits: float = 0.0
    prompts: float = 0.0


Mangle = Callable[[str], Answer | str]


@dataclass
class Scene:
    """Objects, their pods, and the operator."""

    worlds: dict[str, World]
    loads: dict[str, Load] = field(default_factory=dict)
    broken: dict[str, Mangle] = field(default_factory=dict)
    """Pods whose page is not what it should be."""
    even: float = 5000.0
    now: datetime = START
    courses: dict[str, Course | None] = field(default_factory=dict)
    asked: list[frozenset[str]] = field(default_factory=list)
    """Pods whose pages were read for autoscaling, look by look."""
    again: dict[str, float | None] = field(default_factory=dict)
    """In how many seconds the latest pass wants the next one."""
    failures: list[Exception] = field(default_factory=list)
    metrics: Metrics = field(default_factory=Metrics)
    slow: float = 0.0
    """Seconds that go by whenever the operator asks what time it is."""
    _counts: dict[str, Counts] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.server = Server(self.worlds)
        self.reconciler = self._operator()
        self.loads = {name: Load() for name in self.worlds} | self.loads

    @classmethod
    def of(cls, spec: Manifest | None = None, *, prefill: int = 1, decode: int = 1, **load: float) -> "Scene":
        """One object called demo, at rest, with pools of these sizes. Nobody has looked at its metrics yet."""
        world = World(resource(scaled_spec() if spec is None else spec))
        world.settle()
        if world.resource["spec"]["autoscaling"]["mode"] != "Disabled":
            for role, size in (("prefill", prefill), ("decode", decode)):
                world.live[SCALER_KIND, f"demo-{role}"]["spec"]["replicas"] = size
            world.settle()
        world.resource.pop("status")
        return cls({"demo": world}, {"demo": Load(**load)}, now=world.now)

    # The operator and its time

    def _operator(self) -> Reconciler:
        return Reconciler(
            self.server,  # type: ignore[arg-type]
            SETTINGS,
            self._time,
            lambda size: bytes(size),
            lambda key, conditions: None,
            self._read_pages,
            lambda: self.even,
            self._show,
        )

    def _time(self) -> datetime:
        self.now += timedelta(seconds=self.slow)
        return self.now

    def restart(self) -> None:
        """The operator begins anew, on a machine whose even clock shows something else."""
        self.even, self.courses = 77.0, {}
        self.reconciler = self._operator()

    def _show(self, key: Key, course: Course | None) -> None:
        self.courses[key.name] = course
        self.metrics.show_course(key.namespace, key.name, course)

    async def pass_(self, name: str = "demo") -> None:
        """One pass; what fails is kept and not raised."""
        try:
            self.again[name] = await self.reconciler.reconcile(Key("default", name))
        except KubeError as error:
            self.failures.append(error)

    async def step(self, seconds: float = STEP) -> None:
        """Time goes by, controllers act, every object is looked at once."""
        self.now += timedelta(seconds=seconds)
        self.even += seconds
        for name, world in self.worlds.items():
            world.now = self.now - timedelta(seconds=seconds)
            world.tick(seconds)
            self._serve(name, seconds)
        for name in self.worlds:
            await self.pass_(name)

    async def run(self, seconds: float) -> None:
        """So much time, step by step."""
        for _ in range(round(seconds / STEP)):
            await self.step()

    async def until(self, holds: Callable[[], bool], limit: float = 1200.0) -> float:
        """Steps until `holds`; returns how many seconds that took."""
        for count in range(1, round(limit / STEP) + 1):
            await self.step()
            if holds():
                return count * STEP
        raise AssertionError(f"not within {limit:g} s: {self.status()}")

    # What there is to see

    def status(self, name: str = "demo") -> Manifest:
        found: Manifest = self.worlds[name].resource.get("status", {})
        return found

    def scaling(self, role: str = "prefill", name: str = "demo") -> Manifest:
        found: Manifest = self.status(name)["scaling"][role]
        return found

    def active(self, name: str = "demo") -> Manifest:
        """The condition ScalingActive."""
        condition = self.worlds[name].condition("ScalingActive")
        assert condition is not None
        return condition

    def scaler(self, role: str = "prefill", name: str = "demo") -> int:
        size: int = self.worlds[name].live[SCALER_KIND, f"{name}-{role}"]["spec"]["replicas"]
        return size

    def write_scaler(self, size: int, role: str = "prefill", name: str = "demo") -> None:
        """Somebody else does."""
        item = self.worlds[name].live[SCALER_KIND, f"{name}-{role}"]
        item["spec"] = {"replicas": size}
        item["metadata"]["generation"] += 1
        item["metadata"]["resourceVersion"] = f"by-hand-{item['metadata']['generation']}"

    def pods(self, role: str = "prefill", name: str = "demo") -> list[str]:
        return sorted(pod for pod in self.worlds[name].pods if f"{name}-{role}-" in pod)

    def leaving(self, role: str = "prefill", name: str = "demo") -> str | None:
        """From which ordinal on routers are told that pods are leaving."""
        labels = [
            item["metadata"]["labels"]
            for (kind, _), item in self.worlds[name].live.items()
            if kind == "Service" and item["metadata"]["labels"].get(LABEL_ROLE) == role
        ]
        return next((str(found[LABEL_KEEP]) for found in labels if LABEL_KEEP in found), None)

    def writes(self, kind: str = SCALER_KIND) -> list[tuple[str, Any]]:
        """Name and spec of each object of the kind that was applied."""
        return [(name, item.get("spec")) for found, name, item in self.server.applied if found == kind]

    def events(self, *reasons: str) -> list[str]:
        """Messages of the events with one of these reasons."""
        return [event["message"] for event in self.server.told if event["reason"] in reasons]

    def exposed(self) -> str:
        return self.metrics.render().decode()

    # The pods

    def _ready(self, name: str, role: str) -> list[str]:
        pods = self.worlds[name].pods
        return [pod for pod in self.pods(role, name) if pods[pod].ready_at is not None]

    def _serve(self, name: str, seconds: float) -> None:
        load = self.loads[name]
        tokens, prefill = load.tokens * seconds, self._ready(name, "prefill")
        for pod in prefill:
            counts, share = self._counts.setdefault(pod, Counts()), tokens / len(prefill)
            counts.computed += share * (1 - load.cached - load.brought)
            counts.cached += share * (load.cached + load.brought)
            counts.hits += share * load.brought
            counts.prompts += share / PROMPT
        routers = self._ready(name, "router")
        for pod in routers:
            self._counts.setdefault(pod, Counts()).prompts += tokens / PROMPT / len(routers)

    async def _read_pages(self, targets: Mapping[str, Target]) -> dict[str, Answer]:
        if any("vllm:num_requests_waiting" in target.names for target in targets.values()):
            self.asked.append(frozenset(targets))
        return {pod: self._page(pod, target) for pod, target in targets.items()}

    def _page(self, pod: str, target: Target) -> Answer:
        if not any(pod in world.pods for world in self.worlds.values()):
            return NoPage("no connection")
        text: Answer | str = self.page(pod)
        if pod in self.broken:
            text = self.broken[pod](self.page(pod))
        if not isinstance(text, str):
            return text
        try:
            return samples(text, target.names)
        except ValueError as error:
            return NoPage(str(error))

    def page(self, pod: str) -> str:
        """What the pod's /metrics shows."""
        name = next(name for name in self.worlds if pod in self.worlds[name].pods)
        counts, own = self._counts.setdefault(pod, Counts()), 'engine="0",model_name="m"'
        if f"{name}-prefill-" in pod:
            return _lines(
                (f'vllm:prompt_tokens_by_source_total{{{own},source="local_compute"}}', counts.computed),
                (f'vllm:prompt_tokens_by_source_total{{{own},source="local_cache_hit"}}', counts.cached),
                (f'vllm:prompt_tokens_by_source_total{{{own},source="external_kv_transfer"}}', 0.0),
                (f"vllm:request_prefill_time_seconds_count{{{own}}}", counts.prompts),
                (f"vllm:request_prefill_time_seconds_sum{{{own}}}", counts.prompts),
                (f"vllm:num_requests_waiting{{{own}}}", 0.0),
                (f"disagg_kv_writeback_hit_tokens_total{{{own}}}", counts.hits),
            )
        if f"{name}-decode-" in pod:
            usage = min(1.0, self.loads[name].decode / max(len(self._ready(name, "decode")), 1))
            return _lines(
                (f"vllm:kv_cache_usage_perc{{{own}}}", usage),
                (f"vllm:num_requests_running{{{own}}}", 4.0),
                (f"vllm:num_requests_waiting{{{own}}}", 0.0),
            )
        return _lines(
            ("disagg_router_waiting_turns", 0.0),
            (
                'disagg_router_prefill_decisions_total{placement="prefill",reason="disabled"}',
                counts.prompts,
            ),
        )


def _lines(*lines: tuple[str, float]) -> str:
    return "".join(f"{name} {value!r}\n" for name, value in lines)


def no_number_is_none(lines: Iterable[str]) -> None:
    """Fails if a number on a page is not one."""
    for line in lines:
        if line and not line.startswith("#"):
            assert math.isfinite(float(line.rpartition(" ")[2])), line
