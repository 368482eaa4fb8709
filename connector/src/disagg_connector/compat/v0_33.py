"""Private names of vLLM 0.33.x: those of 0.32.x, but for what is below."""

from __future__ import annotations

from typing import Any

from disagg_connector.compat.refusals import common_reasons, refuse

# All names: what is added to 0.32 for the connector to use is to be had here too.
from disagg_connector.compat.v0_32 import *  # noqa: F403


def check_engine(vllm_config: Any, kv_cache_config: Any) -> None:  # type: ignore[no-redef]
    """Raise `ConfigError` with every reason why this engine cannot run the connector."""
    lookahead = vllm_config.num_hash_lookahead_tokens
    reasons = [
        *common_reasons(vllm_config, kv_cache_config),
        (
            lookahead > 0,
            f"block hashes cover {lookahead} tokens after their block, so a turn's last block has no hash until the "
            "next turn; set disable_lookahead_block_hashes in --speculative-config",
        ),
    ]
    refuse(reasons)
