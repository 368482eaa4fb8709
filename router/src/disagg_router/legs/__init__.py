"""The two requests that one turn becomes. Pure.

The decode leg is the client's body as it came; the prefill leg is the same prompt with everything that concerns the
output taken off, because prefill makes exactly one token and nobody reads it. Both carry the router's own
`kv_transfer_params`, which the transfer mode decides; those of the client never reach an engine, since malformed ones
can stop it and well-formed ones can read another's blocks.
"""

from collections.abc import Callable, Mapping

from disagg_router.legs.bidirectional_pull import BidirectionalPull
from disagg_router.legs.bidirectional_push import WIRE_VERSION, BidirectionalPush
from disagg_router.legs.body import (
    PATHS,
    BadBodyError,
    Body,
    Endpoint,
    local_leg,
    parse,
    prompt_tokens,
    why_local,
    why_refused,
)
from disagg_router.legs.mode import Mode, Pair, Params, UnusableAnswerError
from disagg_router.legs.pull import Pull
from disagg_router.legs.push import Push

MODES: Mapping[str, Callable[[], Mode]] = {
    "BidirectionalPush": BidirectionalPush,
    "BidirectionalPull": BidirectionalPull,
    "Push": Push,
    "Pull": Pull,
}
"""What makes a mode, by the name that the configuration has for it."""

__all__ = [
    "MODES",
    "PATHS",
    "WIRE_VERSION",
    "BadBodyError",
    "BidirectionalPull",
    "BidirectionalPush",
    "Body",
    "Endpoint",
    "Mode",
    "Pair",
    "Params",
    "Pull",
    "Push",
    "UnusableAnswerError",
    "local_leg",
    "parse",
    "prompt_tokens",
    "why_local",
    "why_refused",
]
