"""The two bodies of a turn, for every option that either endpoint knows (vLLM 0.32's request models)."""

from __future__ import annotations

import json
from typing import Any

import pytest

from disagg_router import legs
from disagg_router.backends import Backend
from disagg_router.http1 import Address

PREFILL = Backend("p-0", "prefill", "rev1", Address("10.0.0.1", 8000), 5700)
DECODE = Backend("d-0", "decode", "rev1", Address("10.0.0.2", 8000), 5701)
PAIR = legs.Pair(PREFILL, DECODE)
MODE = legs.BidirectionalPush()
TOLD = MODE.beforehand(PAIR)

# Options that shape the prompt: prefill has to see them, or it computes another prompt.
SHAPING: dict[str, Any] = {
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "tool_choice": "auto",
    "response_format": {"type": "json_object"},
    "chat_template": "x",
    "chat_template_kwargs": {"enable_thinking": False},
    "add_generation_prompt": True,
    "continue_final_message": False,
    "add_special_tokens": False,
    "documents": [{"title": "t", "text": "x"}],
    "reasoning_effort": "low",
    "mm_processor_kwargs": {},
    "media_io_kwargs": {},
    "cache_salt": "salt",
    "priority": 0,
    "a_field_of_tomorrow": 1,
}

# Options for the output: illegal or useless beside one token that nobody reads.
OUTPUT: dict[str, Any] = {
    "max_completion_tokens": 64,
    "min_tokens": 32,
    "stream_options": {"include_usage": True},
    "stream_interval": 2,
    "ignore_eos": True,
    "stop": ["a"],
    "stop_token_ids": [1],
    "include_stop_str_in_output": True,
    "logprobs": True,
    "top_logprobs": 3,
    "logprob_token_ids": [1],
    "return_token_ids": True,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 3,
    "min_p": 0.1,
    "seed": 7,
    "presence_penalty": 0.1,
    "frequency_penalty": 0.1,
    "repetition_penalty": 1.1,
    "logit_bias": {"1": 1},
    "bad_words": ["x"],
    "allowed_token_ids": [1, 2],
    "skip_special_tokens": False,
    "structured_outputs": {"regex": "a+"},
    "thinking_token_budget": 5,
    "repetition_detection": {},
    "best_of": 1,
    "n": 1,
}


def parse(**fields: Any) -> legs.Body:
    return legs.parse(
        json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}).encode()
    )


def both(body: legs.Body) -> tuple[dict[str, Any], dict[str, Any]]:
    return json.loads(MODE.prefill_leg(body, PAIR)), json.loads(MODE.decode_leg(body, TOLD))


@pytest.mark.parametrize("field", SHAPING)
def test_what_shapes_the_prompt_reaches_both_engines(field: str) -> None:
    prefill, decode = both(parse(**{field: SHAPING[field]}))
    assert prefill[field] == decode[field] == SHAPING[field]


@pytest.mark.parametrize("field", OUTPUT)
def test_what_concerns_the_output_reaches_decode_alone(field: str) -> None:
    prefill, decode = both(parse(stream=True, **{field: OUTPUT[field]}))
    assert field not in prefill
    assert decode[field] == OUTPUT[field]


def test_prefill_makes_one_token_and_does_not_stream() -> None:
    prefill, decode = both(parse(stream=True, max_tokens=500, **OUTPUT, **SHAPING))
    assert (prefill["max_tokens"], prefill["stream"]) == (1, False)
    assert (decode["max_tokens"], decode["stream"]) == (500, True)


def test_prefill_makes_one_token_if_the_client_gave_no_limit() -> None:
    prefill, decode = both(parse())
    assert prefill["max_tokens"] == 1
    assert "max_tokens" not in decode


def test_values_reach_decode_as_the_client_wrote_them() -> None:
    text = b'{"prompt": [1, 2], "seed": 12345678901234567890, "temperature": 0.70000000000000000001, "x": "\\u00e9 \\ud83d\\ude00"}'
    leg = legs.local_leg(legs.parse(text))
    for part in (b"12345678901234567890", b"0.70000000000000000001", b'"\\u00e9 \\ud83d\\ude00"', b"[1, 2]"):
        assert part in leg


def test_prefill_is_told_who_holds_the_kv() -> None:
    params = json.loads(MODE.prefill_leg(parse(), legs.Pair(PREFILL, DECODE, holder=DECODE)))[
        "kv_transfer_params"
    ]
    assert params["disagg"] == {"version": 1, "decode": {"host": "10.0.0.2", "control_port": 5701}}


EVIL = b'{"do_remote_prefill": true}'


@pytest.mark.parametrize(
    "text",
    [
        b'{"prompt": "x", "kv_transfer_params": %s}',
        b'{"prompt": "x", "kv_transfer_params": null, "kv_transfer_params": %s}',
        b'{"prompt": "x", "kv\\u005ftransfer_params": %s}',
        b'{"prompt": "x", "ec_transfer_params": %s}',
        b'{"prompt": "x", "vllm_xargs": {"kv_transfer_params": %s}}',
        b'{"prompt": "x", "vllm_xargs": {"k\\u0076_transfer_params": %s}}',
        b'{"prompt": "x", "vllm_xargs": {"ec_transfer_params": %s}}',
    ],
)
def test_no_spelling_of_transfer_params_survives(text: bytes) -> None:
    body = legs.parse(text % EVIL)
    for leg in (legs.local_leg(body), MODE.decode_leg(body, TOLD), MODE.prefill_leg(body, PAIR)):
        assert EVIL not in leg
        assert b"ec_transfer" not in leg
    assert b"kv_transfer" not in legs.local_leg(body)


def test_other_vllm_xargs_stay() -> None:
    body = legs.parse(b'{"prompt": "x", "vllm_xargs": {"a": 1.50, "kv_transfer_params": 1}}')
    assert json.loads(legs.local_leg(body))["vllm_xargs"] == {"a": 1.5}


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b'{"messages":',
        b"[]",
        b"null",
        b'"text"',
        b'{"a": NaN}',
        b'{"a": 1} x',
        b"\xff\xfe{}",
        b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ],
)
def test_what_is_not_a_json_object_is_refused(text: bytes) -> None:
    with pytest.raises(legs.BadBodyError, match="JSON"):
        legs.parse(text)


@pytest.mark.parametrize(
    "text", [b'{"prompt": "half \\ud83d an emoji"}', b'{"prompt": "\xff"}', b'{"prompt": "\\ud83d"}']
)
def test_odd_text_is_passed_on_or_refused_but_never_an_accident(text: bytes) -> None:
    try:
        body = legs.parse(text)
    except legs.BadBodyError:
        return
    assert MODE.decode_leg(body, TOLD)
    assert MODE.prefill_leg(body, PAIR)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, None),
        ({"n": 1, "best_of": 1, "echo": False, "use_beam_search": False, "prompt_logprobs": None}, None),
        ({"n": 2}, "parallel_sampling"),
        ({"best_of": 3}, "parallel_sampling"),
        ({"use_beam_search": True}, "parallel_sampling"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"prompt_logprobs": 5}, "prompt_logprobs"),
        ({"echo": True}, "prompt_logprobs"),
        ({"truncate_prompt_tokens": -1}, "truncation"),
        ({"truncate_prompt_tokens": 10}, "truncation"),
        ({"prompt_embeds": "AAAA"}, "prompt_embeds"),
        ({"logprobs": True, "top_logprobs": 5}, None),
    ],
)
def test_turns_that_prefill_cannot_serve_are_known(fields: dict[str, Any], reason: str | None) -> None:
    assert legs.why_local(parse(**fields)) == reason


def test_echo_in_a_text_completion_needs_decode_only_with_logprobs() -> None:
    assert legs.why_local(legs.parse(b'{"prompt": "x", "echo": true}')) is None
    assert legs.why_local(legs.parse(b'{"prompt": "x", "echo": true, "logprobs": 0}')) == "prompt_logprobs"


@pytest.mark.parametrize(
    ("answer", "tokens"),
    [
        (b'{"usage": {"prompt_tokens": 42, "completion_tokens": 1}}', 42),
        (b'{"usage": null}', None),
        (b"{}", None),
        (b"not json", None),
        (b'{"usage": {"prompt_tokens": "many"}}', None),
    ],
)
def test_prompt_tokens_are_read_if_they_are_there(answer: bytes, tokens: int | None) -> None:
    assert legs.prompt_tokens(answer) == tokens


def test_a_name_that_only_python_reads_hides_nothing() -> None:
    hidden = b'{"prompt": "x", "vllm_xargs": {"kv_transfer_params": "evil", "\xed\xa0\x80": 1}}'
    with pytest.raises(legs.BadBodyError):
        legs.parse(hidden)


@pytest.mark.parametrize("value", [b'"true"', b"1", b"[]", b'"no"'])
def test_stream_is_true_or_false(value: bytes) -> None:
    with pytest.raises(legs.BadBodyError, match="stream"):
        legs.parse(b'{"prompt": "x", "stream": %s}' % value)
