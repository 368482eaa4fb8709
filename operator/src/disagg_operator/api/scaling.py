"""The part of the spec about change: autoscaling and rollout."""

from enum import StrEnum
from typing import Annotated, ClassVar

from pydantic import Field

from .base import ApiObject, Rule


class AutoscalingMode(StrEnum):
    """Who decides the number of pods."""

    DISABLED = "Disabled"
    ADVISORY = "Advisory"
    AUTO = "Auto"
    EXTERNAL = "External"


class Signal(StrEnum):
    """What the number of pods follows."""

    KV_REUSE_RATIO = "KVReuseRatio"


class RolloutStrategy(StrEnum):
    """How a new revision replaces an old one."""

    PAIRED = "Paired"
    RECREATE = "Recreate"


class RatioBounds(ApiObject):
    """Bounds of prefill pods per decode pod, in percent: 100 is one to one."""

    min_percent: Annotated[
        int, Field(ge=1, le=10_000, description="Least prefill pods per 100 decode pods.")
    ] = 10
    max_percent: Annotated[
        int, Field(ge=1, le=10_000, description="Most prefill pods per 100 decode pods.")
    ] = 400

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "self.minPercent <= self.maxPercent",
            "ratio.minPercent must not be greater than ratio.maxPercent",
            ".minPercent",
        ),
    )


class ScalingTargets(ApiObject):
    """What the pools are sized for."""

    prefill_utilization_percent: Annotated[
        int, Field(ge=10, le=100, description="Share of prefill's throughput that is planned for.")
    ] = 60
    prefill_tokens_per_second: Annotated[
        int | None,
        Field(ge=1, description="Prompt tokens that one prefill pod computes per second; learned if absent."),
    ] = None
    remote_token_cost_milli: Annotated[
        int | None,
        Field(
            ge=0,
            le=1000,
            description="Cost of a prompt token whose KV is transferred, in thousandths of a computed one; learned if absent.",
        ),
    ] = None
    backlog_drain_seconds: Annotated[
        int, Field(ge=1, le=3600, description="Within what time waiting prompts are to be worked off.")
    ] = 30
    decode_kv_usage_percent: Annotated[
        int, Field(ge=10, le=100, description="Share of decode's KV cache that is planned for.")
    ] = 80
    decode_running_percent: Annotated[
        int, Field(ge=10, le=100, description="Share of decode's --max-num-seqs that is planned for.")
    ] = 85
    time_to_first_token_milliseconds: Annotated[
        int | None,
        Field(ge=1, description="Prefill grows when the 95th percentile stays above; no target if absent."),
    ] = None
    inter_token_latency_milliseconds: Annotated[
        int | None,
        Field(ge=1, description="Decode grows when the 95th percentile stays above; no target if absent."),
    ] = None


class ScaleUp(ApiObject):
    """How fast pools grow."""

    stabilization_window_seconds: Annotated[
        int, Field(ge=0, le=3600, description="The smallest wish of this time counts.")
    ] = 0
    max_pods: Annotated[int, Field(ge=1, le=100, description="Most pods added to a role per minute.")] = 4


class ScaleDown(ApiObject):
    """How fast pools shrink."""

    stabilization_window_seconds: Annotated[
        int, Field(ge=0, le=86_400, description="The greatest wish of this time counts.")
    ] = 300
    max_pods: Annotated[int, Field(ge=1, le=100, description="Most pods taken from a role per window.")] = 2


class Behavior(ApiObject):
    """How fast pools change."""

    tolerance_percent: Annotated[
        int, Field(ge=0, le=100, description="Differences up to this share of the present size are ignored.")
    ] = 10
    scale_up: Annotated[ScaleUp, Field(description="How fast pools grow.")] = ScaleUp()
    scale_down: Annotated[ScaleDown, Field(description="How fast pools shrink.")] = ScaleDown()


class Autoscaling(ApiObject):
    """How the two pools are sized."""

    mode: Annotated[
        AutoscalingMode,
        Field(
            description="Disabled: replicas, or scaling.minReplicas, hold. The others need scaling in both roles, whose sizes then "
            "live in DisaggInferenceScalers. Advisory: decide and report, change nothing. Auto: decide and scale. External: "
            "an HPA, KEDA or `kubectl scale` owns the DisaggInferenceScalers; what Auto would do is reported."
        ),
    ] = AutoscalingMode.DISABLED
    signal: Annotated[
        Signal,
        Field(description="KVReuseRatio: the share of prompt tokens that prefill did not have to compute."),
    ] = Signal.KV_REUSE_RATIO
    window_seconds: Annotated[int, Field(ge=10, le=3600, description="Over what time load is measured.")] = 60
    ratio: Annotated[RatioBounds, Field(description="Bounds of prefill pods per decode pod.")] = RatioBounds()
    max_devices: Annotated[
        int | None,
        Field(
            ge=1,
            le=100_000,
            description="Most devices (GPUs) of both pools together that growing may come to; no limit if absent. Nothing that "
            "runs is taken away for it.",
        ),
    ] = None
    targets: Annotated[ScalingTargets, Field(description="What the pools are sized for.")] = ScalingTargets()
    behavior: Annotated[Behavior, Field(description="How fast pools change.")] = Behavior()


class Rollout(ApiObject):
    """How a change that makes a new revision is rolled out."""

    strategy: Annotated[
        RolloutStrategy,
        Field(
            description="Paired: prefill and decode of the new revision come up beside the old, then the old goes. "
            "Recreate (the old goes first, for clusters without spare nodes) is not implemented yet."
        ),
    ] = RolloutStrategy.PAIRED
    max_surge: Annotated[
        int | None,
        Field(
            ge=0,
            le=1000,
            description="Pods of a role above its size during a rollout; absent: as many as it has. A value is not "
            "implemented yet.",
        ),
    ] = None
    max_unavailable: Annotated[
        int,
        Field(
            ge=0,
            le=1000,
            description="Pods of a role below its size during a rollout. More than 0 is not implemented yet.",
        ),
    ] = 0
    paused: Annotated[
        bool, Field(description="Hold the rollout where it is. true is not implemented yet.")
    ] = False
    progress_deadline_seconds: Annotated[
        int,
        Field(
            ge=60,
            le=86_400,
            description="After this long without progress the condition Stalled says why. Also how long an engine may "
            "take to load its model.",
        ),
    ] = 1800
    revision_history_limit: Annotated[
        int,
        Field(
            ge=0, le=100, description="Old revisions kept at zero pods. More than 0 is not implemented yet."
        ),
    ] = 0
