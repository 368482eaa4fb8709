"""What a router learns of its engines from its own turns. Pure.

Three lines (seconds over tokens, see `cost`) and the gap between the pieces of a stream. They are exponential averages of the
last 30 measurements or so. Each begins with a prior, which weighs as much as two of them and fades like them. What is not a
positive number is ignored, and one measurement counts as three times what was expected at most (a third at least), so that none
can upset the rest.

The priors are what two H200 showed with a model of 32B (docs/benchmarks/connector-gpu.md): 32,768 tokens in 4.18 s; a turn of 160
new tokens 0.13 s later through prefill than on one engine; 4.3 GB, the KV of 16,384 tokens, written in 13 ms. They only matter until
there are measurements, and little is decided by them: until then small turns are those of `maxTokens`.
"""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite

from disagg_router.cost import Cost, Costs

PREFILL_PRIOR = Cost(fixed=0.07, per_token=1.3e-4)
HAND_OVER_PRIOR = Cost(fixed=0.1, per_token=8e-7)
DECODE_FIXED_PRIOR = 0.07
ENOUGH = 8
"""Measurements of prefill and of its hand-over without which nothing is decided by them."""
PAUSE_SECONDS = 0.1
"""For so long decode may compute a prompt while it generates for others; as long as one gap between tokens where that is more."""
SHARE = 0.1
"""Of its time, on the long run."""
IDLE_SECONDS = 0.5
"""For so long it may while it generates for nobody. Whoever comes meanwhile waits."""

_DECAY = 1 - 1 / 30
_SCALE = 1024.0
"""Tokens. Errors count by their size, relative to a prompt of about this length and what is longer."""
_PRIOR_WEIGHT = 2.0
_LEAST_PRIOR_WEIGHT = 0.02
"""A little of it stays: measurements of one length alone tell no line."""
_OUTLIER = 3.0
_LEAST_PER_TOKEN = 1e-7


class Line:
    """Seconds over tokens: least squares, weighted by age and by 1 / (tokens + 1024)^2, since long prompts vary by more."""

    def __init__(self, prior: Cost) -> None:
        self._prior = prior
        self.count = 0
        """Measurements so far."""
        self._w = self._wx = self._wy = self._wxx = self._wxy = 0.0

    def learn(self, tokens: float, seconds: float, per_token: float | None = None) -> bool:
        """Take a measurement, False if it is none. `per_token`: as in `cost`."""
        if not (isfinite(tokens) and isfinite(seconds) and tokens >= 0 and seconds > 0):
            return False
        if self.count >= ENOUGH:
            expected = self.cost(per_token).of(tokens)
            seconds = min(max(seconds, expected / _OUTLIER), expected * _OUTLIER)
        self.count += 1
        weight = (_SCALE / (_SCALE + tokens)) ** 2
        self._w = self._w * _DECAY + weight
        self._wx = self._wx * _DECAY + weight * tokens
        self._wy = self._wy * _DECAY + weight * seconds
        self._wxx = self._wxx * _DECAY + weight * tokens * tokens
        self._wxy = self._wxy * _DECAY + weight * tokens * seconds
        return True

    def cost(self, per_token: float | None = None) -> Cost:
        """What fits best, neither part of it negative. `per_token` instead of the prior's, if something better is known.

        The prior counts as two points on its line, at 0 and at 2048 tokens, weighted as measurements there would be.
        """
        fixed, slope = self._prior.fixed, self._prior.per_token if per_token is None else per_token
        w, wx, wy, wxx, wxy = self._w, self._wx, self._wy, self._wxx, self._wxy
        prior = max(_PRIOR_WEIGHT * _DECAY**self.count, _LEAST_PRIOR_WEIGHT)
        for tokens in (0.0, 2 * _SCALE):
            weight = prior / 2 * (_SCALE / (_SCALE + tokens)) ** 2
            seconds = fixed + slope * tokens
            w, wx, wy = w + weight, wx + weight * tokens, wy + weight * seconds
            wxx, wxy = wxx + weight * tokens * tokens, wxy + weight * tokens * seconds
        per = (w * wxy - wx * wy) / (w * wxx - wx * wx)
        if per <= _LEAST_PER_TOKEN:
            return Cost(max(wy - _LEAST_PER_TOKEN * wx, 0.0) / w, _LEAST_PER_TOKEN)
        base = (wy - per * wx) / w
        return Cost(base, per) if base >= 0 else Cost(0.0, wxy / wxx)


class Mean:
    """Of positive numbers; 0 as long as there are none."""

    def __init__(self) -> None:
        self.value = 0.0

    def learn(self, value: float) -> bool:
        """Take a measurement, False if it is none."""
        if not (isfinite(value) and value > 0):
            return False
        if not self.value:
            self.value = value
        else:
            bounded = min(max(value, self.value / _OUTLIER), self.value * _OUTLIER)
            self.value += (bounded - self.value) * (1 - _DECAY)
        return True


class Learned:
    """Of all engines of a role together: they are alike."""

    def __init__(self) -> None:
        self.prefill = Line(PREFILL_PRIOR)
        """Prefill's leg, over the tokens before it and of it."""
        self.hand_over = Line(HAND_OVER_PRIOR)
        """From the end of prefill's leg to decode's first piece, over the tokens that decode lacked."""
        self.decode = Line(Cost(DECODE_FIXED_PRIOR, PREFILL_PRIOR.per_token))
        """To decode's first piece if it computes the prompt, over the tokens before it and of it."""
        self.gap = Mean()
        """Between two pieces of a stream, seconds. It stands for the time between tokens."""

    def learn_decode(self, tokens: float, seconds: float) -> bool:
        return self.decode.learn(tokens, seconds, self.prefill.cost().per_token)

    def costs(self) -> Costs:
        prefill = self.prefill.cost()
        return Costs(
            prefill=prefill,
            hand_over=self.hand_over.cost(),
            # Both roles run one model: until decode is known, a token costs there what it costs on prefill.
            decode=self.decode.cost(prefill.per_token),
            measured=self.prefill.count >= ENOUGH and self.hand_over.count >= ENOUGH,
        )


class Guard:
    """How long a decode engine may compute prompts, so that others do not wait for their tokens.

    While it generates for others, an engine may spend what it has saved: it saves `SHARE` of the time that passes, up to
    `PAUSE_SECONDS` or one gap between tokens, whichever is more. So no prompt makes a longer pause than that, and tokens come
    on the mean 1 / (1 - SHARE) times as slowly at most.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._spent: dict[str, tuple[float, float]] = {}  # seconds by pod, and when that was

    def spare(self, pod: str, running: int, gap: float) -> float:
        """Seconds, for an engine with so many turns `running`."""
        if not running:
            return IDLE_SECONDS
        return max(PAUSE_SECONDS, gap) - self._owed(pod)

    def spend(self, pod: str, seconds: float) -> None:
        owed = self._owed(pod) + seconds
        self._spent = {name: spent for name, spent in self._spent.items() if self._owed(name) > 0}
        self._spent[pod] = owed, self._clock()

    def _owed(self, pod: str) -> float:
        seconds, when = self._spent.get(pod, (0.0, 0.0))
        return max(seconds - SHARE * (self._clock() - when), 0.0)
