"""The part of the spec about KV cache in motion: `kvTransfer`."""

from enum import StrEnum
from typing import Annotated, Any, ClassVar

from pydantic import Field

from .base import ApiObject, Rule, list_type, validations

DEFAULT_RETENTION_SECONDS = 480


class TransferMode(StrEnum):
    """Who moves KV, and in which directions."""

    BIDIRECTIONAL_PUSH = "BidirectionalPush"
    BIDIRECTIONAL_PULL = "BidirectionalPull"
    PUSH = "Push"
    PULL = "Pull"


class TransferBackend(StrEnum):
    """The NIXL backend."""

    AUTO = "Auto"
    LIBFABRIC = "Libfabric"
    UCX = "UCX"


class LoadFailurePolicy(StrEnum):
    """What becomes of a turn whose KV did not arrive."""

    RECOMPUTE = "Recompute"
    FAIL = "Fail"


class WriteBackMode(StrEnum):
    """When decode gives the turn's KV back to prefill."""

    ON_FINISH = "OnFinish"
    STREAMING = "Streaming"
    DISABLED = "Disabled"


class WriteBack(ApiObject):
    """How decode writes the KV of a turn back to prefill."""

    mode: Annotated[
        WriteBackMode,
        Field(
            description="OnFinish: at the end of the turn. Streaming: while decode generates, so that the end of the "
            "turn moves only what is left. Disabled: never; a later turn is computed or asked for."
        ),
    ] = WriteBackMode.ON_FINISH
    reserve_blocks: Annotated[
        int,
        Field(
            ge=0,
            le=1_000_000,
            description="KV blocks that prefill keeps aside for landing. 0: taken from the free ones when needed.",
        ),
    ] = 0
    min_free_percent: Annotated[
        int,
        Field(
            ge=0,
            le=90,
            description="Prefill takes no written-back blocks when less of its KV cache than this is free.",
        ),
    ] = 10
    max_wait_milliseconds: Annotated[
        int,
        Field(
            ge=0,
            le=60_000,
            description="How long prefill waits for blocks that it asked decode for, before it computes them. 0: it "
            "does not ask.",
        ),
    ] = 1000


_TEXT = {"type": "string"}
_INTEGER = {"type": "integer"}
_BOOLEAN = {"type": "boolean"}
_TEXTS = {"type": "array", "items": _TEXT, "maxItems": 8, **list_type("atomic")}

# Keys of vLLM's kv_connector_extra_config that the operator renders, with their schema and what to do instead. They are
# declared as properties so that CEL can see them in an otherwise open object.
RESERVED_EXTRA_CONFIG: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("backends", _TEXTS, "set kvTransfer.backend"),
    ("bidirectional_kv_xfer", _BOOLEAN, "set kvTransfer.mode"),
    ("control_port", _INTEGER, "the connector always listens on 5700"),
    ("control_secret_dir", _TEXT, "the operator makes the secret and mounts it"),
    ("decoder_kv_blocks_ttl", _INTEGER, "set kvTransfer.decodeRetentionSeconds"),
    ("enforce_handshake_compat", _BOOLEAN, "the check is always on: KV of another layout gives wrong text"),
    ("kv_lease_duration", _INTEGER, "set kvTransfer.leaseSeconds"),
    ("max_wait_milliseconds", _INTEGER, "set kvTransfer.writeBack.maxWaitMilliseconds"),
    ("role", _TEXT, "it follows from the pool"),
    ("writeback_min_free_percent", _INTEGER, "set kvTransfer.writeBack.minFreePercent"),
    ("writeback_mode", _TEXT, "set kvTransfer.writeBack.mode"),
    ("writeback_reserve_blocks", _INTEGER, "set kvTransfer.writeBack.reserveBlocks"),
)

ExtraConfig = Annotated[
    dict[str, Any],
    Field(
        json_schema_extra={
            "x-kubernetes-preserve-unknown-fields": True,
            "properties": {
                key: {**schema, "description": f"Refused: {instead}."}
                for key, schema, instead in RESERVED_EXTRA_CONFIG
            },
        }
        | validations(
            Rule(f"!has(self.{key})", f"extraConfig may not contain {key}: {instead}", f".{key}")
            for key, _, instead in RESERVED_EXTRA_CONFIG
        )
    ),
]


class KVTransfer(ApiObject):
    """How KV cache moves between prefill and decode."""

    mode: Annotated[
        TransferMode,
        Field(
            description="BidirectionalPush: prefill pushes a prompt's KV to decode, decode pushes a turn's KV back. "
            "The others are vLLM's own connectors. Pull: decode reads a prompt's KV from prefill. BidirectionalPull: and prefill "
            "reads a turn's KV from decode, after turns that are not streamed. Push: prefill writes a prompt's KV to decode."
        ),
    ] = TransferMode.BIDIRECTIONAL_PUSH
    backend: Annotated[
        TransferBackend,
        Field(
            description="NIXL backend. Auto: Libfabric with fabric.type EFA, else UCX. UCX on EFA nodes falls back to "
            "TCP without an error and is far slower."
        ),
    ] = TransferBackend.AUTO
    load_failure_policy: Annotated[
        LoadFailurePolicy,
        Field(
            description="What becomes of a turn whose KV does not arrive. Recompute: decode computes the prompt itself. Fail (the "
            "request fails) is not implemented yet."
        ),
    ] = LoadFailurePolicy.RECOMPUTE
    lease_seconds: Annotated[
        int,
        Field(
            ge=10,
            le=3600,
            description="How long prefill keeps the KV of a prompt for decode, and how long decode waits for it before it "
            "computes the prompt itself. It must cover the time that a request can wait on either side.",
        ),
    ] = 120
    decode_retention_seconds: Annotated[
        int | None,
        Field(
            ge=10,
            le=86_400,
            description=f"How long decode keeps a turn's KV for prefill to read; {DEFAULT_RETENTION_SECONDS} if absent. Only with "
            "mode BidirectionalPull. At least four times router.deadlines.firstByteSeconds.",
        ),
    ] = None
    write_back: Annotated[
        WriteBack | None,
        Field(
            description="How decode writes a turn's KV back; on at the end of each turn if absent. Only with mode "
            "BidirectionalPush."
        ),
    ] = None
    extra_config: Annotated[
        ExtraConfig,
        Field(
            description="Further keys of vLLM's kv_connector_extra_config, merged last. Keys that have a field here are "
            "refused."
        ),
    ] = Field(default_factory=dict)

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "!has(self.writeBack) || self.mode == 'BidirectionalPush'",
            "kvTransfer.writeBack only applies to mode BidirectionalPush: remove it or change the mode",
            ".writeBack",
        ),
        Rule(
            "!has(self.decodeRetentionSeconds) || self.mode == 'BidirectionalPull'",
            "kvTransfer.decodeRetentionSeconds only applies to mode BidirectionalPull; pushed KV is not retained: remove it",
            ".decodeRetentionSeconds",
        ),
    )

    @property
    def effective_write_back(self) -> WriteBack | None:
        """Write-back's settings if the mode has one, with defaults."""
        if self.mode is not TransferMode.BIDIRECTIONAL_PUSH:
            return None
        return self.write_back or WriteBack()

    @property
    def effective_decode_retention_seconds(self) -> int | None:
        """How long decode retains KV, if the mode retains any."""
        if self.mode is not TransferMode.BIDIRECTIONAL_PULL:
            return None
        return self.decode_retention_seconds or DEFAULT_RETENTION_SECONDS
