"""vLLM's requests as the connector sees them: tokens and hashes, whether their KV may be exchanged, how they ended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.request import RequestStatus

from disagg_connector.ports import FinishKind


class EngineRequest:
    """`ports.RequestView` of a vLLM request."""

    def __init__(self, request: Any, block_size: int) -> None:
        self._request = request
        self._block_size = block_size

    @property
    def id(self) -> str:
        return str(self._request.request_id)

    @property
    def num_prompt_tokens(self) -> int:
        return int(self._request.num_prompt_tokens)

    @property
    def num_tokens(self) -> int:
        return int(self._request.num_tokens)

    @property
    def num_valid_tokens(self) -> int:
        return max(0, int(self._request.num_computed_tokens) - int(self._request.num_in_flight_tokens))

    @property
    def hashes(self) -> Sequence[bytes]:
        hashes: Sequence[bytes] = self._request.block_hashes
        return hashes

    def token_ids(self, start: int, end: int) -> Sequence[int]:
        tokens: Sequence[int] = self._request.all_token_ids[start:end]
        return tokens

    def prompt_digest(self) -> bytes:
        request, count = self._request, self.num_prompt_tokens // self._block_size
        start = count * self._block_size
        parent = request.block_hashes[count - 1] if count else None
        keys, _ = kv_cache_utils.generate_block_hash_extra_keys(request, start, self.num_prompt_tokens, 0)
        tail = request.all_token_ids[start : self.num_prompt_tokens]
        return bytes(kv_cache_utils.hash_block_tokens(get_hash_fn_by_name("sha256"), parent, tail, keys))


def is_exchangeable(request: Any) -> bool:
    """Whether a request's KV may come from elsewhere, and block hashes say all about it.

    A LoRA's content is not in them. What asks for something about every prompt token (log probabilities) has to
    compute them all; vLLM does not even read its prefix cache then. A resumable prompt is not complete.
    """
    return (
        request.lora_request is None
        and request.prompt_embeds is None
        and not request.skip_reading_prefix_cache
        and not request.resumable
    )


def finish_kind(request: Any) -> FinishKind:
    """How a request ended."""
    if request.status in (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED):
        return "complete"
    # A stop string or a client that has gone: the front end aborts, what was computed is good.
    return "aborted" if request.status == RequestStatus.FINISHED_ABORTED else "other"
