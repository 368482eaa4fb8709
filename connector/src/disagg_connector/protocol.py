"""What travels between connectors, and what the router puts into a request.

Pure: msgspec only. One control message is one ZeroMQ frame holding a msgpack `Frame`. Each request
has exactly one reply. Data never travels here: KV blocks are written by NIXL.

Wire version history
    1: first version
    2: messages may be sealed (`auth`);
       every message that moves KV names the receiver's epoch, and `Peer` tells the sender's;
       `Peer.events`, and `Offer.tokens` for engines that publish KV events;
       `Offer` may leave out the beginning of its chain (`skip`);
       a write's announcement names the writing rank: `XID:RANK`
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

import msgspec

from disagg_connector.config import Port, Role
from disagg_connector.ranks import MAX_RANKS

WIRE_VERSION = 2
PARAMS_VERSION = 1

# A chain of 32-byte hashes for 200,000 blocks, with room to spare. Larger messages close the connection.
MAX_MESSAGE_BYTES = 8 * 1024 * 1024
# A million tokens.
MAX_TOKENS_BYTES = 4 * 1024 * 1024

LONGEST_ID = 256

Host = Annotated[str, msgspec.Meta(min_length=1, max_length=253)]
Id = Annotated[str, msgspec.Meta(min_length=1, max_length=LONGEST_ID)]
BlockHash = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
Count = Annotated[int, msgspec.Meta(ge=0)]
Tokens = Annotated[bytes, msgspec.Meta(max_length=MAX_TOKENS_BYTES)]

PREFILL_TO_DECODE = "prefill_to_decode"
DECODE_TO_PREFILL = "decode_to_prefill"


class Address(msgspec.Struct, frozen=True):
    """Where an engine's control channel listens."""

    host: Host
    control_port: Port

    def __str__(self) -> str:
        return f"{self.host}:{self.control_port}"


class Peer(msgspec.Struct, frozen=True):
    """An engine of one boot: everything another needs in order to write into it."""

    engine_id: Id
    """Unique per boot."""
    address: Address
    nixl_host: Host
    nixl_port: Port
    """NIXL's side channel, where the workers' memory descriptions are had."""
    tensor_parallel: Annotated[int, msgspec.Meta(ge=1, le=MAX_RANKS)]
    fingerprint: Id
    """Digest of all that makes KV interchangeable (`hashes.Fingerprint`)."""
    epoch: Count = 0
    """How often this engine's KV has become worthless since boot (`epochs`)."""
    events: bool = False
    """Whether it publishes KV events, for which it needs the tokens of the blocks that it is offered."""


# --- Requests ------------------------------------------------------------------------------------


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """Who is there? Fields of this message and of `Welcome` may be added, never changed."""

    wire: int


class Load(msgspec.Struct, frozen=True, tag="load"):
    """Decode to prefill: write this prompt's KV, from block `start` on, into these blocks of mine."""

    to: Id
    """The engine id meant; an engine that is not it refuses."""
    epoch: Count
    """The epoch that it is taken to be in; an engine in another one refuses."""
    xid: Id
    request: Id
    """The request's id less the front end's random suffix: equal on both legs of a turn."""
    sender: Peer
    prompt: BlockHash
    """Digest of the whole prompt: the legs must not have been given different ones."""
    num_tokens: Count
    start: Count
    blocks: list[Count]


class StatusItem(msgspec.Struct, frozen=True, array_like=True):
    request: Id
    xid: str
    """Empty as long as no `Load` was sent."""


class Status(msgspec.Struct, frozen=True, tag="status"):
    """Decode to prefill: how are these doing? Also renews the leases of what is named."""

    to: Id
    items: list[StatusItem]


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """Owner of blocks to the writer: do not write for `xid`. Answered only when no write for it is in
    flight or will ever start. With an empty `xid`: nobody will load `request`."""

    to: Id
    xid: str
    request: str


class Offer(msgspec.Struct, frozen=True, tag="offer"):
    """Decode to prefill: I hold the blocks `first`.. of this chain of hashes; which do you want, where?

    `first` and `Grant.start` count from the chain's beginning, also where `skip` leaves that out.
    """

    to: Id
    epoch: Count
    xid: Id
    sender: Peer
    hashes: list[BlockHash]
    first: Count
    want: str
    """The `Want` that this answers, else empty."""
    tokens: Tokens = b""
    """Token ids of the last blocks of `hashes`, each a little-endian unsigned integer of 32 bits; for a receiver
    that publishes KV events."""
    skip: Count = 0
    """Hashes left out at the chain's beginning, because prefill is taken to have those blocks and the next one."""


class Commit(msgspec.Struct, frozen=True, tag="commit"):
    """Decode to prefill: every rank has finished writing (`ok`), or will not write any more."""

    to: Id
    epoch: Count
    """Of the `Grant`."""
    xid: Id
    ok: bool
    wrote: bool
    """Whether any write was ever posted."""


class Want(msgspec.Struct, frozen=True, tag="want"):
    """Prefill to decode: offer me what you hold of this chain beyond its first `have` blocks."""

    to: Id
    epoch: Count
    xid: Id
    sender: Peer
    hashes: list[BlockHash]
    have: Count


# --- Replies -------------------------------------------------------------------------------------


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    wire: int
    role: Role
    peer: Peer
    parts: dict[str, str]
    """The fingerprint's parts, so that a mismatch can be explained."""


class Accepted(msgspec.Struct, frozen=True, tag="accepted"):
    """A `Load` is registered; its outcome shows in `Status` or as NIXL's notification."""


class StatusReply(msgspec.Struct, frozen=True, tag="states"):
    states: list[str]


class Released(msgspec.Struct, frozen=True, tag="released"):
    """No write for the cancelled transfer is in flight or will start."""

    wrote: bool
    """Whether something had been written before."""


class Grant(msgspec.Struct, frozen=True, tag="grant"):
    """Write chain[start : start + len(blocks)] into these blocks of mine."""

    start: Count
    blocks: list[Count]
    epoch: Count
    lease_seconds: float


class Committed(msgspec.Struct, frozen=True, tag="committed"):
    inserted: Count
    """Blocks that are now in prefill's prefix cache because of this transfer."""


class Held(msgspec.Struct, frozen=True, tag="held"):
    """Answer to `Want`: how many blocks beyond those that prefill has an offer is coming for."""

    count: Count


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    reason: str
    engine_id: str
    """The engine that answers; differs from the one meant after a restart."""


Request = Hello | Load | Status | Cancel | Offer | Commit | Want
Reply = Welcome | Accepted | StatusReply | Released | Grant | Committed | Held | Refused


class Frame(msgspec.Struct, frozen=True, array_like=True):
    seq: Count
    body: Request | Reply


class ProtocolError(ValueError):
    """Bytes that are not a message of this protocol."""

    reason: str = "malformed"
    """Under which the message is counted as dropped."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Frame)


def encode(seq: int, body: Request | Reply) -> bytes:
    """One control frame."""
    return _encoder.encode(Frame(seq, body))


def decode(payload: bytes) -> Frame:
    """Read one control frame. Raises `ProtocolError` for anything else."""
    if len(payload) > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"message of {len(payload)} bytes, at most {MAX_MESSAGE_BYTES} are read")
    try:
        return _decoder.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(str(error)) from error


# --- What a write announces at its target ---------------------------------------------------------


def announcement(xid: str, rank: int) -> bytes:
    """NIXL's notification to a rank that rank `rank` of the writing engine has written its part of a transfer."""
    return f"{xid}:{rank}".encode()


def read_announcement(note: bytes) -> tuple[str, int] | None:
    """The transfer and the writing rank, or None for anything else."""
    xid, _, rank = note.decode("utf-8", "replace").rpartition(":")
    if not xid or not rank.isascii() or not rank.isdigit() or int(rank[:5]) >= MAX_RANKS:
        return None
    return xid, int(rank)


# --- Refusal reasons (Refused.reason) ------------------------------------------------------------

RESTARTED = "restarted"
STARTING = "starting"
FINGERPRINT = "fingerprint"
WRONG_ROLE = "role"
BAD_PROMPT = "prompt"
ABORTED = "aborted"
GONE = "gone"
HAVE = "have"
DUPLICATE = "dup"
NO_BLOCKS = "no_blocks"
GAP = "gap"
EPOCH = "epoch"
CLOSED = "closed"
UNKNOWN = "unknown"
NO_NOTIFICATION = "notification"

# --- States of a load as prefill tells them (StatusReply.states) ---------------------------------

State = Literal["unknown", "computing", "ready", "writing", "done", "failed", "aborted", "gone"]


# --- kv_transfer_params, version 1 (docs/wire-contract.md, section 1) -----------------------------


class PrefillLeg(msgspec.Struct, frozen=True):
    """This engine computes the prompt and pushes it; `decode` holds the conversation's KV, if known."""

    decode: Address | None


class DecodeLeg(msgspec.Struct, frozen=True):
    """This engine generates; `prefill` pushes the prompt's KV."""

    prefill: Address


class Dismissal(msgspec.Struct, frozen=True):
    """No leg: the router says that nobody will load the prompt of the turn with this request id."""

    turn: str


class Malformed(msgspec.Struct, frozen=True):
    """Params that are treated as absent, and why."""

    reason: str


class _Disagg(msgspec.Struct, frozen=True):
    version: int
    prefill: Address | None = None
    decode: Address | None = None
    dismiss: Id | None = None


Params = PrefillLeg | DecodeLeg | Dismissal | Malformed | None


def parse_params(params: Any, role: Role) -> Params:
    """Read a request's ``kv_transfer_params``.

    None means an ordinary local request. Never raises: what is not understood is `Malformed`.
    """
    if params is None:
        return None
    if not isinstance(params, dict):
        return Malformed("kv_transfer_params is not an object")
    remote_decode = params.get("do_remote_decode", False)
    remote_prefill = params.get("do_remote_prefill", False)
    if not isinstance(remote_decode, bool) or not isinstance(remote_prefill, bool):
        return Malformed("do_remote_decode and do_remote_prefill are not booleans")
    ours = params.get("disagg")
    if not remote_decode and not remote_prefill and not (isinstance(ours, dict) and "dismiss" in ours):
        return None
    if remote_decode and remote_prefill:
        return Malformed("both do_remote_decode and do_remote_prefill are set")
    try:
        disagg = msgspec.convert(ours, _Disagg, strict=True)
    except (msgspec.ValidationError, RecursionError) as error:
        return Malformed(f"disagg: {error}")
    if disagg.version != PARAMS_VERSION:
        return Malformed(f"disagg: version {disagg.version}, this connector knows {PARAMS_VERSION}")
    if not remote_decode and not remote_prefill:
        return _dismissal(disagg, role)
    return _leg(disagg, remote_decode, role)


def _dismissal(disagg: _Disagg, role: Role) -> Params:
    if disagg.dismiss is None or role != "prefill":
        return Malformed("a dismissal names no turn, or reached a decode engine")
    return Dismissal(disagg.dismiss)


def _leg(disagg: _Disagg, remote_decode: bool, role: Role) -> Params:
    if remote_decode:
        if role != "prefill":
            return Malformed("a prefill leg reached a decode engine")
        return PrefillLeg(disagg.decode)
    if role != "decode":
        return Malformed("a decode leg reached a prefill engine")
    if disagg.prefill is None:
        return Malformed("disagg: a decode leg names no prefill")
    return DecodeLeg(disagg.prefill)


# vLLM's front end appends a random suffix to X-Request-Id, and prefixes each of several samples.
_RANDOM_SUFFIX = re.compile(r"-[0-9a-f]{8}$", re.IGNORECASE)
_SAMPLE_PREFIX = re.compile(r"^\d+_")


def leg_key(request_id: str) -> str:
    """The part of an engine's request id that both legs of a turn share."""
    return _RANDOM_SUFFIX.sub("", _SAMPLE_PREFIX.sub("", request_id))


# What vLLM's front end makes of the router's id: a prefix for the endpoint, and a number for each prompt of a completion or
# each request of a response.
_ROUTERS_ID = re.compile(r"^(?:chatcmpl-([0-9a-f]{32})|cmpl-([0-9a-f]{32})-\d+|resp_([0-9a-f]{32})_\d+)$")


def turn_of(key: str) -> str:
    """The router's request id in a leg's key; the key itself if the router did not make it."""
    match = _ROUTERS_ID.match(key)
    return (match[1] or match[2] or match[3]) if match else key
