"""The two custom resources: DisaggInference and DisaggInferenceScaler."""

from typing import Annotated, ClassVar

from pydantic import Field

from .base import ApiObject, Rule
from .engine import Device, Engine, Role
from .model import Model
from .placement import Fabric, FabricType, Placement
from .scaling import Autoscaling, Rollout
from .serving import NetworkPolicy, Router
from .status import DisaggInferenceStatus
from .transfer import DEFAULT_RETENTION_SECONDS, KVTransfer, TransferBackend

# Children are called NAME-prefill-REV8 at the longest; a StatefulSet of 52 characters is the longest whose pods' labels
# still fit 63.
MAX_NAME_LENGTH = 35

_NO_PREFIX_CACHING = "exists(a, a.matches('^--no[-_]enable[-_]prefix[-_]caching$'))"


def _least_devices(role: str) -> str:
    """CEL: the devices of a role's fewest pods."""
    sizes = " * ".join(f"self.{role}.parallelism.{size}" for size in ("tensor", "pipeline", "data"))
    return f"self.{role}.scaling.minReplicas * {sizes}"


class DisaggInferenceSpec(ApiObject):
    """One model, served by a prefill pool and a decode pool that hand each other KV cache."""

    model: Annotated[Model, Field(description="Which model is served.")]
    engine: Annotated[Engine, Field(description="The vLLM engine that both roles run.")]
    prefill: Annotated[Role, Field(description="The pool that computes prompts.")] = Role()
    decode: Annotated[Role, Field(description="The pool that generates answers.")] = Role()
    kv_transfer: Annotated[KVTransfer, Field(description="How KV cache moves between the pools.")] = (
        KVTransfer()
    )
    fabric: Annotated[Fabric, Field(description="The network that carries KV cache.")] = Fabric()
    placement: Annotated[Placement, Field(description="Where engine pods run.")] = Placement()
    router: Annotated[Router, Field(description="The OpenAI-compatible front.")] = Router()
    autoscaling: Annotated[Autoscaling, Field(description="How the pools are sized.")] = Autoscaling()
    rollout: Annotated[Rollout, Field(description="How a new revision replaces an old one.")] = Rollout()
    network_policy: Annotated[NetworkPolicy, Field(description="Who may reach the engines' ports.")] = (
        NetworkPolicy()
    )
    suspend: Annotated[
        bool, Field(description="Stop all pods and keep everything else. The KV caches are lost.")
    ] = False

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "self.autoscaling.mode == 'Disabled' || (has(self.prefill.scaling) && has(self.decode.scaling))",
            "autoscaling.mode other than Disabled needs scaling (bounds) instead of replicas in both prefill and decode",
            ".autoscaling",
        ),
        Rule(
            "self.autoscaling.mode == 'Disabled' || !has(self.autoscaling.maxDevices) || !has(self.prefill.scaling) || "
            f"!has(self.decode.scaling) || {_least_devices('prefill')} + {_least_devices('decode')} <= "
            "self.autoscaling.maxDevices",
            "autoscaling.maxDevices is less than what scaling.minReplicas of both roles need (pods x tensor x pipeline x data): "
            "raise it, or lower a minReplicas",
            ".autoscaling.maxDevices",
        ),
        Rule(
            "!(self.fabric.type == 'EFA' && self.engine.device == 'CPU')",
            "fabric.type EFA needs engine.device GPU: EFA devices are counted per GPU",
            ".fabric",
        ),
        Rule(
            "self.router.deadlines.firstByteSeconds <= self.kvTransfer.leaseSeconds",
            "router.deadlines.firstByteSeconds must not be longer than kvTransfer.leaseSeconds: the KV that decode waits "
            "for would be gone",
            ".router",
        ),
        Rule(
            "self.kvTransfer.mode != 'BidirectionalPull' || (has(self.kvTransfer.decodeRetentionSeconds) ? "
            f"self.kvTransfer.decodeRetentionSeconds : {DEFAULT_RETENTION_SECONDS}) >= "
            "4 * self.router.deadlines.firstByteSeconds",
            "kvTransfer.decodeRetentionSeconds must be at least four times router.deadlines.firstByteSeconds: the router has prefill "
            "read decode's KV for three quarters of it, and reading may begin that long after",
            ".kvTransfer",
        ),
        Rule(
            "self.kvTransfer.mode != 'BidirectionalPush' || !(self.engine.extraArgs."
            f"{_NO_PREFIX_CACHING} || self.prefill.extraArgs.{_NO_PREFIX_CACHING} || self.decode.extraArgs."
            f"{_NO_PREFIX_CACHING})",
            "mode BidirectionalPush needs prefix caching, written-back KV lands in it: remove --no-enable-prefix-caching",
            ".kvTransfer",
        ),
    )

    @property
    def backend(self) -> TransferBackend:
        """The NIXL backend, with Auto resolved."""
        if self.kv_transfer.backend is not TransferBackend.AUTO:
            return self.kv_transfer.backend
        return TransferBackend.LIBFABRIC if self.fabric.type is FabricType.EFA else TransferBackend.UCX

    @property
    def uses_gpus(self) -> bool:
        """Whether engine pods request GPUs."""
        return self.engine.device is Device.GPU


class DisaggInference(ApiObject):
    """An LLM served with prefill and decode apart and KV cache moving both ways."""

    spec: Annotated[DisaggInferenceSpec, Field(description="What is wanted.")]
    status: Annotated[DisaggInferenceStatus, Field(description="What is.")] = DisaggInferenceStatus()

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            f"self.metadata.name.size() <= {MAX_NAME_LENGTH}",
            f"metadata.name must have at most {MAX_NAME_LENGTH} characters: names of pods and Services are made from it",
        ),
        Rule(
            "self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')",
            "metadata.name must start with a letter and contain only a-z, 0-9 and '-' (no dots): Services are named after it",
        ),
    )


class DisaggInferenceScalerSpec(ApiObject):
    """The size of one role."""

    replicas: Annotated[
        int,
        Field(
            ge=0,
            le=1000,
            description="Pods wanted. The operator keeps to the role's scaling bounds whatever stands here.",
        ),
    ]


class DisaggInferenceScalerStatus(ApiObject):
    """The size of one role as it is."""

    replicas: Annotated[int, Field(description="Pods that exist and take new turns.")] = 0
    selector: Annotated[str, Field(description="Label selector of the role's pods, for HPA.")] = ""
    observed_generation: Annotated[
        int | None,
        Field(
            ge=0,
            json_schema_extra={"format": "int64"},
            description="metadata.generation that this status is about.",
        ),
    ] = None


class DisaggInferenceScaler(ApiObject):
    """The size of one role of a DisaggInference, kept apart from its spec so that an autoscaler can own it."""

    spec: Annotated[DisaggInferenceScalerSpec, Field(description="What is wanted.")]
    status: Annotated[DisaggInferenceScalerStatus, Field(description="What is.")] = (
        DisaggInferenceScalerStatus()
    )
