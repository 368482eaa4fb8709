"""All policies on all mixes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from statistics import fmean

from bench.local_prefill.mixes import MIXES, Mix
from bench.local_prefill.simulation import Simulation
from disagg_router.config import LocalPrefill
from disagg_router.learned import PAUSE_SECONDS, SHARE

MAX_TOKENS = 512
"""The default of `localPrefill.maxTokens`."""
COLOCATED = "colocated"
_ALL = LocalPrefill(10**9)
POLICIES: dict[str, LocalPrefill | None] = {
    "always prefill": None,
    "always decode": _ALL,
    COLOCATED: _ALL,
    "Threshold 512": LocalPrefill(MAX_TOKENS),
    "Threshold 2048": LocalPrefill(2048),
    "Auto": LocalPrefill(MAX_TOKENS, "Auto"),
}
LONG_SECONDS = 0.3
ESTIMATE_ERROR = 1.8
"""The guard holds by what the router expects, which goes by its estimate of tokens: that is off by so much at times."""


@dataclass(frozen=True)
class Result:
    """Milliseconds. `keeps_guard`: decode's tokens came as the guard promises, measured by always prefill on the same mix."""

    mix: str
    policy: str
    turns: int
    ttft_mean: float
    ttft_p50: float
    ttft_p95: float
    gap_mean: float
    gap_p99: float
    gap_max: float
    pauses: float
    """Of a thousand tokens, those that came more than LONG_SECONDS after the one before."""
    on_decode: float
    """Share of the turns."""
    keeps_guard: bool
    decisions: dict[str, int]


def compare(seed: int, mixes: tuple[Mix, ...] = MIXES) -> list[Result]:
    """All policies on the same turns of each mix."""
    results = []
    for mix in mixes:
        undisturbed: tuple[float, float] | None = None
        for policy, settings in POLICIES.items():
            outcome = Simulation(mix, settings, seed, colocated=policy == COLOCATED).run()
            ttft, gaps = sorted(outcome.ttft), outcome.gaps
            mean, most = _mean(gaps), max(gaps)
            undisturbed = undisturbed or (mean, most)
            decided = outcome.decisions
            on_decode = sum(n for (placement, _), n in decided.items() if placement == "decode")
            result = Result(
                mix=mix.name,
                policy=policy,
                turns=len(ttft),
                ttft_mean=_ms(fmean(ttft)),
                ttft_p50=_ms(ttft[len(ttft) // 2]),
                ttft_p95=_ms(ttft[int(len(ttft) * 0.95)]),
                gap_mean=_ms(mean),
                gap_p99=_ms(_quantile(gaps, 0.99)),
                gap_max=_ms(most),
                pauses=round(1e3 * sum(n for gap, n in gaps.items() if gap > LONG_SECONDS) / gaps.total(), 2),
                on_decode=round(on_decode / len(ttft), 3),
                keeps_guard=mean <= undisturbed[0] / (1 - SHARE)
                and most <= undisturbed[1] + PAUSE_SECONDS * ESTIMATE_ERROR,
                decisions={" ".join(key): n for key, n in sorted(decided.items())},
            )
            results.append(result)
    return results


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 1)


def _mean(gaps: Counter[float]) -> float:
    return sum(gap * n for gap, n in gaps.items()) / gaps.total()


def _quantile(gaps: Counter[float], q: float) -> float:
    left = q * gaps.total()
    for gap, n in sorted(gaps.items()):
        left -= n
        if left <= 0:
            return gap
    return max(gaps)
