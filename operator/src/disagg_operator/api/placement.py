"""The part of the spec about nodes and the network between them."""

from enum import StrEnum
from typing import Annotated, ClassVar

from pydantic import Field

from .base import ApiObject, Quantity, Rule, list_type


class FabricType(StrEnum):
    """The network between engines."""

    EFA = "EFA"
    NONE = "None"


class Colocate(StrEnum):
    """How strictly prefill and decode share a topology domain."""

    AUTO = "Auto"
    REQUIRED = "Required"
    PREFERRED = "Preferred"
    NONE = "None"


class EFA(ApiObject):
    """How pods use the Elastic Fabric Adapter."""

    devices_per_gpu: Annotated[
        int,
        Field(
            ge=1,
            le=4,
            description="EFA devices requested per GPU: 2 on p5en.48xlarge, 4 on p5.48xlarge, p5e.48xlarge.",
        ),
    ] = 2
    hugepages_2mi: Annotated[
        Quantity,
        Field(
            description="2 MiB hugepages requested for libfabric; 0 requests none and sets FI_EFA_USE_HUGE_PAGE=0."
        ),
    ] = "5120Mi"
    privileged: Annotated[
        bool,
        Field(description="Run the engine privileged. Default: unprivileged with the capability IPC_LOCK."),
    ] = False


class Fabric(ApiObject):
    """The network that carries KV between engines."""

    type: Annotated[
        FabricType,
        Field(description="EFA: Elastic Fabric Adapter, pods request its devices. None: the pod network."),
    ] = FabricType.NONE
    efa: Annotated[EFA | None, Field(description="Settings of EFA. Only with type EFA.")] = None

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "!has(self.efa) || self.type == 'EFA'",
            "fabric.efa only applies to fabric.type EFA: remove it",
            ".efa",
        ),
    )

    @property
    def effective_efa(self) -> EFA | None:
        """EFA's settings if EFA is used, with defaults."""
        return (self.efa or EFA()) if self.type is FabricType.EFA else None


class Toleration(ApiObject):
    """A taint that engine pods tolerate, as in a pod's spec."""

    key: Annotated[
        str | None, Field(max_length=316, description="The taint's key; absent matches all keys.")
    ] = None
    operator: Annotated[
        str,
        Field(json_schema_extra={"enum": ["Exists", "Equal"]}, description="How key and value are compared."),
    ] = "Equal"
    value: Annotated[
        str | None, Field(max_length=63, description="The taint's value, with operator Equal.")
    ] = None
    effect: Annotated[
        str | None,
        Field(
            json_schema_extra={"enum": ["NoSchedule", "PreferNoSchedule", "NoExecute"]},
            description="The taint's effect; absent matches all effects.",
        ),
    ] = None
    toleration_seconds: Annotated[
        int | None, Field(description="How long a NoExecute taint is tolerated; absent is for ever.")
    ] = None


class Placement(ApiObject):
    """Where engine pods run."""

    node_selector: Annotated[
        dict[str, Annotated[str, Field(max_length=63)]],
        Field(max_length=32, description="Labels that a node must have, for engines of both roles."),
    ] = Field(default_factory=dict)
    tolerations: Annotated[
        tuple[Toleration, ...],
        Field(
            max_length=32,
            json_schema_extra=list_type("atomic"),
            description="Taints that engine pods tolerate.",
        ),
    ] = ()
    topology_key: Annotated[
        str,
        Field(
            min_length=1,
            max_length=316,
            description="The node label whose value prefill and decode should share.",
        ),
    ] = "topology.kubernetes.io/zone"
    colocate: Annotated[
        Colocate,
        Field(
            description="Required: pods that cannot share the domain stay pending. Preferred: they run elsewhere. "
            "None: no affinity. Auto: Required with fabric EFA, which does not cross zones, else Preferred."
        ),
    ] = Colocate.AUTO
