"""Tables in Markdown from the JSON files of a run."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from bench.gpu.modes import MODES

Result = dict[str, Any]

_STAGES = (
    ("offer_sent", "offer_taken", "offer on its way"),
    ("offer_taken", "offer_replied", "prefill grants"),
    ("offer_replied", "write_taken", "decode orders the write of its ranks"),
    ("write_taken", "write_posted", "write posted"),
    ("write_posted", "announced", "written and announced at prefill"),
    ("announced", "inserted", "commit, published"),
    ("offer_sent", "inserted", "all: offered (OnFinish: the turn's end) to prefix cache"),
)


def render(folder: Path) -> str:
    """All tables that the folder has results for."""
    results = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    modes = [results[mode.name] for mode in MODES if "turns" in results.get(mode.name, {})]
    parts = []
    if modes:
        parts += [_ttft(modes), _tokens(modes), _gaps(modes), _nixl(modes)]
        parts += [_writebacks(mode) for mode in modes if any(e["event"] == "inserted" for e in mode["trace"])]
    if "transfers" in results:
        parts.append(_transfers(results["transfers"]["samples"]))
    return "\n\n".join(parts)


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def percentile(values: Sequence[float], percent: float) -> float:
    """Of at least one value, by the nearest rank."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -(-int(len(ordered) * percent) // 100) - 1))]


def _turns(mode: Result, wanted: Callable[[int], bool]) -> list[Result]:
    return [turn for turn in mode["turns"] if wanted(turn["number"])]


def _ttft(modes: Sequence[Result]) -> str:
    rows = []
    for mode in modes:
        cells = []
        for wanted in (lambda n: n == 1, lambda n: n > 1):
            times = [turn["ttft"] for turn in _turns(mode, wanted)]
            cells += [
                f"{value:.3f}" for value in (statistics.mean(times), statistics.median(times), max(times))
            ]
        rows.append([mode["title"], *cells, _computed_a_warm_turn(mode)])
    head = ("mode", *(f"{turn} {what}" for turn in ("cold", "warm") for what in ("mean", "median", "max")))
    return "TTFT in seconds\n\n" + table((*head, "prompt tokens computed a warm turn"), rows)


def _computed_a_warm_turn(mode: Result) -> str:
    """By the engine that computes prompts; those of the first turns, which hit nothing, are taken off."""
    snapshots, name = mode["counters"], "request_prefill_kv_computed_tokens_sum"
    engine = "prefill" if "prefill" in snapshots["end"] else "decode"
    more = snapshots["end"][engine].get(name, 0) - snapshots["start"][engine].get(name, 0)
    cold = sum(turn["prompt_tokens"] for turn in _turns(mode, lambda n: n == 1))
    return f"{(more - cold) / len(_turns(mode, lambda n: n > 1)):.0f}"


def _tokens(modes: Sequence[Result]) -> str:
    """Answers against those of the last mode, which is the single engine where it was run."""
    reference = {(turn["session"], turn["number"]): turn["tokens"] for turn in modes[-1]["turns"]}
    rows = []
    for mode in modes:
        answers = [(turn["tokens"], reference[turn["session"], turn["number"]]) for turn in mode["turns"]]
        first = sum(mine[0] == other[0] for mine, other in answers)
        whole = sum(mine == other for mine, other in answers)
        kinds = len({token for mine, _ in answers for token in mine})
        rows.append([mode["title"], f"{first} of {len(answers)}", f"{whole} of {len(answers)}", kinds])
    return f"Answers against those of “{modes[-1]['title']}”\n\n" + table(
        ("mode", "same first token", "same answer", "different tokens in all"), rows
    )


def _gaps(modes: Sequence[Result]) -> str:
    rows = []
    for mode in modes:
        gaps = [gap for turn in mode["turns"] for gap in turn["gaps"]]
        rows.append(
            [mode["title"], len(gaps), f"{statistics.mean(gaps):.2f}"]
            + [f"{percentile(gaps, percent):.2f}" for percent in (50, 90, 99, 99.9)]
            + [f"{max(gaps):.1f}"]
        )
    return "Milliseconds between tokens of an answer\n\n" + table(
        ("mode", "gaps", "mean", "p50", "p90", "p99", "p99.9", "max"), rows
    )


def _nixl(modes: Sequence[Result]) -> str:
    rows = []
    for mode in modes:
        for engine in mode["counters"]["end"]:
            for phase, before, after in (("cold", "start", "cold"), ("warm", "cold", "end")):
                earlier, later = mode["counters"][before][engine], mode["counters"][after][engine]

                def grown(name: str, early: Result = earlier, late: Result = later) -> float:
                    return float(late.get(name, 0) - early.get(name, 0))

                count = grown("nixl_xfer_time_seconds_count")
                if count:
                    rows.append(
                        [
                            mode["title"],
                            f"{engine}, {phase}",
                            f"{count:.0f}",
                            f"{grown('nixl_bytes_transferred_sum') / count / 1e6:.1f}",
                            f"{grown('nixl_num_descriptors_sum') / count:.0f}",
                            f"{grown('nixl_post_time_seconds_sum') / count * 1000:.2f}",
                            f"{grown('nixl_xfer_time_seconds_sum') / count * 1000:.2f}",
                        ]
                    )
    return "NIXL transfers as the initiating engine counts them, means\n\n" + table(
        ("mode", "initiator", "transfers", "MB each", "descriptors", "post ms", "transfer ms"), rows
    )


def _writebacks(mode: Result) -> str:
    times: dict[str, dict[str, float]] = defaultdict(dict)
    for event in mode["trace"]:
        times[event["xid"]].setdefault(event["event"], event["t"])
    whole = [seen for seen in times.values() if {"offer_sent", "inserted"} <= seen.keys()]
    rows = []
    for begin, end, what in _STAGES:
        took = [(seen[end] - seen[begin]) * 1000 for seen in whole if begin in seen and end in seen]
        if took:
            shown = [
                f"{value:.1f}"
                for value in (statistics.median(took), statistics.mean(took), min(took), max(took))
            ]
            rows.append([what, len(took), *shown])
    return f"Write-backs of “{mode['title']}”, milliseconds\n\n" + table(
        ("stage", "write-backs", "median", "mean", "min", "max"), rows
    )


def _transfers(samples: Sequence[Result]) -> str:
    groups: dict[tuple[Any, ...], list[Result]] = defaultdict(list)
    for sample in samples:
        groups[sample["blocks"], sample["scattered"], sample["poll_ms"], sample["operation"]].append(sample)
    rows = []
    for (blocks, scattered, poll_ms, operation), some in groups.items():
        totals = [sample["total"] for sample in some]
        rows.append(
            [
                operation, blocks, "scattered" if scattered else "adjacent", some[0]["descriptors"], poll_ms,
                f"{statistics.median(sample['prepare'] + sample['post'] for sample in some):.2f}",
                f"{statistics.median(totals):.2f}", f"{min(totals):.2f}", f"{max(totals):.2f}",
            ]
        )  # fmt: skip
    head = (
        "operation",
        "blocks",
        "lie",
        "descriptors",
        "poll ms",
        "prepare and post ms",
        "all ms, median",
        "min",
        "max",
    )
    return "NIXL alone\n\n" + table(head, rows)
