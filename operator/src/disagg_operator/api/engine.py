"""The part of the spec that makes engine containers: the engine and the two roles that run it."""

from enum import StrEnum
from typing import Annotated, ClassVar, NamedTuple

from pydantic import Field

from .base import ApiObject, Opaque, Quantity, Rule, list_type, validations


class Device(StrEnum):
    """What an engine computes on."""

    GPU = "GPU"
    CPU = "CPU"


class EnvKeyRef(ApiObject):
    """A key of a Secret or ConfigMap in the same namespace."""

    name: Annotated[str, Field(min_length=1, max_length=253, description="Name of the object.")]
    key: Annotated[str, Field(min_length=1, max_length=253, description="Key in the object.")]
    optional: Annotated[bool, Field(description="Start the container even if the key is missing.")] = False


class EnvFieldRef(ApiObject):
    """A field of the pod, by the downward API."""

    field_path: Annotated[
        str, Field(min_length=1, max_length=253, description="For example status.hostIP or metadata.name.")
    ]


class EnvSource(ApiObject):
    """Where a variable's value comes from: exactly one of its fields."""

    secret_key_ref: Annotated[EnvKeyRef | None, Field(description="A key of a Secret.")] = None
    config_map_key_ref: Annotated[EnvKeyRef | None, Field(description="A key of a ConfigMap.")] = None
    field_ref: Annotated[EnvFieldRef | None, Field(description="A field of the pod.")] = None

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "[has(self.secretKeyRef), has(self.configMapKeyRef), has(self.fieldRef)].filter(x, x).size() == 1",
            "valueFrom takes exactly one of secretKeyRef, configMapKeyRef, fieldRef",
        ),
    )


class EnvVar(ApiObject):
    """An environment variable of the engine's container."""

    name: Annotated[
        str,
        Field(
            min_length=1,
            max_length=253,
            pattern=r"^[A-Za-z_][A-Za-z0-9_]*$",
            description="The variable's name.",
        ),
    ]
    value: Annotated[str | None, Field(max_length=32768, description="Its value, as text.")] = None
    value_from: Annotated[EnvSource | None, Field(description="Where its value comes from.")] = None

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule("!(has(self.value) && has(self.valueFrom))", "set value or valueFrom, not both"),
        Rule(
            "!(self.name in ['VLLM_NIXL_SIDE_CHANNEL_HOST', 'VLLM_NIXL_SIDE_CHANNEL_PORT'])",
            "the operator sets the side channel's address itself (pod IP, port 5600): remove this variable",
            ".name",
        ),
        Rule(
            "self.name != 'PYTHONPATH' || has(self.value)",
            "PYTHONPATH must be given as a value: the operator puts the connector's folder before it",
            ".valueFrom",
        ),
        Rule(
            "!self.name.startsWith('DISAGG_')",
            "variables that start with DISAGG_ belong to the operator: remove this one",
            ".name",
        ),
    )


class ReservedArg(NamedTuple):
    """Flags of `vllm serve` that are not the user's to set."""

    pattern: str
    """What CEL looks for. vLLM takes `_` for `-`, `--flag=value`, and `--flag.key value` for flags whose value is JSON."""
    shown: str
    instead: str
    flags: tuple[str, ...]
    """In full, those that may be abbreviated; `reserved` looks for that, since CEL cannot."""


_DATA_PARALLEL = ("address", "backend", "external-lb", "hybrid-lb", "multi-port-external-lb", "rank", "rpc-port", "size",
                  "size-local", "start-rank", "supervisor-port")  # fmt: skip
RESERVED_ARGS: tuple[ReservedArg, ...] = (
    ReservedArg(
        "--kv[-_]transfer[-_]config", "--kv-transfer-config", "set spec.kvTransfer", ("--kv-transfer-config",)
    ),
    ReservedArg(
        "--served[-_]model[-_]name", "--served-model-name", "set spec.model.name", ("--served-model-name",)
    ),
    ReservedArg("--model", "--model", "set spec.model.uri", ("--model",)),
    ReservedArg("--revision", "--revision", "set spec.model.revision", ("--revision",)),
    ReservedArg("--port", "--port", "engines always listen on port 8000", ("--port",)),
    ReservedArg("--host", "--host", "engines always listen on all addresses of the pod", ("--host",)),
    ReservedArg(
        "--tensor[-_]parallel[-_]size|-tp",
        "--tensor-parallel-size",
        "set parallelism.tensor of the role",
        ("--tensor-parallel-size", "-tp"),
    ),
    ReservedArg(
        "--pipeline[-_]parallel[-_]size|-pp",
        "--pipeline-parallel-size",
        "set parallelism.pipeline of the role",
        ("--pipeline-parallel-size", "-pp"),
    ),
    ReservedArg(
        "--data[-_]parallel[-_][a-z_-]+|-dp[a-z]*",
        "--data-parallel-*",
        "set parallelism.data of the role",
        tuple(f"--data-parallel-{name}" for name in _DATA_PARALLEL),
    ),
    ReservedArg(
        "--shutdown[-_]timeout",
        "--shutdown-timeout",
        "set drain.timeoutSeconds of the role",
        ("--shutdown-timeout",),
    ),
    ReservedArg(
        "--(decode|prefill)[-_]context[-_]parallel[-_]size|-dcp|-pcp",
        "--decode- or --prefill-context-parallel-size",
        "KV cannot be transferred with context parallelism: remove it",
        ("--decode-context-parallel-size", "--prefill-context-parallel-size", "-pcp"),
    ),
    ReservedArg(
        "--prefix[-_]caching[-_]hash[-_]algo",
        "--prefix-caching-hash-algo",
        "KV is found by vLLM's default, sha256: remove it",
        ("--prefix-caching-hash-algo",),
    ),
    ReservedArg(
        "--config", "--config", "list the flags in extraArgs, so that the operator sees them", ("--config",)
    ),
    ReservedArg(
        "--api[-_]key|--ssl[-_][a-z_-]+|--uds",
        "--api-key, --ssl-* or --uds",
        "router and probes speak plain HTTP without a key to port 8000. Set spec.router.auth and spec.router.tls "
        "instead",
        (
            "--api-key",
            "--ssl-ca-certs",
            "--ssl-cert-reqs",
            "--ssl-certfile",
            "--ssl-ciphers",
            "--ssl-keyfile",
            "--uds",
        ),
    ),
)


def _reserved_rule(reserved: ReservedArg) -> Rule:
    return Rule(
        f"!self.exists(a, a.matches('^({reserved.pattern})([.=].*)?$'))",
        f"extraArgs may not contain {reserved.shown}: {reserved.instead}",
    )


_ARGS_RULES = (
    Rule(
        r"!self.exists(a, a.matches('^--?[A-Za-z0-9_.-]+[ \\t\\n]'))",
        "a flag and its value are two items of extraArgs, or one as --flag=value: split the item",
    ),
    *(_reserved_rule(reserved) for reserved in RESERVED_ARGS),
)

ExtraArgs = Annotated[
    tuple[Annotated[str, Field(max_length=4096)], ...],
    Field(max_length=128, json_schema_extra=list_type("atomic") | validations(_ARGS_RULES)),
]
"""Flags of `vllm serve`, an item each."""


class Engine(ApiObject):
    """The vLLM engine that both roles run."""

    image: Annotated[
        str,
        Field(
            min_length=1,
            max_length=512,
            pattern=r"^[^\s]+$",
            description="A vLLM image, as published; the KV connector is put into it at start. Part of KV compatibility: "
            "both roles run the same image.",
        ),
    ]
    device: Annotated[
        Device,
        Field(
            description="GPU: each pod requests tensor x pipeline x data GPUs. CPU: it requests none, the image "
            "must be a CPU build; for trying out and for tests."
        ),
    ] = Device.GPU
    extra_args: Annotated[
        ExtraArgs,
        Field(
            description="Further flags of `vllm serve` for both roles, an item each: --max-model-len, 32768."
        ),
    ] = ()
    env: Annotated[
        tuple[EnvVar, ...],
        Field(
            max_length=128,
            json_schema_extra=list_type("map", "name"),
            description="Environment variables of both roles' engine containers.",
        ),
    ] = ()


class RoleScaling(ApiObject):
    """Between how many replicas a role is scaled."""

    min_replicas: Annotated[int, Field(ge=1, le=1000, description="The least number of pods.")] = 1
    max_replicas: Annotated[int, Field(ge=1, le=1000, description="The greatest number of pods.")]

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "self.minReplicas <= self.maxReplicas",
            "scaling.minReplicas must not be greater than scaling.maxReplicas",
            ".minReplicas",
        ),
    )


class Parallelism(ApiObject):
    """How one replica (one pod) spreads the model over devices."""

    tensor: Annotated[
        int,
        Field(
            ge=1,
            le=64,
            description="Tensor parallel size. Of the two roles' sizes one must be a multiple of the other.",
        ),
    ] = 1
    pipeline: Annotated[
        int, Field(ge=1, le=64, description="Pipeline parallel size. More than 1 is not implemented yet.")
    ] = 1
    data: Annotated[
        int,
        Field(
            ge=1, le=64, description="Data parallel engines in the pod. More than 1 is not implemented yet."
        ),
    ] = 1

    @property
    def devices(self) -> int:
        """Devices that one pod needs."""
        return self.tensor * self.pipeline * self.data


ResourceMap = Annotated[dict[str, Quantity], Field(max_length=32)]
DERIVED_RESOURCES = ("nvidia.com/gpu", "vpc.amazonaws.com/efa", "hugepages-2Mi")


class Resources(ApiObject):
    """Requests and limits of the main container."""

    requests: Annotated[ResourceMap, Field(description="What the scheduler reserves: cpu, memory, ...")] = (
        Field(default_factory=dict)
    )
    limits: Annotated[ResourceMap, Field(description="What the container may not exceed.")] = Field(
        default_factory=dict
    )


class RoleResources(Resources):
    """Requests and limits of an engine's main container, beyond what is derived."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "!['requests', 'limits'].exists(s, ["
            + ", ".join(f"'{name}'" for name in DERIVED_RESOURCES)
            + "].exists(r, s == 'requests' ? has(self.requests) && r in self.requests"
            " : has(self.limits) && r in self.limits))",
            "nvidia.com/gpu, vpc.amazonaws.com/efa and hugepages-2Mi are derived from parallelism and fabric: remove "
            "them from resources",
        ),
    )


class Drain(ApiObject):
    """How a pod leaves."""

    timeout_seconds: Annotated[
        int,
        Field(
            ge=0,
            le=3600,
            description="How long running turns may take to finish once the pod takes no new ones.",
        ),
    ] = 120
    handover_seconds: Annotated[
        int,
        Field(
            ge=0,
            le=86_400,
            description="When the pool gets smaller: how long the pods that will go take no new turns before they are stopped, while "
            "the conversations' next turns bring the KV elsewhere. In mode BidirectionalPull never less than "
            "kvTransfer.decodeRetentionSeconds for decode.",
        ),
    ] = 60


class Role(ApiObject):
    """One of the two pools of engines."""

    replicas: Annotated[
        int | None,
        Field(
            ge=1,
            le=1000,
            description="Number of pods; 1 if neither replicas nor scaling is given. Not together with scaling. To stop "
            "all pods set spec.suspend.",
        ),
    ] = None
    scaling: Annotated[
        RoleScaling | None,
        Field(
            description="Bounds of the number of pods, which then lives in a DisaggInferenceScaler and not here. Not "
            "together with replicas. With autoscaling.mode Disabled the role runs minReplicas."
        ),
    ] = None
    parallelism: Annotated[Parallelism, Field(description="How one pod spreads the model over devices.")] = (
        Parallelism()
    )
    resources: Annotated[
        RoleResources,
        Field(
            description="Requests and limits of the engine's container. GPUs, EFA and hugepages are derived."
        ),
    ] = RoleResources()
    template: Annotated[
        Opaque,
        Field(
            description="Overlay on the pod template, {metadata: {labels, annotations}, spec: {...}}, merged as by "
            "`kubectl patch` of type strategic. The engine's container is called main. Not checked by the schema: "
            "errors show when pods are created."
        ),
    ] = Field(default_factory=dict)
    extra_args: Annotated[
        ExtraArgs,
        Field(
            description="Further flags of `vllm serve` for this role, after those of spec.engine. What changes the KV "
            "layout (--block-size, --kv-cache-dtype, --dtype) must be equal in both roles."
        ),
    ] = ()
    drain: Annotated[Drain, Field(description="How a pod leaves.")] = Drain()

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "!(has(self.replicas) && has(self.scaling))",
            "set replicas (a fixed number) or scaling (bounds), not both",
        ),
    )

    @property
    def fixed_replicas(self) -> int:
        """The number of pods as long as nobody scales: `replicas`, else the lower bound, else 1."""
        if self.replicas is not None:
            return self.replicas
        return self.scaling.min_replicas if self.scaling else 1
