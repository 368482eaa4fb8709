"""What vLLM's own connectors answer: `kv_transfer_params` with block ids, checked before an engine gets them. Pure.

The check is strict because an engine is not: a missing field ends vLLM 0.32's engine process, and blocks of another
connector's engine would be read as if they were the prompt's. What passes is handed on as the JSON that the engine wrote.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from disagg_router.legs.body import Body
from disagg_router.legs.mode import UnusableAnswerError

ASK_PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}
"""The parameters of a prefill leg that reads nothing from decode."""

_Name = Annotated[str, msgspec.Meta(min_length=1)]
_Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]
_Size = Annotated[int, msgspec.Meta(ge=1)]


class Located(msgspec.Struct, frozen=True):
    """KV that an engine keeps, and where."""

    do_remote_prefill: bool
    do_remote_decode: bool
    remote_block_ids: list[list[int]]
    remote_engine_id: _Name
    remote_request_id: _Name
    remote_host: _Name
    remote_port: _Port
    tp_size: _Size
    transfer_mode: Literal["pull", "push"]
    remote_num_tokens: int = 0
    dcp_size: _Size = 1
    pp_size: _Size = 1


class _Answer(msgspec.Struct):
    kv_transfer_params: msgspec.Raw = msgspec.Raw(b"null")


_answer = msgspec.json.Decoder(_Answer)
_located = msgspec.json.Decoder(Located)


def located(answer: bytes, transfer: Literal["pull", "push"]) -> tuple[msgspec.Raw, Located]:
    """The prompt's KV by prefill's answer, as it is written there and as it is read. Raises UnusableAnswerError."""
    try:
        raw = _answer.decode(answer).kv_transfer_params
        found = read(raw)
    except (msgspec.DecodeError, RecursionError) as exc:
        raise UnusableAnswerError(f"prefill's answer does not say where the prompt's KV is: {exc}") from None
    if found.transfer_mode != transfer or not found.do_remote_prefill or not any(found.remote_block_ids):
        raise UnusableAnswerError(f"prefill's answer offers no KV to {transfer}")
    return raw, found


def read(raw: msgspec.Raw) -> Located:
    """Raises msgspec.DecodeError or RecursionError."""
    return _located.decode(raw)


def why_local(body: Body) -> str | None:
    """Why decode has to compute this prompt itself.

    - `batched_prompts`: of several prompts in one request prefill's answer locates the first one's KV only, and decode
      would take it for that of all.
    - `responses`: nobody has tried how vLLM's connectors take the ids of /v1/responses, and answers of that shape would
      show where decode keeps its KV.
    """
    if body.endpoint == "responses":
        return "responses"
    return "batched_prompts" if body.batched else None
