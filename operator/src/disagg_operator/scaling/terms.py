"""What a look at the load asks for, before it is decided what is done about it. Pure.

Growing and shrinking are two questions. A pool grows by the reuse that is there now, if it was there for a while too; it shrinks
by the least reuse of a long time, since it waits until every look of that time allows it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median

from ..naming import Component
from .history import History, Tick
from .inputs import DecodeLoad, Inputs, Limits, PrefillLoad, Reuse, Sizes
from .need import DEFAULT_REMOTE_COST, FULL, DecodeNeed, PrefillNeed, Speed, decode_need, prefill_need

LEAST_TOKENS = 10_000.0
"""Of prompts within a window, for their reuse to mean anything; with fewer, none is counted on."""
LEAST_SHARE = 0.1
"""Of what one pod computes in a window: as good for engines that are too slow for so many tokens. Below it a pod is enough anyway."""
GROW_REUSE_SECONDS = 300.0
UP_SECONDS = 60.0
FAILED_SHARE = 0.01
SMOOTH_SECONDS = 60.0
"""Decode's KV usage is taken as the mean of so long."""
MOST_COMING = 2.0
TREND_SECONDS = 60.0
MOST_AHEAD = 120.0
"""A trend of TREND_SECONDS says nothing of a later time, however long pods take to start."""
MOST_TREND = 2.0


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """The terms of a decision, for people who have to trust it."""

    reuse: Reuse
    """As measured."""
    growing_reuse: Reuse
    """As counted on for growing."""
    shrinking_reuse: Reuse
    """As counted on for shrinking, at this look: a pool shrinks to the greatest wish of a whole window, so by its least reuse."""
    offered: float
    """Prompt tokens per second that prefill's need is of: with the trend, and with what clients hold back while prompts wait."""
    speed: Speed | None
    prefill: PrefillNeed | None
    decode: DecodeNeed
    decode_pods: float = 0.0
    """Decode's need over a minute, with what will come to it."""
    decode_coming: float = 1.0
    """By what factor more will come to it: so much of decode_pods."""


def look(
    inputs: Inputs,
    load: PrefillLoad,
    decode_load: DecodeLoad,
    limits: Limits,
    sizes: Sizes,
    history: History,
    now: float,
) -> tuple[Arithmetic, Tick]:
    """The terms of one look, and what is to be remembered of it.

    `load` and `decode_load` are those of `inputs`, which has to know them.
    """
    speed = _speed(inputs, limits)
    reuse = load.reuse if load.tokens >= _least_tokens(speed, limits) else Reuse()
    waited = load.backlog > load.offered
    pessimistic = reuse
    if waited and not history.moved(Component.PREFILL, now, seconds_to_show(limits), 1):
        pessimistic = _latest(reuse, load, speed, limits)
    growing = _growing_reuse(pessimistic, inputs, limits, history, now)
    past, ahead = history.within(now, TREND_SECONDS), min(limits.pod_start_seconds, MOST_AHEAD)
    sent = _sent(load, waited, limits, history, now)
    work = sent * (1.0 - growing.total)
    more = 1.0  # A pod that was taken away has its conversations computed anew once: that is no trend.
    if not history.moved(Component.PREFILL, now, 2 * TREND_SECONDS, -1):
        more = _trend([(t.at, t.work) for t in past], now, work, ahead)
    offered = max(sent, load.offered * more)
    up = None if speed is None else prefill_need(load, offered, growing, speed, limits)
    down = None if speed is None else prefill_need(load, load.offered, reuse, speed, limits)
    decode = decode_need(decode_load, limits)
    coming = max(sent, load.offered * _trend([(t.at, t.sent) for t in past], now, sent, ahead))
    # What waits for decode counts already for what is to come.
    factor = _coming(coming, load, limits) if decode_load.waiting < 1 else 1.0
    decode_pods = _steady_decode(decode, decode_load, history, now) * factor
    terms = Arithmetic(load.reuse, growing, reuse, offered, speed, up, decode, decode_pods, factor)
    late = limits.ttft_target is not None and (inputs.ttft_p95 or 0.0) > limits.ttft_target
    slow = limits.itl_target is not None and (inputs.itl_p95 or 0.0) > limits.itl_target
    tick = Tick(
        at=now,
        reuse=reuse,
        offered=load.offered,
        sent=sent,
        waited=waited,
        work=work,
        up=Sizes(
            _grown(up.pods if up else None, sizes.prefill, limits),
            _grown(decode_pods, sizes.decode, limits),
        ),
        down=Sizes(
            _shrunk(max(down.pods, up.pods) if up and down else None, sizes.prefill, limits),
            max(_shrunk(decode_pods, sizes.decode, limits), math.ceil(decode.pods * limits.kv_usage / FULL)),
        ),
        decode_need=decode.pods,
        late_first_tokens=late,
        slow_tokens=slow,
    )
    return terms, tick


def _least_tokens(speed: Speed | None, limits: Limits) -> float:
    return (
        LEAST_TOKENS
        if speed is None
        else min(LEAST_TOKENS, LEAST_SHARE * speed.tokens_per_second * limits.window)
    )


def seconds_to_show(limits: Limits) -> float:
    """Until a pod that was added shows in what users wait for."""
    return UP_SECONDS + limits.pod_start_seconds


def _latest(reuse: Reuse, load: PrefillLoad, speed: Speed | None, limits: Limits) -> Reuse:
    """That of the latest look, if it is less: a window shows all of a fall only when it has gone by."""
    if load.latest_tokens < _least_tokens(speed, limits):
        return reuse
    return reuse.scaled(min(reuse.total, load.latest_reuse))


def _growing_reuse(reuse: Reuse, inputs: Inputs, limits: Limits, history: History, now: float) -> Reuse:
    """What is there now, and was there in the middle of the last minutes; of transfers that fail, nothing.

    A pool that may shrink by the reuse of a shorter time must not grow again by that of a longer one.
    """
    past = [t.reuse.total for t in history.within(now, min(GROW_REUSE_SECONDS, limits.down_window))]
    counted = reuse.scaled(min([reuse.total, median([*past, reuse.total])]))
    return replace(counted, remote=0.0) if inputs.failed_share > FAILED_SHARE else counted


def _sent(load: PrefillLoad, waited: bool, limits: Limits, history: History, now: float) -> float:
    """What clients would send if none waited: the most of the last minutes, as those whose prompts wait send nothing new.

    Also while such a time is in the window that the load is measured over, so that clients that come again are no trend.
    """
    if not waited and not any(t.waited for t in history.within(now, limits.window)):
        return load.offered
    past = history.within(now, min(GROW_REUSE_SECONDS, limits.down_window))
    return max([load.offered, *(t.offered for t in past)])


def _trend(values: Sequence[tuple[float, float]], now: float, value: float, ahead: float) -> float:
    """By what factor a growing value will have grown in `ahead` seconds, at most 2.

    It has to have grown in both halves of the time of `values` (time, value): a step is no slope.
    """
    if len(values) < 2 or value <= 0 or ahead <= 0:
        return 1.0
    (first_at, first), (middle_at, middle) = values[0], values[len(values) // 2]
    if not first_at < middle_at < now:
        return 1.0
    slope = min((middle - first) / (middle_at - first_at), (value - middle) / (now - middle_at))
    return min(1.0 + max(0.0, slope) * ahead / value, MOST_TREND)


def _coming(offered: float, load: PrefillLoad, limits: Limits) -> float:
    """How much more than now will come to decode: what prefill holds up reaches it when prefill has grown, and so does the trend."""
    served = load.tokens / limits.window
    if served <= 0:
        return 1.0
    return min(max(offered / served, 1.0), MOST_COMING)


def _steady_decode(need: DecodeNeed, load: DecodeLoad, history: History, now: float) -> float:
    """The mean of a minute, since KV usage is read at one moment; the moment's own if requests wait or an engine is full."""
    if load.waiting >= 1 or load.fullest >= FULL:
        return need.pods
    return fmean([need.pods, *(t.decode_need for t in history.within(now, SMOOTH_SECONDS))])


def _speed(inputs: Inputs, limits: Limits) -> Speed | None:
    rate = limits.tokens_per_second or inputs.learned.tokens_per_second
    if rate is None or rate <= 0:
        return None
    cost = limits.remote_cost if limits.remote_cost is not None else inputs.learned.remote_cost
    return Speed(rate, DEFAULT_REMOTE_COST if cost is None else cost)


def _grown(need: float | None, size: int, limits: Limits) -> int:
    return math.ceil(need) if need is not None and need > size * (1 + limits.tolerance) else size


def _shrunk(need: float | None, size: int, limits: Limits) -> int:
    """One pod less has to be enough with the tolerance to spare, or the pool would grow again at once."""
    if need is None:
        return size
    return math.ceil(need * (1 + limits.tolerance))
