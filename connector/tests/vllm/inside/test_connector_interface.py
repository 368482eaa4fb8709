"""The connector implements this vLLM's interface: a hook that comes, goes or changes is noticed here."""

from __future__ import annotations

import inspect
import os
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA

from disagg_connector.connector import BidirectionalPushConnector

# What is left as vLLM has it, and why that is right.
LEFT = {
    # Called by or calling what we implement.
    "bind_kv_cache_manager", "clear_connector_metadata", "finish_forward", "has_connector_metadata", "role",
    "set_xfer_handshake_metadata", "get_finished", "get_finished_count", "request_finished",
    # Nothing is loaded or saved inside a step, or with the host's help.
    "get_block_ids_with_load_errors", "set_host_xfer_buffer_ops", "requires_piecewise_for_cudagraph",
    "reset_capture_state",
    # Blocks that are still needed are pinned, so neither a preemption nor an end waits for us.
    "handle_preemptions", "has_pending_block_frees", "requires_kv_delivery",
    # One group, no partial tails, all loads from one kind of source.
    "register_finished_partial_tail", "supports_divergent_local_hybrid_hits", "get_external_cache_hit_sources",
    # Events of the blocks that are published go through vLLM's own queue.
    "get_kv_connector_kv_cache_events", "take_events",
    # Memory is vLLM's.
    "get_mem_pool_context",
}  # fmt: skip
LEFT_IN = {
    "0.32": set[str](),
    # Sleep mode is refused, so nothing is ever unregistered.
    "0.33": {"unregister_kv_caches", "restore_kv_caches"},
}
# Hooks that a later vLLM asks for.
AHEAD = {"0.32": {"supports_sleep_mode"}, "0.33": set[str]()}

SERIES = os.environ["DISAGG_TEST_VLLM"]
THEIRS = {
    name for base in (KVConnectorBase_V1, SupportsHMA) for name in dir(base) if not name.startswith("_")
}
OURS = {name for name in vars(BidirectionalPushConnector) if not name.startswith("_")}


def test_every_hook_is_implemented_or_left_on_purpose() -> None:
    assert LEFT | LEFT_IN[SERIES] == THEIRS - OURS


def test_no_hook_is_implemented_that_nobody_calls() -> None:
    assert AHEAD[SERIES] == OURS - THEIRS


def parameters(function: Any) -> list[tuple[str, Any]]:
    return [(each.name, each.kind) for each in inspect.signature(function).parameters.values()]


@pytest.mark.parametrize("name", sorted(OURS & THEIRS))
def test_a_hook_takes_what_vllm_gives(name: str) -> None:
    base = KVConnectorBase_V1 if hasattr(KVConnectorBase_V1, name) else SupportsHMA
    theirs, ours = getattr(base, name), getattr(BidirectionalPushConnector, name)
    if callable(theirs):
        assert parameters(ours) == parameters(theirs)
