"""The router's configuration: `router.json`, version 1 (docs/wire-contract.md section 5)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec

from disagg_router.http1.message import HttpLimits

DEFAULT_PATH = Path("/etc/disagg/router.json")

_Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]
_ListenPort = Annotated[int, msgspec.Meta(ge=0, le=65535)]
_Seconds = Annotated[float, msgspec.Meta(gt=0)]
_Name = Annotated[str, msgspec.Meta(min_length=1)]


class ConfigError(Exception):
    """The configuration cannot be used. The message names the file, the field and what is wrong."""


class _Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    pass


class Model(_Part, frozen=True):
    name: _Name


class Ports(_Part, frozen=True):
    """`http` and `admin` are the router's own (0 lets the system choose), the others those of every engine."""

    http: _ListenPort = 8000
    admin: _ListenPort = 8001
    engine: _Port = 8000
    control: _Port = 5700


class SessionConfig(_Part, frozen=True):
    """`keys`: request headers that name a conversation, the first that is there counts. Without any of them, `body_fields`:
    the same for fields of the body."""

    keys: tuple[Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9!#$%&'*+.^_`|~-]+$")], ...] = (
        "X-Session-Id",
    )
    body_fields: tuple[_Name, ...] = ("session_id",)


class Deadlines(_Part, frozen=True):
    """All in seconds.

    `first_byte` bounds the wait for an engine's first piece of a streamed answer, and the whole prefill leg; `idle` the
    silence between two pieces; `answer` an answer that is not streamed, which is silent until it is complete.
    """

    connect_seconds: _Seconds = 5
    first_byte_seconds: _Seconds = 60
    idle_seconds: _Seconds = 120
    answer_seconds: _Seconds = 600


class Limits(_Part, frozen=True):
    body_bytes: Annotated[int, msgspec.Meta(ge=1024)] = 32 * 1024 * 1024
    head_bytes: Annotated[int, msgspec.Meta(ge=1024)] = 65536


_Count = Annotated[int, msgspec.Meta(ge=1)]


class Overload(_Part, frozen=True):
    """How many turns this replica has under way, and who waits.

    `turns_per_engine` for each ready decode engine: two replicas let as many turns through as vLLM runs at a time on a
    large GPU by default (1024). Turns above that wait, `wait_seconds` at most, `waiting_turns` of them in all and
    `waiting_turns_per_session` of any one session.
    """

    turns_per_engine: _Count = 512
    waiting_turns: Annotated[int, msgspec.Meta(ge=0)] = 1024
    waiting_turns_per_session: _Count = 128
    wait_seconds: _Seconds = 30


class LocalPrefill(_Part, frozen=True):
    """Which turns run on decode alone. `Threshold`: those of at most `max_tokens` new tokens; `Auto`: those for which that is
    sooner, and by the threshold until that can be told."""

    max_tokens: _Count
    mode: Literal["Threshold", "Auto"] = "Threshold"


class Tls(_Part, frozen=True):
    """PEM files, read again when they change. The http port speaks HTTPS only."""

    certificate_file: _Name
    key_file: _Name


class Auth(_Part, frozen=True):
    """`api_keys_file` holds the accepted keys, one a line; it is read again when it changes."""

    api_keys_file: _Name


class Tracing(_Part, frozen=True):
    """`endpoint` is the base URL of a collector that takes OTLP over HTTP; standard OTEL_* variables complete it."""

    endpoint: Annotated[str, msgspec.Meta(pattern=r"^https?://[^/?#@\s]+(/[^?#\s]*)?$")]


class HandleSharing(_Part, frozen=True):
    """Replicas keep handles for each other (mode BidirectionalPull). `secret_dir` holds the secrets that they know each other by,
    in files `previous`, `current` and `next`; a turn waits for `ask_seconds` at most for another replica's answer."""

    secret_dir: _Name
    ask_seconds: _Seconds = 0.1


Policy = Literal["SessionAffinity", "LeastLoaded", "RoundRobin"]
Mode = Literal["BidirectionalPush", "BidirectionalPull", "Push", "Pull"]


class Config(_Part, frozen=True):
    """`mode` is that of engines that do not say theirs. `decode_retention_seconds`: how long decode engines keep a turn's
    KV for prefill to read, which they do in mode BidirectionalPull."""

    version: Literal[1]
    namespace: _Name
    name: _Name
    model: Model
    mode: Mode = "BidirectionalPush"
    policy: Policy = "SessionAffinity"
    decode_retention_seconds: _Seconds = 480
    ports: Ports = Ports()
    session: SessionConfig = SessionConfig()
    deadlines: Deadlines = Deadlines()
    limits: Limits = Limits()
    overload: Overload = Overload()
    local_prefill: LocalPrefill | None = None
    auth: Auth | None = None
    tls: Tls | None = None
    tracing: Tracing | None = None
    handles: HandleSharing | None = None

    def http_limits(self) -> HttpLimits:
        return HttpLimits(
            head_bytes=self.limits.head_bytes,
            body_bytes=self.limits.body_bytes,
            stall_seconds=float(self.deadlines.idle_seconds),
        )


def load(path: Path) -> Config:
    """Read and check the configuration. Raises ConfigError."""
    try:
        text = path.read_bytes()
    except OSError as exc:
        raise ConfigError(f"{path}: cannot be read: {exc.strerror}; give another path with --config") from exc
    return parse(text, str(path))


def parse(text: bytes, source: str) -> Config:
    """Check a configuration that came from `source`. Raises ConfigError."""
    try:
        return msgspec.json.decode(text, type=Config)
    except msgspec.ValidationError as exc:
        message, _, where = str(exc).partition(" - at ")
        field = where.strip("`").removeprefix("$").removeprefix(".") or "the document"
        raise ConfigError(f"{source}: {field}: {message}") from exc
    except msgspec.DecodeError as exc:
        raise ConfigError(f"{source}: not valid JSON: {exc}") from exc
