"""BidirectionalPush, this project's connector (docs/wire-contract.md section 1). Pure.

Both legs go out at once and carry addresses only; the connectors find each other and agree on the rest.
"""

from __future__ import annotations

from typing import Any

import msgspec

from disagg_router.backends import Backend
from disagg_router.legs.body import Body, prompt_only, with_params
from disagg_router.legs.mode import Pair, Params, Stateless

WIRE_VERSION = 1


class BidirectionalPush(Stateless):
    asks_holder = True

    def beforehand(self, pair: Pair) -> Params:
        disagg = {"version": WIRE_VERSION, "prefill": _engine(pair.prefill)}
        return {"do_remote_prefill": True, "do_remote_decode": False, "disagg": disagg}

    def prefill_leg(self, body: Body, pair: Pair, held: Params | None = None) -> bytes:
        disagg: dict[str, Any] = {"version": WIRE_VERSION}
        if pair.holder is not None:
            disagg["decode"] = _engine(pair.holder)
        return prompt_only(body, {"do_remote_decode": True, "do_remote_prefill": False, "disagg": disagg})

    def heard(self, pair: Pair, answer: bytes, told: Params | None) -> Params:
        """The connectors settle it between themselves."""
        return self.beforehand(pair)

    def decode_leg(self, body: Body, params: Params) -> bytes:
        return with_params(body, params)

    def dismissal(self, turn: str) -> bytes:
        """The engine answers it like any completion, of one token after a prompt of one."""
        disagg = {"version": WIRE_VERSION, "dismiss": turn}
        params = {"do_remote_decode": False, "do_remote_prefill": False, "disagg": disagg}
        return msgspec.json.encode({"prompt": [0], "max_tokens": 1, "kv_transfer_params": params})


def _engine(backend: Backend) -> dict[str, Any]:
    return {"host": backend.address.host, "control_port": backend.control_port}
