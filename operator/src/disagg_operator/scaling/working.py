"""The arithmetic of `need` as people write it: each step with the numbers put in, so that it can be done again by hand. Pure.

What comes of a step is what `need` says, never calculated here; a test holds that what is written gives the same.
"""

from dataclasses import dataclass

from .inputs import DecodeLoad, Limits, PrefillLoad, Reuse
from .need import FULL, MOST_WAITING, Speed, decode_need, prefill_need

TOKENS, PODS = "tokens/s", "pods"
_DIGITS = 6
"""Significant ones, of what is calculated. What is put in has fewer."""


@dataclass(frozen=True, slots=True)
class Step:
    """One line."""

    what: str
    formula: str
    """Numbers, words that say which, and `x` for times."""
    value: float
    unit: str

    @property
    def result(self) -> str:
        """The value, pods in thousandths as in the status."""
        return f"{self.value:.3f}" if self.unit == PODS else number(self.value)


def number(value: float) -> str:
    """With as many digits as say something, and never as a power of ten."""
    text = f"{float(f'{value:.{_DIGITS}g}'):.9f}"
    return text.rstrip("0").rstrip(".")


def prefill_working(
    load: PrefillLoad, offered: float, reuse: Reuse, speed: Speed, limits: Limits
) -> tuple[Step, ...]:
    """How prefill_need() comes to its result; the last step is the need."""
    need = prefill_need(load, offered, reuse, speed, limits)
    new = f"(1 - {number(reuse.total)} reuse)"
    return (
        Step("to compute", f"{number(offered)} offered x {new}", need.computed, TOKENS),
        Step(
            "to take in what decode brings",
            f"{number(offered)} offered x {number(reuse.remote)} brought x {number(speed.remote_cost)} cost",
            need.brought,
            TOKENS,
        ),
        Step(
            "to work off the backlog",
            f"{number(load.backlog)} waiting x {new} / {number(limits.drain_seconds)} seconds",
            need.draining,
            TOKENS,
        ),
        Step(
            "what a pod is planned for",
            f"{number(speed.tokens_per_second)} speed x {number(limits.utilization)} utilization",
            need.capacity,
            TOKENS,
        ),
        Step(
            "need",
            f"({number(need.computed)} + {number(need.brought)} + {number(need.draining)}) / {number(need.capacity)}",
            need.pods,
            PODS,
        ),
    )


def decode_working(load: DecodeLoad, limits: Limits) -> tuple[Step, ...]:
    """How decode_need() comes to its result; the last step is the need of the moment."""
    need = decode_need(load, limits)
    running = f"{number(load.running)} running" if load.running >= 1 else "1"
    waiting = f"(1 + min({number(load.waiting)} waiting / {running}, {number(MOST_WAITING)}))"
    mean = load.kv_usage if load.mean_usage is None else load.mean_usage
    usage, target = f"{number(mean)} used", f"{number(limits.kv_usage)} target"
    fuller = f"{number(load.kv_usage)} fuller half / {number(FULL)}"
    formula = f"{load.pods} pods x max({usage} / {target}, {fuller}) x {waiting}"
    steps = [Step("by KV memory", formula, need.memory, PODS)]
    if need.without_retained is not None and load.retained is not None:
        rest = f"max(0, {usage} - {number(load.retained)} retained)"
        formula = f"{load.pods} pods x {rest} x {waiting} / {target}"
        steps.append(Step("the same without what is kept for prefill", formula, need.without_retained, PODS))
    if need.sequences is not None and limits.sequences is not None:
        engines = f" x {limits.decode.engines} engines" if limits.decode.engines > 1 else ""
        places = f"({limits.sequences} sequences{engines} x {number(limits.running)} target)"
        formula = f"({number(load.running)} running + {number(load.waiting)} waiting) / {places}"
        steps.append(Step("by running requests", formula, need.sequences, PODS))
    bounds = [need.memory, *([] if need.sequences is None else [need.sequences])]
    greatest = ", ".join(f"{bound:.3f}" for bound in bounds)
    formula = f"max({greatest})" if len(bounds) > 1 else greatest
    return (*steps, Step("need of the moment", formula, need.pods, PODS))
