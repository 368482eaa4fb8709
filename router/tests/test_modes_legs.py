"""The legs of vLLM's own connectors: what is asked, what of prefill's answer is trusted, what decode is told."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from disagg_router import legs
from disagg_router.backends import Backend
from disagg_router.http1 import Address

PREFILL = Backend("p-0", "prefill", "rev1", Address("10.0.0.1", 8000), 5700)
DECODE = Backend("d-0", "decode", "rev1", Address("10.0.0.2", 8000), 5700)
PAIR = legs.Pair(PREFILL, DECODE, holder=DECODE)
BODY = legs.parse(b'{"prompt": "hi", "max_tokens": 9, "stream": true, "kv_transfer_params": {"x": 1}}')
TRANSFERS = {"Pull": "pull", "BidirectionalPull": "pull", "Push": "push"}

# As vLLM 0.32 answers.
LOCATED: dict[str, Any] = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[5, 6, 7, 8]],
    "remote_engine_id": "92e2",
    "remote_request_id": "cmpl-abc-0-9deb0424",
    "remote_host": "10.0.0.1",
    "remote_port": 5600,
    "tp_size": 2,
    "dcp_size": 1,
    "pp_size": 1,
    "remote_num_tokens": 100,
    "remote_blocks_expiry_time": None,
    "transfer_mode": "pull",
    "remote_prefill_cached_tokens": 0,
}


def answer(mode: str, **changes: Any) -> bytes:
    params = {**LOCATED, "transfer_mode": TRANSFERS[mode], **changes}
    kept = {name: value for name, value in params.items() if value != "absent"}
    return json.dumps({"choices": [], "kv_transfer_params": kept}).encode()


def params(leg: bytes) -> Any:
    return json.loads(leg)["kv_transfer_params"]


@pytest.mark.parametrize("name", TRANSFERS)
def test_prefill_is_asked_for_one_token_and_to_keep_the_kv(name: str) -> None:
    leg = json.loads(legs.MODES[name]().prefill_leg(BODY, PAIR))
    assert leg == {
        "prompt": "hi",
        "max_tokens": 1,
        "stream": False,
        "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False},
    }


@pytest.mark.parametrize("name", TRANSFERS)
def test_decode_gets_prefills_answer_as_it_is_and_the_clients_body(name: str) -> None:
    mode = legs.MODES[name]()
    assert mode.beforehand(PAIR) is None
    leg = json.loads(mode.decode_leg(BODY, mode.heard(PAIR, answer(name), None)))
    assert leg["kv_transfer_params"] == {**LOCATED, "transfer_mode": TRANSFERS[name]}
    assert (leg["max_tokens"], leg["stream"]) == (9, True)


@pytest.mark.parametrize("name", TRANSFERS)
@pytest.mark.parametrize(
    "changes",
    [
        *({field: "absent"} for field in (
            "remote_block_ids", "remote_engine_id", "remote_request_id", "remote_host", "remote_port", "tp_size",
            "transfer_mode", "do_remote_prefill",
        )),
        {"transfer_mode": "beam"},
        {"do_remote_prefill": False},
        {"remote_block_ids": [[]]},
        {"remote_block_ids": []},
        {"remote_block_ids": "5"},
        {"remote_engine_id": ""},
        {"remote_request_id": None},
        {"remote_port": 0},
        {"remote_port": "5600"},
        {"tp_size": 0},
    ],
    ids=str,
)  # fmt: skip
def test_what_would_end_decodes_engine_does_not_get_there(name: str, changes: dict[str, Any]) -> None:
    with pytest.raises(legs.UnusableAnswerError):
        legs.MODES[name]().heard(PAIR, answer(name, **changes), None)


@pytest.mark.parametrize("name", TRANSFERS)
@pytest.mark.parametrize(
    "text",
    [b"", b"{}", b"[]", b'{"kv_transfer_params": null}', b'{"kv_transfer_params": {}}', b"[" * 100_000],
)
def test_answers_of_other_engines_are_refused(name: str, text: bytes) -> None:
    with pytest.raises(legs.UnusableAnswerError):
        legs.MODES[name]().heard(PAIR, text, None)


@pytest.mark.parametrize(
    ("name", "other"), [("Pull", "push"), ("BidirectionalPull", "push"), ("Push", "pull")]
)
def test_engines_of_the_other_direction_do_not_meet(name: str, other: str) -> None:
    with pytest.raises(legs.UnusableAnswerError, match="offers no KV"):
        legs.MODES[name]().heard(PAIR, answer(name, transfer_mode=other), None)


@pytest.mark.parametrize("name", TRANSFERS)
@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        ('"hi"', None),
        ("[1, 2]", None),
        ('["hi"]', None),
        ("[[1, 2]]", None),
        ('["hi", "you"]', "batched_prompts"),
        (" [ [1], [2]]", "batched_prompts"),
        ("[]", None),
        ('["unclosed", {]', None),
    ],
)
def test_one_prompt_a_request(name: str, prompt: str, reason: str | None) -> None:
    try:
        body = legs.parse(f'{{"prompt": {prompt}}}'.encode())
    except legs.BadBodyError:
        return
    assert legs.MODES[name]().why_local(body) == reason
    assert legs.BidirectionalPush().why_local(body) is None


# -- Push ----------------------------------------------------------------------------------------------------


def test_push_knows_an_engine_by_its_answer() -> None:
    mode = legs.Push()
    mode.heard(PAIR, answer("Push"), None)
    told = mode.beforehand(PAIR)
    assert told is not None
    assert params(mode.decode_leg(BODY, told)) == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": "92e2",
        "remote_host": "10.0.0.1",
        "remote_port": 5600,
        "tp_size": 2,
        "dcp_size": 1,
        "pp_size": 1,
        "remote_request_id": "-",
    }
    mode.heard(PAIR, answer("Push", remote_request_id="cmpl-another"), told)


def test_push_notices_another_start_of_the_engine_and_knows_it_from_then_on() -> None:
    mode = legs.Push()
    mode.heard(PAIR, answer("Push"), None)
    told = mode.beforehand(PAIR)
    for _ in range(2):  # also for a turn whose answer comes when another turn has already noticed
        with pytest.raises(legs.UnusableAnswerError, match="earlier start"):
            mode.heard(PAIR, answer("Push", remote_engine_id="anew"), told)
    now = mode.beforehand(PAIR)
    assert now is not None
    assert params(mode.decode_leg(BODY, now))["remote_engine_id"] == "anew"


@pytest.mark.parametrize(
    ("there", "known"),
    [
        ((PREFILL, DECODE), True),
        ((replace(PREFILL, leaving=True),), True),
        ((replace(PREFILL, ready=False),), False),
        ((replace(PREFILL, terminating=True),), False),
        ((replace(PREFILL, address=Address("10.0.0.9", 8000)),), False),
        ((DECODE,), False),
    ],
)
def test_push_forgets_engines_that_were_away(there: tuple[Backend, ...], known: bool) -> None:
    mode = legs.Push()
    mode.heard(PAIR, answer("Push"), None)
    mode.engines(there)
    assert (mode.beforehand(PAIR) is not None) == known


def test_push_forgets_an_engine_that_failed() -> None:
    mode = legs.Push()
    mode.heard(PAIR, answer("Push"), None)
    mode.failed(PREFILL)
    assert mode.beforehand(PAIR) is None


@pytest.mark.parametrize("name", legs.MODES)
def test_only_push_leaves_prefill_to_finish_and_only_bidirectional_pull_hands_back(name: str) -> None:
    mode = legs.MODES[name]()
    assert mode.finishes_prefill == (name == "Push")
    assert mode.hands_back == (name == "BidirectionalPull")
    assert (mode.dismissal("turn") is not None) == (name == "BidirectionalPush")


# -- BidirectionalPull ---------------------------------------------------------------------------------------


def test_prefill_gets_what_decode_handed_back_as_it_is() -> None:
    held = {**LOCATED, "do_remote_decode": True, "do_remote_prefill": False}
    assert params(legs.BidirectionalPull().prefill_leg(BODY, PAIR, held)) == held


@pytest.mark.parametrize(
    ("body", "asked"),
    [
        ('{"prompt": "hi"}', True),
        ('{"prompt": "hi", "stream": true}', False),
        ('{"prompt": "hi", "echo": true}', False),
        ('{"prompt": ["hi", "you"]}', False),
        ('{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": null}]}', True),
        ('{"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]}', True),
        ('{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}', False),
        ('{"messages": [{"role": "user", "content": 7}]}', False),
        ('{"messages": 7}', False),
    ],
)
def test_decodes_tokens_are_asked_for_where_they_can_be_used(body: str, asked: bool) -> None:
    leg = json.loads(legs.BidirectionalPull().decode_leg(legs.parse(body.encode()), LOCATED))
    assert ("return_token_ids" in leg) == asked
