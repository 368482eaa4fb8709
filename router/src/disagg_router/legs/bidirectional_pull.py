"""BidirectionalPull, vLLM's NixlConnector with `bidirectional_kv_xfer`. Pure.

As Pull, and prefill may read from decode what decode made in the turn before: decode's answer says where it lies, and the
router gives that to prefill with the next turn (`handles`). vLLM 0.32 says it in answers that are not streamed only.
"""

from __future__ import annotations

from disagg_router.legs.body import Body, prompt_only, with_params
from disagg_router.legs.handback import asks_for_tokens, with_tokens
from disagg_router.legs.mode import Pair, Params
from disagg_router.legs.pull import Pull
from disagg_router.legs.upstream import ASK_PREFILL


class BidirectionalPull(Pull):
    hands_back = True

    def prefill_leg(self, body: Body, pair: Pair, held: Params | None = None) -> bytes:
        return prompt_only(body, ASK_PREFILL if held is None else held)

    def decode_leg(self, body: Body, params: Params) -> bytes:
        """The tokens of the answer say what the KV that is handed back belongs to."""
        return with_params(with_tokens(body) if asks_for_tokens(body) else body, params)
