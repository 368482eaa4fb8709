"""The ways to serve a turn that are compared: which connector the engines run, and which requests a turn is.

`Pull`, `BidirectionalPull` and `Push` are upstream's (`NixlConnector`, `NixlPushConnector`), driven as upstream's own
proxies do. `BidirectionalPush` is this repository's, driven as its router does (docs/wire-contract.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from e2e.engines import KVTransferConfig, Ports

Protocol = Literal["plain", "pull", "bidirectional_pull", "push", "disagg"]
Role = Literal["prefill", "decode"]

_UPSTREAM_ROLES: Mapping[Role, str] = {"prefill": "kv_producer", "decode": "kv_consumer"}
TRACED = ("bench.gpu.tracing", "TracingConnector")


@dataclass(frozen=True)
class Mode:
    """One row of the table."""

    name: str
    title: str
    protocol: Protocol
    prefill_caching: bool = True
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Of the connector's extra config, on both engines."""
    graphs: bool = False
    """Whether decode steps are replayed as CUDA graphs; else every kernel is launched anew."""

    @property
    def roles(self) -> tuple[Role, ...]:
        """The engines it needs; a single one is a whole server."""
        return ("decode",) if self.protocol == "plain" else ("prefill", "decode")

    def caches_prefixes(self, role: Role) -> bool:
        return self.prefill_caching or role == "decode"

    def transfer(self, role: Role, connector: tuple[str, str]) -> KVTransferConfig | None:
        """The `--kv-transfer-config` of an engine; `connector` is module and class of BidirectionalPush."""
        match self.protocol:
            case "plain":
                return None
            case "pull":
                return {"kv_connector": "NixlConnector", "kv_role": _UPSTREAM_ROLES[role]}
            case "bidirectional_pull":
                extra = {"bidirectional_kv_xfer": True, **self.extra}
                return {
                    "kv_connector": "NixlConnector",
                    "kv_role": "kv_both",
                    "kv_connector_extra_config": extra,
                }
            case "push":
                names = {"kv_connector": "NixlPushConnector", "kv_role": _UPSTREAM_ROLES[role]}
                return {**names, "engine_id": upstream_id(role)}
            case "disagg":
                return lambda ports: self._disagg(role, connector, ports)

    def _disagg(self, role: Role, connector: tuple[str, str], ports: Ports) -> Mapping[str, Any]:
        module, name = connector
        return {
            "kv_connector": name,
            "kv_connector_module_path": module,
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"role": role, "control_port": ports.control, **self.extra},
        }


def upstream_id(role: Role) -> str:
    """The engine id that upstream's push needs to be known beforehand."""
    return f"bench-{role}"


MODES = (
    Mode("pull_cache_off", "Pull, prefill's prefix cache off", "pull", prefill_caching=False),
    Mode("pull", "Pull", "pull"),
    Mode("bidirectional_pull", "BidirectionalPull", "bidirectional_pull"),
    Mode("push", "Push (upstream)", "push"),
    Mode("writeback_off", "BidirectionalPush, on demand only", "disagg", extra={"writeback_mode": "off"}),
    Mode("on_finish", "BidirectionalPush, OnFinish", "disagg"),
    Mode("streaming", "BidirectionalPush, Streaming", "disagg", extra={"writeback_mode": "streaming"}),
    Mode(
        "on_finish_no_wait",
        "BidirectionalPush, OnFinish, prefill never waits",
        "disagg",
        extra={"max_wait_milliseconds": 0},
    ),
    Mode(
        "streaming_no_wait",
        "BidirectionalPush, Streaming, prefill never waits",
        "disagg",
        extra={"writeback_mode": "streaming", "max_wait_milliseconds": 0},
    ),
    Mode("on_finish_graphs", "BidirectionalPush, OnFinish, CUDA graphs", "disagg", graphs=True),
    Mode("colocated", "one engine, no P/D", "plain"),
)
