"""llm-d's token-aware autoscaling: prefill by the seconds of prompts in flight, decode by its KV cache.

Source: llm-d, guides/workload-autoscaling/keda-epp-token-aware (README): one ScaledObject a role; prefill's replicas are
ceil(uncached tokens dispatched and not prefilled / V_P / threshold), with threshold = TTFT SLO - uncached ISL / V_P, 60 to 70 % of that for
a tail; decode's are ceil(sum of vllm:kv_cache_usage_perc / 0.8). An HPA carries both out.
To its favour: the tokens in flight are the true uncached ones and are averaged over a minute (the guide says that the plain gauge
flaps); the HPA's default of 4 pods or 100 % in 15 s instead of the guide's one pod in 180 s; the threshold was
searched on these very traces (see compare.py).
"""

from bench.autoscaling.rules import Seen, Told
from bench.autoscaling.rules.hpa import DEFAULT, Autoscaler, Pace, Smoothed
from disagg_operator.scaling.inputs import Sizes


class TokenAware:
    """`threshold`: seconds of queue for each prefill pod."""

    period = 15.0

    def __init__(self, told: Told, threshold: float = 0.5, kv: float = 0.8, pace: Pace = DEFAULT) -> None:
        self._speed, self._threshold = told.engine.tokens_per_second, threshold
        self._kv = kv
        self._prefill, self._decode = Autoscaler(told.most, pace), Autoscaler(told.most, pace)
        self._tokens = Smoothed()

    def sizes(self, seen: Seen) -> Sizes:
        """Each role by its own."""
        now, sizes = seen.now, seen.sizes
        tokens = self._tokens.add(now, sum(pod.uncached_tokens for pod in seen.prefill))
        usage = sum(pod.usage for pod in seen.decode)
        return Sizes(
            self._prefill.size(now, sizes.prefill, (tokens / self._speed, self._threshold)),
            self._decode.size(now, sizes.decode, (usage, self._kv)),
        )
