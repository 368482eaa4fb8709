"""What the demo shows and keeps of the conversation, and whether it proves what it claims. Pure."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from e2e.demo.counters import Counters

LEAST_ANSWER_TOKENS = 60
"""An answer shorter than this may not fill a KV block, and then there is nothing to write back."""


@dataclass(frozen=True)
class Turn:
    """One question, its answer, and what it made the engines do."""

    question: str
    answer: str
    ttft_ms: int
    prompt_tokens: int
    answer_tokens: int
    counted: Counters


def turn_table(turns: Sequence[Turn]) -> Table:
    """The conversation, a row a turn."""
    table = Table(title="What each turn moved (tokens)", show_lines=True, expand=True)
    table.add_column("question", ratio=2)
    table.add_column("answer", ratio=4)
    for heading in (
        "TTFT",
        "prompt",
        "P computed",
        "P cache hits",
        "D wrote back to P",
        "P pushed to D",
    ):
        table.add_column(heading, justify="right", min_width=6)
    for turn in turns:
        counted = turn.counted
        table.add_row(
            turn.question,
            shortened(turn.answer),
            f"{turn.ttft_ms} ms",
            *(
                str(number)
                for number in (
                    turn.prompt_tokens,
                    counted.p_computed,
                    counted.p_hit,
                    counted.d_written_back,
                    counted.p_pushed,
                )
            ),
        )
    return table


def shortened(text: str, limit: int = 160) -> str:
    """`text` on one line, cut at a word."""
    line = " ".join(text.split())
    return line if len(line) <= limit else line[:limit].rsplit(" ", 1)[0] + " ..."


def to_json(turns: Sequence[Turn], seconds: dict[str, float], cluster: str) -> dict[str, Any]:
    """The content of build/reports/demo.json. `seconds` are those of the parts, with `total` and `first_answer`."""
    return {
        "turns": [
            {
                "prompt_tokens": turn.prompt_tokens,
                "p_computed": turn.counted.p_computed,
                "p_hit": turn.counted.p_hit,
                "d_written_back": turn.counted.d_written_back,
                "p_pushed": turn.counted.p_pushed,
                "ttft_ms": turn.ttft_ms,
                "answer_tokens": turn.answer_tokens,
                "answer": turn.answer,
            }
            for turn in turns
        ],
        "seconds_total": round(seconds["total"], 1),
        "seconds": {part: round(spent, 1) for part, spent in seconds.items()},
        "cluster": cluster,
    }


def shortcomings(turns: Sequence[Turn]) -> list[str]:
    """Why the conversation does not show KV moving both ways; empty if it does."""
    found: list[str] = []
    for number, turn in enumerate(turns, start=1):
        found += [f"Turn {number}: {what}" for what in _shortcomings_of(turn, number)]
    return found


def _shortcomings_of(turn: Turn, number: int) -> list[str]:
    counted = turn.counted
    if min(asdict(counted).values()) < 0:
        return ["an engine's counters went back: it was restarted during the turn."]
    checks = (
        (not turn.answer.strip(), "the answer is empty."),
        (
            turn.answer_tokens < LEAST_ANSWER_TOKENS,
            f"the answer has {turn.answer_tokens} tokens, fewer than {LEAST_ANSWER_TOKENS}.",
        ),
        (
            counted.p_computed + counted.p_hit < turn.prompt_tokens,
            f"prefill accounts for {counted.p_computed + counted.p_hit} of {turn.prompt_tokens} prompt tokens: its leg "
            "did not run, so decode computed the prompt itself.",
        ),
        (number == 1 and counted.p_pushed == 0, "prefill pushed nothing to decode."),
        (
            number > 1 and counted.d_written_back == 0,
            f"decode wrote nothing back to prefill ({counted.d_offers} write-backs tried).",
        ),
        (
            number > 1 and counted.p_hit == 0,
            "prefill found nothing of the earlier turns in its cache.",
        ),
    )
    return [what for holds, what in checks if holds]
