"""The connector's part of vLLM's ``kv_connector_extra_config``, typed and checked at start."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

# Keys of upstream's NIXL connector that are read by upstream's code itself and passed through.
UPSTREAM_KEYS = frozenset({"backends", "kv_lease_duration", "num_threads", "engine_ttl"})

Role = Literal["prefill", "decode"]
Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]


class ConfigError(ValueError):
    """The engine must not start with this configuration; the message says what to change."""


class ConnectorConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the operator (or a person) may set. Every key has a default but the role."""

    role: Role
    """``prefill`` computes prompts and keeps conversations, ``decode`` generates."""
    control_port: Port = 5700
    """TCP port of the control channel; the data parallel rank is added to it."""
    control_secret_dir: Annotated[str, msgspec.Meta(min_length=1)] | None = None
    """Folder with the secrets that authenticate the control channel (`keyfiles`). Without it everybody is believed."""
    kv_lease_duration: Annotated[float, msgspec.Meta(gt=0)] = 30
    """Seconds that blocks are kept for a peer that has not shown up or has gone silent."""
    writeback_mode: Literal["on_finish", "streaming", "off"] = "on_finish"
    """When decode writes a turn's KV back to prefill: at the turn's end, from its beginning on, or never."""
    writeback_batch_blocks: Annotated[int, msgspec.Meta(ge=1)] = 4
    """While a turn is streamed, so many new full blocks are waited for before prefill is offered them. What is left
    at the turn's end is less than that, and every batch costs both engines' schedulers two short messages."""
    writeback_min_free_percent: Annotated[int, msgspec.Meta(ge=0, le=100)] = 10
    """Prefill denies a write-back that would leave less of its KV blocks free than this."""
    writeback_reserve_blocks: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Blocks that prefill holds ready for write-backs even when it is short of blocks."""
    max_wait_milliseconds: Annotated[int, msgspec.Meta(ge=0)] = 1000
    """The longest that a prompt waits on prefill for KV that decode is about to bring."""
    load_timeout_seconds: Annotated[float, msgspec.Meta(gt=0)] = 60
    """The longest that a request waits on decode for its KV before it is computed locally."""

    @property
    def max_wait(self) -> float:
        """Seconds."""
        return self.max_wait_milliseconds / 1000


def parse_config(extra: Mapping[str, Any]) -> ConnectorConfig:
    """Check ``kv_connector_extra_config``.

    Raises `ConfigError` for a missing role, an unknown key or a value of the wrong kind.
    """
    ours = {k: v for k, v in extra.items() if k not in UPSTREAM_KEYS or k == "kv_lease_duration"}
    try:
        return msgspec.convert(ours, ConnectorConfig, strict=True)
    except msgspec.ValidationError as error:
        known = sorted(set(ConnectorConfig.__struct_fields__) | UPSTREAM_KEYS)
        raise ConfigError(f"kv_connector_extra_config: {error}. Known keys: {', '.join(known)}") from error


def check_reserve(config: ConnectorConfig, total: int, longest: int) -> None:
    """Raise `ConfigError` if prefill's standing reserve leaves a request no room.

    `total` are the engine's KV blocks, `longest` those that a request of the greatest length needs: it would wait
    for ever, and nothing behind it would run.
    """
    reserve = config.writeback_reserve_blocks
    if config.role == "prefill" and reserve and total - reserve < longest:
        raise ConfigError(
            f"writeback_reserve_blocks is {reserve}, which leaves a request {max(0, total - reserve)} of this "
            f"engine's {total} KV blocks; the longest needs {longest}. Set at most {max(0, total - longest)}, or a "
            "smaller --max-model-len"
        )
