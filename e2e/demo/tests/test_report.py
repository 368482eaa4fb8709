"""The table, the JSON report, and the verdict on the conversation."""

import json
from dataclasses import replace

import pytest
from rich.console import Console

from e2e.demo.counters import Counters
from e2e.demo.report import Turn, shortcomings, shortened, to_json, turn_table

FIRST = Turn(
    question="What to see?",
    answer="The Colosseum.\nAnd the Forum.",
    ttft_ms=157,
    prompt_tokens=51,
    answer_tokens=120,
    counted=Counters(p_computed=51, p_pushed=51, p_inserted=128, d_written_back=128, d_offers=1),
)
SECOND = replace(
    FIRST,
    prompt_tokens=199,
    counted=Counters(p_computed=39, p_hit=160, p_pushed=39, p_inserted=96, d_written_back=96, d_offers=1),
)


def test_a_conversation_whose_kv_moved_both_ways_has_no_shortcomings() -> None:
    assert shortcomings([FIRST, SECOND]) == []


def _with(turn: Turn, **counted: int) -> Turn:
    return replace(turn, counted=replace(turn.counted, **counted))


@pytest.mark.parametrize(
    ("turns", "told"),
    [
        ([FIRST, _with(SECOND, d_written_back=0)], "Turn 2: decode wrote nothing back"),
        ([FIRST, _with(SECOND, p_hit=0, p_computed=199)], "Turn 2: prefill found nothing"),
        ([FIRST, _with(SECOND, p_computed=0)], "Turn 2: prefill accounts for 160 of 199"),
        ([_with(FIRST, p_pushed=0), SECOND], "Turn 1: prefill pushed nothing"),
        ([FIRST, replace(SECOND, answer=" \n")], "Turn 2: the answer is empty"),
        ([FIRST, replace(SECOND, answer_tokens=12)], "Turn 2: the answer has 12 tokens"),
        ([FIRST, _with(SECOND, p_computed=-300)], "Turn 2: an engine's counters went back"),
    ],
)
def test_what_is_missing_is_told_with_the_turn(turns: list[Turn], told: str) -> None:
    (found,) = shortcomings(turns)
    assert found.startswith(told)


def test_the_first_turn_needs_no_write_back_to_have_arrived() -> None:
    assert shortcomings([_with(FIRST, d_written_back=0, p_inserted=0), SECOND]) == []


def test_the_table_has_a_row_for_each_turn_with_all_its_numbers() -> None:
    console = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(turn_table([FIRST, SECOND]))
    text = console.export_text()
    for wanted in ("What to see?", "157 ms", "199", "39", "160", "96", "The Colosseum. And the Forum."):
        assert wanted in text


def test_long_answers_are_cut_at_a_word() -> None:
    assert shortened("one two\nthree", limit=9) == "one two ..."
    assert shortened("one\ntwo", limit=9) == "one two"


def test_the_json_report_keeps_every_turn_in_whole() -> None:
    report = json.loads(json.dumps(to_json([FIRST, SECOND], {"total": 141.26, "cluster": 13.04}, "local")))
    assert report["turns"][1] == {
        "prompt_tokens": 199,
        "p_computed": 39,
        "p_hit": 160,
        "d_written_back": 96,
        "p_pushed": 39,
        "ttft_ms": 157,
        "answer_tokens": 120,
        "answer": "The Colosseum.\nAnd the Forum.",
    }
    assert report["seconds_total"] == 141.3
    assert report["seconds"]["cluster"] == 13.0
    assert report["cluster"] == "local"
