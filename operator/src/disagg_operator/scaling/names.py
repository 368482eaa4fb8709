"""Names of the samples that the load is read from: vLLM's, the connector's (docs/wire-contract.md, section 2) and the router's
(docs/router.md, "Metrics"). Pure data.

A name that ends as counters and histograms do is one of something that only grows; the others are of something that is so now.
"""

from collections.abc import Mapping

from ..naming import Component

PROMPT_TOKENS = "vllm:prompt_tokens_by_source_total"
COMPUTED, CACHED, TRANSFERRED = "local_compute", "local_cache_hit", "external_kv_transfer"
"""Values of its label `source`."""
PREFILL_SECONDS = "vllm:request_prefill_time_seconds_sum"
PREFILLS = "vllm:request_prefill_time_seconds_count"
RUNNING = "vllm:num_requests_running"
WAITING = "vllm:num_requests_waiting"
WAITING_BY_REASON = "vllm:num_requests_waiting_by_reason"
CAPACITY = "capacity"
"""Value of its label `reason` for requests that lack a place; the others wait for KV that is on its way."""
KV_USAGE = "vllm:kv_cache_usage_perc"
"""A share between 0 and 1, whatever its name says."""
CACHE_CONFIG = "vllm:cache_config_info"
BETWEEN_TOKENS = "vllm:inter_token_latency_seconds_bucket"
READ_SECONDS = "vllm:nixl_xfer_time_seconds_sum"
"""Of the engine that reads, in mode BidirectionalPull."""
FAILED_TRANSFERS = "vllm:nixl_num_failed_transfers_total"
EXPIRED = "vllm:nixl_num_kv_expired_reqs_total"

INSERTED = "disagg_kv_writeback_inserted_tokens_total"
HITS = "disagg_kv_writeback_hit_tokens_total"
ABORTED = "disagg_kv_writeback_aborted_total"
RECOMPUTED = "disagg_kv_recomputed_requests_total"
PUSHED = "disagg_kv_push_tokens_total"
WRITE_SECONDS = "disagg_kv_write_seconds_sum"
TO_PREFILL = "decode_to_prefill"
"""Value of the last two's label `direction`."""

DECISIONS = "disagg_router_prefill_decisions_total"
WAITING_TURNS = "disagg_router_waiting_turns"
FIRST_BYTE = "disagg_router_time_to_first_byte_seconds_bucket"
RETAINED = "disagg_router_retained_kv_blocks"

NAMES: Mapping[Component, frozenset[str]] = {
    Component.PREFILL: frozenset(
        {
            PROMPT_TOKENS,
            PREFILL_SECONDS,
            PREFILLS,
            WAITING,
            WAITING_BY_REASON,
            READ_SECONDS,
            FAILED_TRANSFERS,
            EXPIRED,
            INSERTED,
            HITS,
            ABORTED,
            RECOMPUTED,
        }
    ),
    Component.DECODE: frozenset(
        {
            RUNNING,
            WAITING,
            WAITING_BY_REASON,
            KV_USAGE,
            CACHE_CONFIG,
            BETWEEN_TOKENS,
            FAILED_TRANSFERS,
            EXPIRED,
            RECOMPUTED,
            PUSHED,
            WRITE_SECONDS,
        }
    ),
    Component.ROUTER: frozenset({DECISIONS, WAITING_TURNS, FIRST_BYTE, RETAINED}),
}
"""What is read of each component's pods."""

REQUIRED: Mapping[Component, frozenset[str]] = {
    Component.PREFILL: frozenset({PROMPT_TOKENS, PREFILLS, WAITING}),
    Component.DECODE: frozenset({RUNNING, WAITING, KV_USAGE}),
    Component.ROUTER: frozenset({WAITING_TURNS}),
}
"""Of these, what is on every page from a pod's start on. The others come with their first count, or with a mode."""


def counts(name: str) -> bool:
    """Whether it is the name of something that only grows."""
    return name.endswith(("_total", "_sum", "_count", "_bucket"))
