"""This project's rule: the operator's own decision, fed as its signals feed it."""

from typing import Any

from bench.autoscaling.rules import WINDOW, Seen, Told
from disagg_operator.scaling.history import EMPTY
from disagg_operator.scaling.inputs import DecodeLoad, Inputs, Limits, PrefillLoad, Reuse, RoleLimits, Sizes
from disagg_operator.scaling.policy import decide


class ReuseRatio:
    """The operator looks every 15 s."""

    period = 15.0

    def __init__(self, told: Told, **limits: Any) -> None:
        """`limits` other than the operator's defaults."""
        self._limits = Limits(
            prefill=RoleLimits(1, told.most),
            decode=RoleLimits(1, told.most),
            sequences=told.engine.sequences,
            tokens_per_second=told.engine.tokens_per_second,
            remote_cost=told.engine.remote_cost,
            ttft_target=told.ttft_slo,
            pod_start_seconds=told.start,
            **limits,
        )
        self._history = EMPTY

    def sizes(self, seen: Seen) -> Sizes:
        """As decided."""
        decision, self._history = decide(inputs(seen), self._limits, seen.sizes, self._history, seen.now)
        return decision.desired


def inputs(seen: Seen) -> Inputs:
    """What the operator would make of the pages."""
    if not seen.prefill or not seen.decode or seen.seconds <= 0:
        return Inputs(None, None)
    window = seen.window
    finished = window.finished
    remote = min(window.pushed + window.written_back, window.hit + window.pushed)
    reuse = Reuse()
    if finished:
        reuse = Reuse((window.hit + window.pushed - remote) / finished, remote / finished)
    waiting = sum(pod.waiting for pod in seen.prefill) + seen.held_back
    usages = sorted((pod.usage for pod in seen.decode), reverse=True)
    fuller = usages[: (len(usages) + 1) // 2]
    return Inputs(
        prefill=PrefillLoad(
            offered=window.offered / seen.seconds,
            tokens=finished * WINDOW / seen.seconds,
            reuse=reuse,
            backlog=waiting * window.offered / max(window.sent, 1.0),
            written_back=window.written_back,
            latest_tokens=seen.latest.finished,
            latest_reuse=seen.latest.reuse,
        ),
        decode=DecodeLoad(
            kv_usage=sum(fuller) / len(fuller),
            fullest=usages[0],
            running=sum(pod.running for pod in seen.decode),
            waiting=sum(pod.waiting for pod in seen.decode),
            pods=len(usages),
            mean_usage=sum(usages) / len(usages),
        ),
        ttft_p95=seen.ttft_p95,
        itl_p95=seen.itl_p95,
    )
