from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg_connector.protocol import Address, DecodeLeg, Dismissal, Malformed, PrefillLeg, parse_params

HOME = {"host": "10.88.64.11", "control_port": 5700}


def leg(which: str, **disagg: Any) -> dict[str, Any]:
    return {f"do_remote_{which}": True, "disagg": {"version": 1, **disagg}}


def test_a_prefill_leg_may_name_the_decode_that_holds_the_conversation() -> None:
    assert parse_params(leg("decode", decode=HOME), "prefill") == PrefillLeg(Address("10.88.64.11", 5700))
    assert parse_params(leg("decode"), "prefill") == PrefillLeg(None)


def test_a_decode_leg_names_its_prefill() -> None:
    assert parse_params(leg("prefill", prefill=HOME), "decode") == DecodeLeg(Address("10.88.64.11", 5700))


def test_a_dismissal_names_a_turn_and_is_for_prefill() -> None:
    params = {"do_remote_decode": False, "do_remote_prefill": False, "disagg": {"version": 1, "dismiss": "t"}}
    assert parse_params(params, "prefill") == Dismissal("t")
    assert isinstance(parse_params(params, "decode"), Malformed)
    assert isinstance(parse_params({"disagg": {"version": 1, "dismiss": 5}}, "prefill"), Malformed)
    assert isinstance(parse_params({"disagg": {"version": 2, "dismiss": "t"}}, "prefill"), Malformed)


@pytest.mark.parametrize("params", [None, {}, {"do_remote_prefill": False}, {"unrelated": 1}])
def test_other_requests_are_ordinary(params: Any) -> None:
    assert parse_params(params, "decode") is None
    assert parse_params(params, "prefill") is None


@pytest.mark.parametrize(
    "params",
    [
        [],
        "text",
        {"do_remote_prefill": "true"},
        {"do_remote_prefill": True},
        {"do_remote_prefill": True, "disagg": None},
        {"do_remote_prefill": True, "disagg": {"prefill": HOME}},
        leg("prefill"),
        leg("prefill", prefill={"host": "h"}),
        leg("prefill", prefill={"host": "h", "control_port": 0}),
        leg("prefill", prefill={"host": "h" * 300, "control_port": 5700}),
        {"do_remote_prefill": True, "disagg": {"version": 2, "prefill": HOME}},
        {**leg("prefill", prefill=HOME), "do_remote_decode": True},
    ],
)
def test_what_is_not_understood_is_malformed_with_a_reason(params: Any) -> None:
    found = parse_params(params, "decode")
    assert isinstance(found, Malformed)
    assert found.reason


def test_a_leg_that_reached_the_other_role_is_malformed() -> None:
    assert isinstance(parse_params(leg("prefill", prefill=HOME), "prefill"), Malformed)
    assert isinstance(parse_params(leg("decode"), "decode"), Malformed)


_keys = st.sampled_from(
    [
        "do_remote_prefill",
        "do_remote_decode",
        "disagg",
        "version",
        "prefill",
        "decode",
        "host",
        "control_port",
    ]
)
_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_keys, inner, max_size=4),
    max_leaves=12,
)


@given(_json, st.sampled_from(["prefill", "decode"]))
def test_nothing_that_json_can_hold_raises(params: Any, role: Any) -> None:
    parse_params(params, role)
