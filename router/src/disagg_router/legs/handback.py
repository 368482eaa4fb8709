"""KV that decode keeps after a turn for prefill to read: what of decode's answer names it, and which prompts continue it.

Prefill takes decode's blocks for the first tokens of its prompt without comparing anything, and what it computes on them
enters its prefix cache. So they may be offered only for a prompt that begins with exactly the tokens they were made of.
Texts do not show that: a client may leave out reasoning between turns, templates do so too, and the tokens of a text that a
model wrote need not be those that it wrote. Pure.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from disagg_router.legs.body import PATHS, Body, Endpoint, prompt_only
from disagg_router.legs.upstream import read


@dataclass(frozen=True, slots=True)
class Handback:
    """KV of a prompt and its answer, as decode names it in `params`: of `tokens` tokens, which `digest` stands for, in `blocks`
    blocks (0 if a replica of an earlier version has kept it)."""

    params: msgspec.Raw
    tokens: int
    digest: bytes
    blocks: int = 0

    @property
    def size(self) -> int:
        """Of `params`, in bytes: the rest is small."""
        return memoryview(self.params).nbytes


def asks_for_tokens(body: Body) -> bool:
    """Whether decode's answer to this body can be handed back.

    Not if it is streamed; nor with `echo`, whose text the option for tokens changes; nor if there are images or the like
    in it, which tokens only hold a place for.
    """
    return not body.streamed and not body.on("echo") and not body.batched and body.text_only


def with_tokens(body: Body) -> Body:
    """The body with vLLM's option that makes the answer tell its tokens."""
    return Body({**body.fields, "return_token_ids": msgspec.Raw(b"true")}, body.endpoint)


def split(body: Body, answer: bytes) -> tuple[bytes, Handback | None]:
    """Decode's answer for the client, without what the client did not ask for, and what decode hands back."""
    try:
        fields = _fields.decode(answer)
        choices = _choices.decode(fields["choices"])
        params = fields.get("kv_transfer_params", _NULL)
        prompt = fields.get("prompt_token_ids", _NULL)
        if bytes(prompt) == b"null" and choices:
            prompt = choices[0].get("prompt_token_ids", _NULL)
        output = choices[0].get("token_ids", _NULL) if choices else _NULL
    except (msgspec.DecodeError, KeyError, RecursionError):
        return answer, None  # no answer that a model made
    if "kv_transfer_params" in fields:
        fields["kv_transfer_params"] = _NULL
    if not body.on("return_token_ids"):
        for part in (fields, *choices):
            part.update({name: _NULL for name in ("prompt_token_ids", "token_ids") if name in part})
    fields["choices"] = msgspec.Raw(msgspec.json.encode(choices))
    handback = _handback(params, prompt, output) if len(choices) == 1 else None
    return msgspec.json.encode(fields), handback


def _handback(params: msgspec.Raw, prompt: msgspec.Raw, output: msgspec.Raw) -> Handback | None:
    try:
        found = read(params)
        tokens = [*_ids.decode(prompt), *_ids.decode(output)]
    except (msgspec.DecodeError, RecursionError):
        return None
    named = found.do_remote_decode and found.transfer_mode == "pull" and any(found.remote_block_ids)
    if not named or not 0 < found.remote_num_tokens <= len(tokens):
        return None
    count = found.remote_num_tokens
    blocks = {block for group in found.remote_block_ids for block in group}
    # A copy: `params` is a part of the whole answer, and would keep that in memory.
    return Handback(params.copy(), count, digest(tokens[:count]), len(blocks))


def continues(handback: Handback, prompt: Sequence[int]) -> bool:
    """Whether a prompt begins with the tokens of the KV, and goes on."""
    return len(prompt) > handback.tokens and digest(prompt[: handback.tokens]) == handback.digest


def digest(tokens: Sequence[int]) -> bytes:
    return hashlib.blake2b(array("q", tokens).tobytes(), digest_size=16).digest()


def prompt_in(body: Body) -> list[int] | None:
    """The prompt's tokens if the body has them itself."""
    try:
        return _ids.decode(body.fields["prompt"]) if "messages" not in body.fields else None
    except (KeyError, msgspec.DecodeError, RecursionError):
        return None


def render_path(endpoint: Endpoint) -> str:
    """Where an engine tells the tokens of a body's prompt (`vllm serve --enable-scale-out`)."""
    return f"{PATHS[endpoint]}/render"


def render_body(body: Body) -> bytes:
    return prompt_only(body, _NULL)


def rendered(answer: bytes) -> list[int] | None:
    """The tokens, by the engine's answer; None if they are not those of one prompt that is all text."""
    try:
        said: Any = msgspec.json.decode(answer, type=_Rendered | list[_Rendered])
    except (msgspec.DecodeError, RecursionError):
        return None
    prompts = said if isinstance(said, list) else [said]
    if len(prompts) != 1 or prompts[0].features is not None:
        return None
    tokens: list[int] = prompts[0].token_ids
    return tokens


class _Rendered(msgspec.Struct):
    token_ids: list[int]
    features: Any = None


_NULL = msgspec.Raw(b"null")
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_choices = msgspec.json.Decoder(list[dict[str, msgspec.Raw]])
_ids = msgspec.json.Decoder(list[Annotated[int, msgspec.Meta(ge=0, lt=2**31)]])
