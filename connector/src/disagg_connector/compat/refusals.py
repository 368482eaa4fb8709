"""Why an engine must not start with this connector: everything it was not built for, or that nobody has tried.

Reads vLLM's configuration under names that all supported versions have; a version adds its own reasons. Each has
a line in docs/support-matrix.md and a test with vLLM's own configuration objects.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec
from vllm.v1.kv_cache_layout import KVCacheLayout

from disagg_connector.config import ConfigError

Reason = tuple[bool, str]
"""Whether it holds, and what to tell."""

# Not their subclasses: those have blocks that are not what their tokens say (sinks, hidden states, windows).
_FULL_ATTENTION = (FullAttentionSpec, MLAAttentionSpec)

_DATA_PARALLEL_ID = re.compile(r"_dp\d+$")


def refuse(reasons: Iterable[Reason]) -> None:
    """Raise `ConfigError` with every reason that holds."""
    told = [reason for holds, reason in reasons if holds]
    if told:
        raise ConfigError("BidirectionalPushConnector cannot run here: " + "; ".join(told))


def common_reasons(vllm_config: Any, kv_cache_config: Any) -> Iterator[Reason]:
    """Reasons that hold for every supported vLLM."""
    yield from _transfer(vllm_config.kv_transfer_config)
    yield from _prefix_cache(vllm_config)
    yield from _kv_cache_groups(kv_cache_config.kv_cache_groups)
    yield from _memory(vllm_config)
    yield from _parallelism(vllm_config.parallel_config, str(vllm_config.kv_transfer_config.engine_id))
    yield (
        vllm_config.num_prefill_lookahead_tokens > 1,
        "speculative decoding with several draft modules is not supported: their KV at a block's end depends on "
        "more than one token after it; use one module",
    )
    yield (
        vllm_config.aux_output_config.enabled,
        "routed experts cannot be returned for tokens whose KV another engine has computed; "
        "start without --enable-return-routed-experts",
    )


def _transfer(transfer: Any) -> Iterator[Reason]:
    yield (
        transfer.kv_role != "kv_both",
        f"kv_role is {transfer.kv_role!r}; both engines receive and send KV, so set 'kv_both'",
    )
    yield (
        transfer.kv_load_failure_policy != "recompute",
        "kv_load_failure_policy must be 'recompute': with 'fail' a lost transfer fails the request",
    )
    yield (
        transfer.kv_buffer_device == "cpu" and current_platform.device_type != "cpu",
        "kv_buffer_device 'cpu' (staging through host memory) is not supported; leave it unset",
    )


def _prefix_cache(vllm_config: Any) -> Iterator[Reason]:
    cache = vllm_config.cache_config
    yield (
        not cache.enable_prefix_caching,
        "prefix caching is off, so write-back is refused: what decode writes back is found by the prefix cache "
        "alone; start without --no-enable-prefix-caching, or use another kvTransfer mode",
    )
    yield (
        cache.prefix_caching_hash_algo != "sha256",
        f"prefix_caching_hash_algo is {cache.prefix_caching_hash_algo!r}; blocks are exchanged by hash, so it must "
        "be the same everywhere and free of collisions; start with --prefix-caching-hash-algo sha256",
    )
    yield (
        cache.prefix_match_unit not in (None, cache.block_size),
        f"prefix_match_unit is {cache.prefix_match_unit}, so block hashes are not of whole blocks of "
        f"{cache.block_size} tokens; leave it unset",
    )


def _kv_cache_groups(groups: Any) -> Iterator[Reason]:
    yield (
        len(groups) != 1,
        f"the model has {len(groups)} KV cache groups (hybrid, sliding window or Mamba layers); only models with "
        "one group of full attention are supported",
    )
    if len(groups) != 1:
        return
    spec = groups[0].kv_cache_spec
    yield (
        type(spec) not in _FULL_ATTENTION,
        f"the model's KV cache is {type(spec).__name__}; only full attention is supported",
    )
    yield (
        getattr(spec, "sliding_window", None) is not None
        or getattr(spec, "attention_chunk_size", None) is not None,
        "the model has layers with a sliding window or chunked attention, kept as full attention; "
        "this has not been tried",
    )


def _memory(vllm_config: Any) -> Iterator[Reason]:
    layout = vllm_config.cache_config.kv_cache_layout
    yield (
        layout is not None and not _blocks_are_whole(layout),
        f"the KV cache layout is {layout}: a layer's share of a block is not one piece of memory of its own "
        "(cross-layer or packed blocks); unset VLLM_KV_CACHE_LAYOUT",
    )
    yield (
        vllm_config.model_config.enable_sleep_mode,
        "sleep mode is on: waking up gives the KV cache other memory than NIXL has registered, and a peer would "
        "write into what is no longer ours; start without --enable-sleep-mode",
    )
    yield (
        vllm_config.attention_config.hisparse_config is not None,
        "HiSparse keeps part of the KV cache in host memory, which is not exchanged",
    )


def _blocks_are_whole(layout: str) -> bool:
    order = KVCacheLayout[layout]
    return bool(order.is_layer_compact and order.is_block_compact)


def _parallelism(parallel: Any, engine_id: str) -> Iterator[Reason]:
    yield (
        parallel.pipeline_parallel_size > 1,
        "pipeline parallelism is not supported; use tensor parallelism",
    )
    yield (
        parallel.decode_context_parallel_size > 1,
        "decode context parallelism is not supported; use tensor parallelism",
    )
    yield (
        parallel.prefill_context_parallel_size > 1,
        "prefill context parallelism is not supported; use tensor parallelism",
    )
    # An engine of a dense model no longer has its size when it is told its rank; its id shows it.
    yield (
        parallel.data_parallel_size > 1 or _DATA_PARALLEL_ID.search(engine_id) is not None,
        "data parallelism is not supported: an address names one engine, and the two legs of a turn would meet "
        "different ones; run more replicas with --data-parallel-size 1",
    )
