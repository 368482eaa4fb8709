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
    leaving_replicas: Annotated[
        int, Field(description="Pods of these that take no new turns, because the pool gets smaller.")
    ] = 0
    leaving_until: Annotated[Time | None, Field(description="When they are stopped.")] = None


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
        int | None,
        Field(
            description="Computed need in thousandths of a pod, before bounds and damping; absent if it is not known."
        ),
    ] = None
    limited_by: Annotated[
        str | None, Field(description="What kept the decision from the need, or moved it beyond.")
    ] = None


class ScalingInputsStatus(ApiObject):
    """What a decision rested on. Shares are in thousandths."""

    offered_tokens_per_second: Annotated[
        int,
        Field(
            description="Prompt tokens that were sent to prefill, with the trend, and with what clients hold back while prompts "
            "wait."
        ),
    ]
    trend_tokens_per_second: Annotated[int, Field(description="Of them, what was not measured now.")] = 0
    backlog_tokens: Annotated[int, Field(description="Prompt tokens of requests that wait.")]
    reuse_milli: Annotated[int, Field(description="Reuse over the window, as measured.")]
    growing_reuse_milli: Annotated[int, Field(description="Reuse that growing counts on.")]
    growing_remote_reuse_milli: Annotated[
        int, Field(description="Of it, the share that decode brought to prefill.")
    ]
    shrinking_reuse_milli: Annotated[int, Field(description="Reuse that shrinking counts on.")]
    shrinking_remote_reuse_milli: Annotated[
        int, Field(description="Of it, the share that decode brought to prefill.")
    ] = 0
    tokens_per_second_per_pod: Annotated[
        int | None,
        Field(description="Prompt tokens that one prefill pod computes per second, configured or learned."),
    ] = None
    remote_token_cost_milli: Annotated[
        int | None,
        Field(
            description="Cost of a token that decode brought, of a computed one's; configured, learned or assumed."
        ),
    ] = None
    decode_pods: Annotated[int, Field(description="Decode pods that were measured.")]
    mean_kv_usage_milli: Annotated[
        int | None, Field(description="KV cache in use, mean of decode's engines.")
    ] = None
    kv_usage_milli: Annotated[int, Field(description="And of the fuller half of them.")]
    fullest_kv_usage_milli: Annotated[int, Field(description="And of the fullest.")]
    running_requests: Annotated[int, Field(description="Requests that decode generates.")]
    waiting_requests: Annotated[int, Field(description="Requests that wait for decode.")]
    retained_milli: Annotated[
        int | None,
        Field(description="KV cache that decode keeps for prefill to read; absent if the mode keeps none."),
    ] = None
    decode_steady_need_milli: Annotated[
        int | None,
        Field(description="Decode's need over the last minute, in thousandths of a pod."),
    ] = None
    decode_coming_milli: Annotated[
        int | None,
        Field(description="By what factor more than now will come to decode."),
    ] = None
    ttft_milliseconds: Annotated[
        int | None,
        Field(description="95th percentile of the time to the first token; absent without enough turns."),
    ] = None
    itl_milliseconds: Annotated[
        int | None,
        Field(description="95th percentile of the time between tokens; absent without enough tokens."),
    ] = None


class LearnedStatus(ApiObject):
    """What the engines' figures say of their speed. An operator that starts anew goes on from it."""

    prefill_tokens_per_second: Annotated[
        int | None, Field(description="Prompt tokens that one prefill pod computes per second.")
    ] = None
    remote_token_cost_milli: Annotated[
        int | None,
        Field(description="Cost of a token that decode brought, in thousandths of a computed one."),
    ] = None


class ScalingStatus(ApiObject):
    """The latest autoscaling decision. Written when it changes, and once a minute for its numbers."""

    decided_time: Annotated[Time, Field(description="When it was made.")]
    reason: Annotated[str, Field(description="Why, as one CamelCase word.")]
    message: Annotated[str, Field(description="Why, with the numbers.")] = ""
    prefill: Annotated[RoleScalingStatus | None, Field(description="On prefill.")] = None
    decode: Annotated[RoleScalingStatus | None, Field(description="On decode.")] = None
    inputs: Annotated[
        ScalingInputsStatus | None, Field(description="What it rested on; absent if too little was known.")
    ] = None
    learned: Annotated[LearnedStatus | None, Field(description="What was learned so far.")] = None


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
