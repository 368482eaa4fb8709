"""What one decision costs."""

from time import perf_counter

from disagg_operator.scaling.history import EMPTY
from disagg_operator.scaling.inputs import DecodeLoad, Inputs, Limits, PrefillLoad, Reuse, RoleLimits, Sizes
from disagg_operator.scaling.policy import decide

_PODS = Sizes(24, 40)
_TICK = 15.0


def decision_seconds(rounds: int = 200) -> float:
    """The best of some, with 64 pods and a history that is as long as it gets."""
    limits = Limits(RoleLimits(1, 64), RoleLimits(1, 64), tokens_per_second=8000.0, pod_start_seconds=90.0)
    load = PrefillLoad(offered=900_000.0, tokens=54e6, reuse=Reuse(0.8, 0.03), backlog=0.0)
    inputs = Inputs(
        load, DecodeLoad(pods=40, kv_usage=0.7, fullest=0.8, running=600.0, waiting=0.0), ttft_p95=1.0
    )
    history, now, best = EMPTY, 0.0, float("inf")
    for _ in range(rounds):
        began = perf_counter()
        _, history = decide(inputs, limits, _PODS, history, now)
        best = min(best, perf_counter() - began) if now > 2 * limits.down_window else best
        now += _TICK
    return best
