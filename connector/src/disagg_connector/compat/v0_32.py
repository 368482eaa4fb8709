"""Private names of vLLM 0.32.x, gathered from the modules of this package that use them.

Public connector API (`kv_connector/v1/base.py`, `metrics.py`) is used where it is needed; what is in here may
change with any release. A version that differs replaces the names that do (`v0_33`).
"""

from __future__ import annotations

from typing import Any

from disagg_connector.compat.engine import find_waker, watch_engine
from disagg_connector.compat.identity import fingerprint, own_address, own_peer, read_checkpoint, sharding
from disagg_connector.compat.nixl import NixlMetrics, NixlStats, NixlTransport, SideChannel, kv_cache_layout
from disagg_connector.compat.pool import EnginePool, on_cache_reset
from disagg_connector.compat.refusals import common_reasons, refuse
from disagg_connector.compat.request import EngineRequest, finish_kind, is_exchangeable

__all__ = [
    "EnginePool",
    "EngineRequest",
    "NixlMetrics",
    "NixlStats",
    "NixlTransport",
    "SideChannel",
    "check_engine",
    "find_waker",
    "fingerprint",
    "finish_kind",
    "is_exchangeable",
    "kv_cache_layout",
    "on_cache_reset",
    "own_address",
    "own_peer",
    "read_checkpoint",
    "sharding",
    "watch_engine",
]


def check_engine(vllm_config: Any, kv_cache_config: Any) -> None:
    """Raise `ConfigError` with every reason why this engine cannot run the connector."""
    refuse(common_reasons(vllm_config, kv_cache_config))
