"""The comparison as a picture."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from bench.local_prefill.compare import POLICIES, Result

_COLOURS = dict(
    zip(POLICIES, ("#7f8c9b", "#d8a05c", "#b8506a", "#9cc4e4", "#4f8fc0", "#1b7f4d"), strict=True)
)


def draw(results: list[Result], path: Path) -> None:
    """Bars of all policies for each mix: time to the first token, and the longest wait for a later one."""
    figure = Figure(figsize=(12, 7.5), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    plain = {result.mix: result.ttft_mean for result in results if result.policy == "always prefill"}
    _bars(above, results, lambda result: result.ttft_mean / plain[result.mix])
    above.set_ylabel("mean TTFT, always prefill = 1")
    _bars(below, results, lambda result: result.gap_max)
    below.set_ylabel("longest gap between tokens, ms")
    below.set_yscale("log")
    for axes in (above, below):
        axes.grid(axis="y", alpha=0.3)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(
        *above.get_legend_handles_labels(),
        ncols=len(POLICIES),
        frameon=False,
        loc="outside upper center",
        title="Hatched: tokens of others are held up for longer than the guard of Auto allows",
    )
    figure.savefig(path, dpi=100, metadata={"Software": None})


def _bars(axes: Any, results: list[Result], value: Callable[[Result], float]) -> None:
    mixes = list(dict.fromkeys(result.mix for result in results))
    width = 0.8 / len(POLICIES)
    for n, policy in enumerate(POLICIES):
        of_policy = [result for result in results if result.policy == policy]
        bars = axes.bar(
            [mixes.index(result.mix) - 0.4 + (n + 0.5) * width for result in of_policy],
            [value(result) for result in of_policy],
            width,
            label=policy,
            color=_COLOURS[policy],
        )
        for bar, result in zip(bars, of_policy, strict=True):
            if not result.keeps_guard:
                bar.set(facecolor="white", edgecolor=_COLOURS[policy], hatch="////")
    axes.set_xticks(range(len(mixes)), [mix.replace(", ", ",\n") for mix in mixes], fontsize=9)
