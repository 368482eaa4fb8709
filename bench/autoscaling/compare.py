"""Every rule on every trace, and what is told of it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from statistics import fmean

from bench.autoscaling.figures import H200, TTFT_SLO
from bench.autoscaling.rules import MakeRule, Told
from bench.autoscaling.rules.fixed import Fixed
from bench.autoscaling.rules.hpa import Pace, WaitingRequests
from bench.autoscaling.rules.planner import Planner
from bench.autoscaling.rules.reuse import ReuseRatio
from bench.autoscaling.rules.token_aware import TokenAware
from bench.autoscaling.traces import WARM_UP, Trace
from bench.autoscaling.world import Result, World
from disagg_operator.naming import ENGINES
from disagg_operator.scaling.inputs import Limits, RoleLimits, Sizes

OURS = "KV reuse"
SPARING = Pace(4, 60, False, 1, 300)
GUIDE = Pace(1, 180, False, 1, 300)
"""llm-d's guide's own."""
RULES: dict[str, MakeRule] = {
    OURS: ReuseRatio,
    "llm-d token-aware": lambda told: TokenAware(told, 0.2, 0.6, SPARING),
    "HPA, waiting": lambda told: WaitingRequests(told, 0.1, 0.6, GUIDE),
    "Dynamo, both rules": lambda told: Planner(told, 0.1, 0.5, 0.4),
    "Dynamo, load rule": lambda told: Planner(told, 0.1, 0.5, 0.4, floor=False),
}
"""Ours with the operator's defaults. The peers' parameters were searched on six of these traces: the
leanest that attain 99 % on the mean of them, or, if none does, those that attain most."""
FIXED_PEAK, FIXED_MEAN = "fixed, peak", "fixed, mean"
REFERENCES = (FIXED_PEAK, FIXED_MEAN)
"""No rules: they know the load beforehand."""
BUCKET = 15.0
"""Seconds of turns that recovery is looked for in."""
RECOVERED = 0.95
STAYS = 60.0
GOAL = 0.99


@dataclass(frozen=True)
class Outcome:
    """One rule on one trace, after the warm-up."""

    trace: str
    rule: str
    turns: int
    reuse: float
    attained: float
    """Share of the turns whose first token came within the SLO."""
    ttft_p50: float
    ttft_p99: float
    prefill_hours: float
    """Pods x hours, from creation until gone."""
    decode_hours: float
    changes: int
    """Of direction, in the worst hour of the role with more."""
    recovery: float | None
    """Seconds from the event until turns attain `RECOVERED` and go on so for `STAYS`; None if there is no event, inf if never."""

    @property
    def hours(self) -> float:
        """Of both roles."""
        return self.prefill_hours + self.decode_hours


def outcome(trace: Trace, rule: str, result: Result) -> Outcome:
    """What a run comes to."""
    last = trace.seconds - TTFT_SLO
    turns = [turn for turn in result.turns if WARM_UP <= turn.sent < last]
    ttfts = sorted(turn.ttft if turn.ttft is not None else float("inf") for turn in turns)
    hours = [0.0, 0.0]
    for one, other in pairwise(result.sizes):
        if one.at >= WARM_UP:
            hours[0] += one.present.prefill * (other.at - one.at) / 3600
            hours[1] += one.present.decode * (other.at - one.at) / 3600
    reuse = [share for at, share in result.reuse if at >= WARM_UP]
    return Outcome(
        trace=trace.name,
        rule=rule,
        turns=len(turns),
        reuse=sum(reuse) / len(reuse),
        attained=sum(ttft <= TTFT_SLO for ttft in ttfts) / len(ttfts),
        ttft_p50=ttfts[len(ttfts) // 2],
        ttft_p99=ttfts[int(len(ttfts) * 0.99)],
        prefill_hours=hours[0],
        decode_hours=hours[1],
        changes=max(
            _turns([(s.at, s.decided.of(role)) for s in result.sizes if s.at >= WARM_UP]) for role in ENGINES
        ),
        recovery=None if trace.event_at is None else _recovery(trace.event_at, trace.seconds, result),
    )


def _turns(sizes: list[tuple[float, int]]) -> int:
    """Changes of direction in the hour that has most of them."""
    moves = [(at, size > before) for (_, before), (at, size) in pairwise(sizes) if size != before]
    turns = [at for (_, one), (at, other) in pairwise(moves) if one != other]
    return max((sum(at <= other < at + 3600 for other in turns) for at in turns), default=0)


def _recovery(event_at: float, until: float, result: Result) -> float:
    good: dict[int, list[bool]] = {}
    for turn in result.turns:
        if event_at <= turn.sent < until - TTFT_SLO:
            attained = turn.ttft is not None and turn.ttft <= TTFT_SLO
            good.setdefault(int((turn.sent - event_at) // BUCKET), []).append(attained)
    needed = int(STAYS // BUCKET)
    fine = [sum(good.get(n, [True])) >= RECOVERED * len(good.get(n, [True])) for n in range(max(good) + 1)]
    for n in range(len(fine) - needed):
        if all(fine[n : n + needed]):
            return n * BUCKET
    return float("inf")


@dataclass(frozen=True)
class Run:
    """One trace under one rule."""

    trace: Trace
    rule: str
    result: Result

    @property
    def outcome(self) -> Outcome:
        """What it comes to."""
        return outcome(self.trace, self.rule, self.result)


def run(trace: Trace, rule: str, make: MakeRule) -> Run:
    """Simulate it."""
    told = Told(start=trace.start or H200.start)
    return Run(trace, rule, World(trace, make(told), H200).run())


def fixed_sizes(trace: Trace) -> tuple[Sizes, Sizes]:
    """For the greatest load of a minute and for the mean one, as seen with pods enough for anything, at the targets of ours."""
    limits = Limits(RoleLimits(1, 1), RoleLimits(1, 1))
    seen = World(trace, Fixed(Sizes(Told().most, Told().most)), H200).run().loads
    loads = [load for load in seen if load.at >= WARM_UP]
    prefill = [load.computed / H200.tokens_per_second / limits.utilization for load in loads]
    decode = [load.kv_tokens / H200.kv_tokens / limits.kv_usage for load in loads]
    return (
        Sizes(math.ceil(max(prefill)), math.ceil(max(decode))),
        Sizes(math.ceil(fmean(prefill)), math.ceil(fmean(decode))),
    )


def _fixed(sizes: Sizes, told: Told) -> Fixed:
    return Fixed(sizes)


def compare(trace: Trace) -> list[Run]:
    """All rules on one trace, then the references."""
    runs = [run(trace, name, make) for name, make in RULES.items()]
    for name, sizes in zip(REFERENCES, fixed_sizes(trace), strict=True):
        runs.append(run(trace, name, partial(_fixed, sizes)))
    return runs


def best_peer(outcomes: Sequence[Outcome], attained: float) -> Outcome | None:
    """Of one trace's, the peer that attains as much (or 99 %, if that is less) with the fewest replica-hours."""
    enough = min(attained, GOAL)
    peers = [o for o in outcomes if o.rule not in REFERENCES and o.rule != OURS]
    return min((o for o in peers if o.attained >= enough), key=lambda o: o.hours, default=None)
