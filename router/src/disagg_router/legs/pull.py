"""Pull, vLLM's NixlConnector: prefill computes and keeps the prompt's KV, then decode reads it. Pure.

Decode has to be told prefill's block ids, so its leg waits for prefill's answer.
"""

from __future__ import annotations

from disagg_router.legs.body import Body, prompt_only, with_params
from disagg_router.legs.mode import Pair, Params, Stateless
from disagg_router.legs.upstream import ASK_PREFILL, located, why_local


class Pull(Stateless):
    def why_local(self, body: Body) -> str | None:
        return why_local(body)

    def beforehand(self, pair: Pair) -> None:
        return None

    def prefill_leg(self, body: Body, pair: Pair, held: Params | None = None) -> bytes:
        return prompt_only(body, ASK_PREFILL)

    def heard(self, pair: Pair, answer: bytes, told: Params | None) -> Params:
        raw, _ = located(answer, "pull")
        return raw

    def decode_leg(self, body: Body, params: Params) -> bytes:
        return with_params(body, params)

    def dismissal(self, turn: str) -> None:
        """There is none: prefill's lease ends it."""
