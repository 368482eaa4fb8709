"""Push, vLLM's NixlPushConnector: decode registers its blocks with prefill, which writes the prompt's KV into them. Pure.

The legs are joined by their request id. Decode has to know prefill's engine id, which vLLM makes anew at every start,
where it listens and how it is split; prefill's answers say all that. So the first turn at a prefill engine waits for its
answer, and from then on both legs go out at once, until that engine fails or is away.

A registration that prefill does not fulfil keeps decode's blocks for as long as decode lives (vLLM 0.32 gives them back on
prefill's word alone). Therefore a prefill leg is not given up once decode was told of it.
"""

from __future__ import annotations

from collections.abc import Iterable

from disagg_router.backends import Backend
from disagg_router.http1.message import Address
from disagg_router.legs.body import Body, prompt_only, with_params
from disagg_router.legs.mode import Pair, Params, UnusableAnswerError
from disagg_router.legs.upstream import ASK_PREFILL, Located, located, why_local

_Engine = tuple[str, Address]


class Push:
    hands_back = False
    asks_holder = False
    finishes_prefill = True

    def __init__(self) -> None:
        self._known: dict[_Engine, Params] = {}

    def why_local(self, body: Body) -> str | None:
        return why_local(body)

    def beforehand(self, pair: Pair) -> Params | None:
        return self._known.get(_key(pair.prefill))

    def prefill_leg(self, body: Body, pair: Pair, held: Params | None = None) -> bytes:
        return prompt_only(body, ASK_PREFILL)

    def heard(self, pair: Pair, answer: bytes, told: Params | None) -> Params:
        raw, found = located(answer, "push")
        engine = _identity(found)
        self._known[_key(pair.prefill)] = engine
        if told is not None and told != engine:
            raise UnusableAnswerError(
                f"decode was told of an earlier start of prefill {pair.prefill.name}: it has registered in vain"
            )
        return raw

    def failed(self, prefill: Backend) -> None:
        self._known.pop(_key(prefill), None)

    def decode_leg(self, body: Body, params: Params) -> bytes:
        return with_params(body, params)

    def dismissal(self, turn: str) -> None:
        """There is none: prefill's lease ends it."""

    def engines(self, backends: Iterable[Backend]) -> None:
        """An engine that was away may have started anew."""
        there = {_key(backend) for backend in backends if backend.takes_turns}
        self._known = {key: engine for key, engine in self._known.items() if key in there}


def _key(backend: Backend) -> _Engine:
    return backend.name, backend.address


def _identity(found: Located) -> Params:
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": found.remote_engine_id,
        "remote_host": found.remote_host,
        "remote_port": found.remote_port,
        "tp_size": found.tp_size,
        "dcp_size": found.dcp_size,
        "pp_size": found.pp_size,
        # A push matches the legs by their own ids, but vLLM's engine ends itself if this is not there.
        "remote_request_id": "-",
    }
