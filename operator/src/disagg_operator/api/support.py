"""What the API accepts and this version cannot do yet. Pure.

The CRD validates every field of the API, also those whose behaviour comes later, so that manifests do not change when
it does. Such a value is never ignored: the operator reports it by a condition and changes nothing until it is removed.
"""

from collections.abc import Callable
from dataclasses import dataclass

from .engine import Parallelism
from .inference import DisaggInferenceSpec
from .scaling import RolloutStrategy
from .transfer import LoadFailurePolicy


@dataclass(frozen=True, slots=True)
class Unsupported:
    """A value that is not implemented: where, what, and what to write instead."""

    path: str
    value: str
    supported: str

    def __str__(self) -> str:
        return f"{self.path}: {self.value} is not implemented yet; use {self.supported}"


@dataclass(frozen=True, slots=True)
class Gap:
    """A field with values that are not implemented. `offending` gives the value as text, or None if it is fine."""

    path: str
    offending: Callable[[DisaggInferenceSpec], str | None]
    supported: str


def _uri(spec: DisaggInferenceSpec) -> str | None:
    return "s3://" if spec.model.uri.startswith("s3://") else None


def _load_failure(spec: DisaggInferenceSpec) -> str | None:
    policy = spec.kv_transfer.load_failure_policy
    return None if policy is LoadFailurePolicy.RECOMPUTE else policy


def _above(limit: int, value: int | None) -> str | None:
    return str(value) if value is not None and value > limit else None


def _parallelism_gaps(role: str, of: Callable[[DisaggInferenceSpec], Parallelism]) -> tuple[Gap, ...]:
    return (
        Gap(f"spec.{role}.parallelism.pipeline", lambda s: _above(1, of(s).pipeline), "1 and raise tensor"),
        Gap(f"spec.{role}.parallelism.data", lambda s: _above(1, of(s).data), "1 and raise replicas"),
    )


def _indivisible_tensor(spec: DisaggInferenceSpec) -> str | None:
    """Ranks exchange whole KV heads, so that one size must be a multiple of the other."""
    prefill, decode = spec.prefill.parallelism.tensor, spec.decode.parallelism.tensor
    fits = max(prefill, decode) % min(prefill, decode) == 0
    return None if fits else f"{decode} beside {prefill} in prefill"


def _unless(implemented: str) -> Callable[[str], str | None]:
    return lambda value: None if value == implemented else value


_strategy = _unless(RolloutStrategy.PAIRED)

NOT_IMPLEMENTED: tuple[Gap, ...] = (
    Gap("spec.model.uri", _uri, "hf://, pvc:// or file://"),
    *_parallelism_gaps("prefill", lambda s: s.prefill.parallelism),
    *_parallelism_gaps("decode", lambda s: s.decode.parallelism),
    Gap("spec.decode.parallelism.tensor", _indivisible_tensor, "a multiple or a divisor of prefill's"),
    Gap("spec.kvTransfer.loadFailurePolicy", _load_failure, LoadFailurePolicy.RECOMPUTE),
    Gap("spec.rollout.strategy", lambda s: _strategy(s.rollout.strategy), RolloutStrategy.PAIRED),
    Gap("spec.rollout.maxSurge", lambda s: _above(-1, s.rollout.max_surge), "no maxSurge"),
    Gap("spec.rollout.maxUnavailable", lambda s: _above(0, s.rollout.max_unavailable), "0"),
    Gap("spec.rollout.paused", lambda s: "true" if s.rollout.paused else None, "false"),
    Gap("spec.rollout.revisionHistoryLimit", lambda s: _above(0, s.rollout.revision_history_limit), "0"),
    Gap("spec.networkPolicy.enabled", lambda s: "true" if s.network_policy.enabled else None, "false"),
)


def not_implemented(spec: DisaggInferenceSpec) -> tuple[Unsupported, ...]:
    """All values of `spec` that this version cannot do yet, in the order of the API."""
    found = ((gap, gap.offending(spec)) for gap in NOT_IMPLEMENTED)
    return tuple(
        Unsupported(gap.path, str(value), gap.supported) for gap, value in found if value is not None
    )
