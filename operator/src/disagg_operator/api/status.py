"""The status of a DisaggInference. Integers only: ratios are percent, times carry their unit."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from .base import ApiObject, Time, list_type
from .transfer import TransferBackend, TransferMode


class ConditionStatus(StrEnum):
    """Whether a condition holds."""

    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


class Condition(ApiObject):
    """One aspect of the state, as Kubernetes' metav1.Condition."""

    type: Annotated[
        str,
        Field(max_length=316, pattern=r"^[A-Za-z][A-Za-z0-9]*$", description="Which aspect, in CamelCase."),
    ]
    status: Annotated[ConditionStatus, Field(description="True, False or Unknown.")]
    observed_generation: Annotated[
        int,
        Field(
            ge=0, json_schema_extra={"format": "int64"}, description="metadata.generation that this is about."
        ),
    ]
    last_transition_time: Annotated[Time, Field(description="When status last changed.")]
    reason: Annotated[
        str,
        Field(
            min_length=1,
            max_length=1024,
            pattern=r"^[A-Za-z][A-Za-z0-9]*$",
            description="Why, as one CamelCase word.",
        ),
    ]
    message: Annotated[str, Field(max_length=32768, description="Why, for people, and what to do.")] = ""


class RoleStatus(ApiObject):
    """One role's pods."""

    name: Annotated[str, Field(description="prefill, decode or router.")]
    revision: Annotated[str | None, Field(description="The revision that is being brought up or serves.")] = (
        None
    )
    desired_replicas: Annotated[int, Field(description="Pods wanted.")]
    replicas: Annotated[int, Field(description="Pods that exist, of all revisions.")] = 0
    updated_replicas: Annotated[int, Field(description="Pods of the revision above.")] = 0
    ready_replicas: Annotated[int, Field(description="Pods that are ready, of all revisions.")] = 0
    ready: Annotated[str, Field(description="readyReplicas/desiredReplicas, for kubectl's columns.")] = ""


class TransferStatus(ApiObject):
    """How KV moves now."""

    mode: Annotated[TransferMode, Field(description="The mode in use.")]
    backend: Annotated[TransferBackend, Field(description="The NIXL backend in use, with Auto resolved.")]
    connector_version: Annotated[str | None, Field(description="Version of the KV connector.")] = None
    proven_revision: Annotated[
        str | None, Field(description="The revision for which KV was last seen to move in both directions.")
    ] = None
    proven_time: Annotated[Time | None, Field(description="When it was seen.")] = None


class ReuseStatus(ApiObject):
    """How much of the prompts was not computed again, over a window."""

    window_seconds: Annotated[int, Field(description="The window's length.")]
    observed_time: Annotated[Time, Field(description="The window's end.")]
    prompt_tokens: Annotated[
        int, Field(json_schema_extra={"format": "int64"}, description="Prompt tokens on prefill.")
    ]
    computed_tokens: Annotated[
        int, Field(json_schema_extra={"format": "int64"}, description="Of these, computed by prefill.")
    ]
    written_back_tokens: Annotated[
        int,
        Field(
            json_schema_extra={"format": "int64"}, description="Tokens whose KV decode wrote back to prefill."
        ),
    ]
    ratio_percent: Annotated[int, Field(description="Share of prompt tokens that prefill did not compute.")]


class RoleScalingStatus(ApiObject):
    """The latest decision on one role."""

    current_replicas: Annotated[int, Field(description="Size at the decision.")]
    desired_replicas: Annotated[int, Field(description="Size decided for.")]
    need_milli: Annotated[
        int, Field(description="Computed need in thousandths of a pod, before bounds and damping.")
    ]
    limited_by: Annotated[str | None, Field(description="What kept the decision from the need.")] = None


class ScalingStatus(ApiObject):
    """The latest autoscaling decision."""

    decided_time: Annotated[Time, Field(description="When it was made.")]
    reason: Annotated[str, Field(description="Why, as one CamelCase word.")]
    message: Annotated[str, Field(description="Why, with the numbers.")] = ""
    prefill: Annotated[RoleScalingStatus | None, Field(description="On prefill.")] = None
    decode: Annotated[RoleScalingStatus | None, Field(description="On decode.")] = None


class DisaggInferenceStatus(ApiObject):
    """What the operator saw and did last."""

    observed_generation: Annotated[
        int | None,
        Field(
            ge=0,
            json_schema_extra={"format": "int64"},
            description="metadata.generation that this status is about.",
        ),
    ] = None
    conditions: Annotated[
        tuple[Condition, ...],
        Field(
            json_schema_extra=list_type("map", "type"), description="Aspects of the state, see the reference."
        ),
    ] = ()
    roles: Annotated[
        tuple[RoleStatus, ...],
        Field(json_schema_extra=list_type("map", "name"), description="Pods by role."),
    ] = ()
    revision: Annotated[str | None, Field(description="The revision that takes new conversations.")] = None
    kv_transfer: Annotated[TransferStatus | None, Field(description="How KV moves now.")] = None
    reuse: Annotated[
        ReuseStatus | None, Field(description="How much of the prompts was not computed again.")
    ] = None
    scaling: Annotated[ScalingStatus | None, Field(description="The latest autoscaling decision.")] = None
    endpoint: Annotated[str | None, Field(description="Base URL for OpenAI clients in the cluster.")] = None
