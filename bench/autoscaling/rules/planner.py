"""NVIDIA Dynamo's planner: the load rule alone, and with the throughput rule as its floor, which is what NVIDIA recommends.

Source: Dynamo 1.x, docs/components/planner/planner-guide and docs/design-docs/planner-design, planner/core/{load_scaling,throughput_scaling}.py.
Load (every 5 s, target "sla"): what the next request's first token and the next step of decode would take is estimated for each engine; if all of
a role's are above the target it gets one more, if all are below 80 % of it (load_scaling_down_sensitivity) one less; nothing while a change is in progress.
Throughput (every 180 s): requests per second / what an engine does within the targets, with prompts less the share of KV hits for prefill;
the load rule does not go below that.
To its favour: the regressions are the model's own formulas, and the load of the last minute stands for the predictor's; the target for tokens is set where
decode's KV cache is at 80 %, and prefill's target was searched on these very traces (see compare.py).
Simplified: a worker that goes drains first (Dynamo's does not), as for every rule here.
"""

import math

from bench.autoscaling.rules import Seen, Told
from disagg_operator.scaling.inputs import Sizes

THROUGHPUT_SECONDS = 180.0
_SEQUENCES = 16
"""For the target of decode: about what fits in its KV cache."""


class Planner:
    """`ttft`: the target as a share of the SLO. `floor`: whether the throughput rule holds it up."""

    period = 5.0

    def __init__(
        self, told: Told, ttft: float = 0.5, kv: float = 0.8, sensitivity: float = 0.8, *, floor: bool = True
    ) -> None:
        self._told, self._engine = told, told.engine
        self._ttft = ttft * told.ttft_slo
        self._itl = told.engine.token_seconds(_SEQUENCES, kv * told.engine.kv_tokens)
        self._kv, self._sensitivity = kv, sensitivity
        self._with_floor = floor
        self._floor = Sizes(1, 1)
        self._floored_at = -math.inf

    def sizes(self, seen: Seen) -> Sizes:
        """One more or less of each role, and not below the floor."""
        if self._with_floor and seen.now - self._floored_at >= THROUGHPUT_SECONDS and seen.window.sent:
            self._floored_at = seen.now
            self._floor = self._throughput(seen)
        if seen.ready != seen.sizes or seen.draining:
            return self._bounded(seen.sizes)
        engine = self._engine
        uncached = seen.window.computed / seen.window.sent if seen.window.sent else 0.0
        first = [self._first_token(pod.uncached_tokens + uncached) for pod in seen.prefill]
        step = [
            engine.token_seconds(pod.running + pod.waiting, (pod.usage + pod.waiting_kv) * engine.kv_tokens)
            for pod in seen.decode
        ]
        return self._bounded(
            Sizes(
                _stepped(seen.sizes.prefill, first, self._ttft, self._sensitivity),
                _stepped(seen.sizes.decode, step, self._itl, self._sensitivity),
            )
        )

    def _first_token(self, tokens: float) -> float:
        return (
            math.ceil(tokens / self._engine.budget) * self._engine.prefill_step
            + tokens * self._engine.per_token
        )

    def _throughput(self, seen: Seen) -> Sizes:
        """Requests per second over those that one engine does."""
        engine, window = self._engine, seen.window
        prompts = window.computed / seen.seconds
        context = (window.offered + window.answered / 2) / window.sent
        at_once = self._kv * engine.kv_tokens / context
        answered = at_once / engine.token_seconds(at_once, self._kv * engine.kv_tokens)
        return Sizes(
            math.ceil(prompts / engine.tokens_per_second),
            math.ceil(window.answered / seen.seconds / answered),
        )

    def _bounded(self, sizes: Sizes) -> Sizes:
        floor, most = self._floor, self._told.most
        return Sizes(
            min(max(sizes.prefill, floor.prefill, 1), most), min(max(sizes.decode, floor.decode, 1), most)
        )


def _stepped(size: int, estimates: list[float], target: float, sensitivity: float) -> int:
    if estimates and all(seconds > target for seconds in estimates):
        return size + 1
    if size > 1 and all(seconds < sensitivity * target for seconds in estimates):
        return size - 1
    return size
