"""Kubernetes' HorizontalPodAutoscaler on requests that wait, as vLLM's production-stack scales by KEDA.

Source: kubernetes.io, "Horizontal Pod Autoscaling", algorithm details: desired = ceil(metric / target) for an average value, no change within a
tolerance of 10 %, the highest wish of 300 s when shrinking, at most the greater of 4 pods and 100 % more in 15 s.
Decode in addition follows its KV cache at 80 %, as llm-d does: by waiting requests alone it would shrink until it is full.
Simplified: pods that are not ready are not left out of the mean; the adapter's own delay is not there.
"""

import math
from collections import deque
from dataclasses import dataclass

from bench.autoscaling.rules import Seen, Told
from disagg_operator.naming import Component
from disagg_operator.scaling.inputs import Sizes

TOLERANCE = 0.10
DOWN_SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class Pace:
    """An HPA's `behavior`: at most so many pods within so many seconds, the target's size at the least when it grows."""

    up_pods: float = 4
    up_seconds: float = 15.0
    doubles: bool = True
    """Whether it may double, if that is more than `up_pods`."""
    down_pods: float = math.inf
    down_seconds: float = 15.0


DEFAULT = Pace()


class Autoscaler:
    """One HPA, on metrics as (sum over the pods, target for the mean of a pod); of several the greatest wish counts."""

    def __init__(self, most: int, pace: Pace = DEFAULT) -> None:
        self._most, self._pace = most, pace
        self._wishes: deque[tuple[float, int]] = deque()
        self._changes: deque[tuple[float, int]] = deque()

    def size(self, now: float, current: int, *metrics: tuple[float, float]) -> int:
        """Of the target, at this sync."""
        wish = max(_wish(current, total, target) for total, target in metrics)
        wish = min(max(wish, 1), self._most)
        self._wishes.append((now, wish))
        while self._wishes[0][0] < now - DOWN_SECONDS:
            self._wishes.popleft()
        if wish < current:
            wish = min(max(wish for _, wish in self._wishes), current)
        size = int(min(max(wish, self._least(now, current)), self._greatest(now, current)))
        self._changes.append((now, size - current))
        return size

    def _greatest(self, now: float, current: int) -> float:
        pace = self._pace
        before = current - self._changed(now, pace.up_seconds, 1)
        return max(before + pace.up_pods, 2 * before if pace.doubles else 0)

    def _least(self, now: float, current: int) -> float:
        pace = self._pace
        return current - self._changed(now, pace.down_seconds, -1) - pace.down_pods

    def _changed(self, now: float, seconds: float, sign: int) -> int:
        """Pods added (1) or, as a negative number, taken away (-1) within so many last seconds."""
        while self._changes and self._changes[0][0] < now - 600:
            self._changes.popleft()
        return sum(by for at, by in self._changes if now - at < seconds and by * sign > 0)


def _wish(current: int, total: float, target: float) -> int:
    ratio = total / (target * current)
    return current if abs(ratio - 1) <= TOLERANCE else math.ceil(total / target)


class Smoothed:
    """The mean of a minute, as PromQL's avg_over_time gives it."""

    def __init__(self) -> None:
        self._values: deque[tuple[float, float]] = deque()

    def add(self, now: float, value: float) -> float:
        """The mean with this one."""
        self._values.append((now, value))
        while self._values[0][0] <= now - 60:
            self._values.popleft()
        return sum(value for _, value in self._values) / len(self._values)


class WaitingRequests:
    """Two HPAs. `waiting`: requests that may wait for each pod, over a minute."""

    period = 15.0

    def __init__(self, told: Told, waiting: float = 0.5, kv: float = 0.8, pace: Pace = DEFAULT) -> None:
        self._waiting, self._kv = waiting, kv
        self._prefill, self._decode = Autoscaler(told.most, pace), Autoscaler(told.most, pace)
        self._prefill_waits, self._decode_waits = Smoothed(), Smoothed()

    def sizes(self, seen: Seen) -> Sizes:
        """Each role by its own."""
        waits = self._prefill_waits.add(seen.now, sum(pod.waiting for pod in seen.prefill) + seen.held_back)
        decode_waits = self._decode_waits.add(seen.now, sum(pod.waiting for pod in seen.decode))
        usage = sum(pod.usage for pod in seen.decode)
        return Sizes(
            self._prefill.size(seen.now, seen.sizes.of(Component.PREFILL), (waits, self._waiting)),
            self._decode.size(
                seen.now, seen.sizes.of(Component.DECODE), (decode_waits, self._waiting), (usage, self._kv)
            ),
        )
