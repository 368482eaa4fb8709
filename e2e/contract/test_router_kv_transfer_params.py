"""The legs that the router sends, held against the shared reading of docs/wire-contract.md section 1."""

from __future__ import annotations

import json
import re
import uuid
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from disagg_router import legs
from disagg_router.backends import Backend, Role
from disagg_router.http1 import Address

CONTRACT: dict[str, Any] = json.loads(Path(__file__).with_name("kv_transfer_params.json").read_text())


def validator(leg: str) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator({**CONTRACT["schemas"][leg], "$defs": CONTRACT["$defs"]})


def engine(role: Role, params: dict[str, Any]) -> Backend:
    return Backend("pod", role, "rev1", Address(params["host"], 8000), params["control_port"])


def sent(leg: str, params: dict[str, Any]) -> dict[str, Any]:
    """The params that the router sends on `leg` to engines that are where `params` says."""
    body = legs.parse(b'{"prompt": "hi", "max_tokens": 9}')
    mode, disagg = legs.BidirectionalPush(), params["disagg"]
    here = {"host": "10.0.0.9", "control_port": 5700}
    prefill, decode = (
        engine("prefill", disagg.get("prefill", here)),
        engine("decode", disagg.get("decode", here)),
    )
    pair = legs.Pair(prefill, decode, holder=decode if "decode" in disagg else None)
    if leg == "prefill":
        raw = mode.prefill_leg(body, pair)
    elif leg == "dismissal":
        raw = mode.dismissal(disagg["dismiss"])
    else:
        raw = mode.decode_leg(body, mode.beforehand(pair))
    answer: dict[str, Any] = json.loads(raw)["kv_transfer_params"]
    return answer


@pytest.mark.parametrize("case", CONTRACT["understood"], ids=lambda case: case["name"])
def test_the_router_sends_exactly_the_contracts_params(case: dict[str, Any]) -> None:
    assert sent(case["leg"], case["params"]) == case["params"]


@pytest.mark.parametrize("case", CONTRACT["understood"], ids=lambda case: case["name"])
def test_the_schemas_accept_what_is_to_be_understood(case: dict[str, Any]) -> None:
    validator(case["leg"]).validate(case["params"])


@pytest.mark.parametrize("case", CONTRACT["treated_as_absent"], ids=lambda case: case["name"])
def test_the_schemas_refuse_what_is_to_be_treated_as_absent(case: dict[str, Any]) -> None:
    assert not validator(case["leg"]).is_valid(case["params"])


def test_the_wire_version_is_the_contracts() -> None:
    assert CONTRACT["version"] == legs.WIRE_VERSION


def test_ids_as_the_router_makes_them_fit_the_contract() -> None:
    assert re.fullmatch(CONTRACT["request_id"], uuid.uuid4().hex)


def test_a_local_leg_carries_no_params() -> None:
    body = legs.parse(b'{"prompt": "hi", "kv_transfer_params": {"do_remote_prefill": true}}')
    assert json.loads(legs.local_leg(body)) == {"prompt": "hi"}
