"""The comparison as pictures."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from bench.autoscaling.compare import OURS, Outcome, Run

_COLOURS = ("#1b7f4d", "#b8506a", "#4f8fc0", "#9cc4e4", "#d8a05c", "#7f8c9b", "#c0c0c0")


def draw_comparison(outcomes: Sequence[Outcome], path: Path) -> None:
    """For each trace, what each rule attains over what it costs."""
    traces = list(dict.fromkeys(outcome.trace for outcome in outcomes))
    rules = list(dict.fromkeys(outcome.rule for outcome in outcomes))
    figure = Figure(figsize=(13, 6.5), layout="constrained")
    grid = figure.subplots(2, (len(traces) + 1) // 2).flat
    for axes, trace in zip(grid, traces, strict=False):
        for rule, colour in zip(rules, _COLOURS, strict=False):
            found = next(o for o in outcomes if o.trace == trace and o.rule == rule)
            marker = "*" if rule == OURS else "o"
            size = 130 if rule == OURS else 45
            axes.scatter(found.hours, 100 * found.attained, size, colour, marker, label=rule, zorder=3)
        axes.axhline(99, color="#999999", linewidth=0.8, linestyle=":")
        axes.set_title(trace, fontsize=10)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_xlim(left=0)
    figure.supxlabel("replica-hours, both roles")
    figure.supylabel("turns whose first token came in time, %")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, ncols=4, frameon=False, loc="outside upper center")
    figure.savefig(path, dpi=90, metadata={"Software": None})


def draw_runs(runs: Sequence[Run], path: Path) -> None:
    """The pools' sizes over time, prefill above decode, for some traces."""
    traces = list(dict.fromkeys(run.trace.name for run in runs))
    rules = list(dict.fromkeys(run.rule for run in runs))
    figure = Figure(figsize=(13, 5.5), layout="constrained")
    grid = figure.subplots(2, len(traces), sharex="col", squeeze=False)
    for column, trace in enumerate(traces):
        for run in (run for run in runs if run.trace.name == trace):
            colour = _COLOURS[rules.index(run.rule)]
            times = [sized.at / 60 for sized in run.result.sizes]
            for row, role in enumerate(("prefill", "decode")):
                sizes = [getattr(sized.present, role) for sized in run.result.sizes]
                grid[row][column].step(times, sizes, color=colour, label=run.rule, where="post")
        reuse = grid[0][column].twinx()
        first = next(run for run in runs if run.trace.name == trace)
        reuse.plot(
            *zip(*((at / 60, share) for at, share in first.result.reuse), strict=True),
            color="#bbbbbb",
            zorder=0,
        )
        reuse.set_ylim(0, 1)
        reuse.set_ylabel("reuse (grey)", color="#888888")
        grid[0][column].set_title(trace)
        grid[1][column].set_xlabel("minutes")
    for row, role in enumerate(("prefill", "decode")):
        grid[row][0].set_ylabel(f"{role} pods")
    for axes in grid.flat:
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, ncols=4, frameon=False, loc="outside upper center")
    figure.savefig(path, dpi=90, metadata={"Software": None})
