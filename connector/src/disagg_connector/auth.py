"""Seals control messages, so that only holders of the deployment's secret are listened to. Pure.

A sealed message, all integers big endian::

    magic 4 | version 1 | key id 8 | nonce 16 | number 8 | payload (`protocol.encode`) | MAC 32

* The MAC is HMAC-SHA256 over all before it. Requests and replies have keys of their own, derived from the secret
  (HKDF-Expand, RFC 5869 section 2.3), so one cannot be sent back as the other. It is checked before anything of the
  payload is looked at.
* A request carries its sender's nonce, 16 random bytes per channel and boot, and a number that grows. Each is
  accepted once (`ReplayGuard`). One that was recorded before the receiver restarted is refused by name: all requests
  but `Hello`, which changes nothing, name the receiver's boot.
* A reply carries nonce and number of its request, and the key that signed the request signs it: it fits one request
  of one channel.
* Of a `KeyRing`'s three secrets the current one signs and all are accepted, so two ends may be one rotation apart.

Nothing is encrypted: block hashes and block ids are worth nothing without the network that carries the KV itself.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from disagg_connector.protocol import ProtocolError, Reply, Request, decode, encode

SECRET_BYTES = 32
SEAL_VERSION = 1
# 0xc1 begins no msgpack value: a sealed message is never taken for a plain one.
MAGIC = b"\xc1DKV"

_HEADER = struct.Struct(">4sB8s16sQ")
_MAC_BYTES = 32
_KEY_ID_BYTES = 8
_NONCE_BYTES = 16
SEAL_BYTES = _HEADER.size + _MAC_BYTES
"""How much longer a message is with its seal."""

# Numbers below a sender's highest that are still taken, each once. ZeroMQ keeps the order on one connection.
WINDOW = 1024
# Senders that are remembered, one per peer and boot: about 5 MB.
MAX_SENDERS = 16_384

DropReason = Literal["malformed", "unauthenticated", "unknown_key", "forged", "replayed", "overload"]
"""Label values of the counter of dropped messages."""


class SealError(ProtocolError):
    """A message whose sender is not believed."""

    def __init__(self, reason: DropReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Key:
    """One secret: the keys made of it, and a name for it that may be shown."""

    __slots__ = ("id", "reply", "request")

    def __init__(self, secret: bytes) -> None:
        """Raises ValueError unless `secret` has 32 bytes."""
        if len(secret) != SECRET_BYTES:
            raise ValueError(f"a secret has {len(secret)} bytes, {SECRET_BYTES} are needed")
        self.id = hashlib.sha256(secret).digest()[:_KEY_ID_BYTES]
        self.request = _expand(secret, b"disagg control request")
        self.reply = _expand(secret, b"disagg control reply")

    def __repr__(self) -> str:
        return f"Key({self.id.hex()})"


def _expand(secret: bytes, info: bytes) -> bytes:
    return hmac.digest(secret, info + b"\x01", "sha256")


class KeyRing:
    """The secrets of one moment: `current` signs, all are accepted."""

    def __init__(self, current: bytes, previous: bytes | None = None, next: bytes | None = None) -> None:
        """Raises ValueError for a secret that has not 32 bytes."""
        self.current = Key(current)
        others = [Key(secret) for secret in (previous, next) if secret is not None]
        self._by_id = {key.id: key for key in (*others, self.current)}

    def find(self, key_id: bytes) -> Key | None:
        return self._by_id.get(key_id)

    @property
    def ids(self) -> tuple[str, ...]:
        """Hex names of all secrets, the current one last."""
        return tuple(key_id.hex() for key_id in self._by_id)

    def __repr__(self) -> str:
        return f"KeyRing({', '.join(self.ids)})"


@dataclass
class _Sender:
    highest: int
    seen: int
    """Bit n is set if `highest - n` was accepted."""
    key_id: bytes
    """Of the message with the highest number. Earlier ones have this key or one that is older still."""


class ReplayGuard:
    """Accepts each (nonce, number) once: a sliding window per sender, as in RFC 4303, section 3.4.3.

    A sender is forgotten only when the key of its last message is no longer accepted, so nothing that it sent can be
    played again. While the table is full of others, new senders are refused: that costs time, a repeated `Load` could
    cost a right answer.
    """

    def __init__(self, window: int = WINDOW, senders: int = MAX_SENDERS) -> None:
        self._mask = (1 << window) - 1
        self._limit = senders
        self._senders: dict[bytes, _Sender] = {}

    def refusal(self, ring: KeyRing, key_id: bytes, nonce: bytes, number: int) -> DropReason | None:
        """None the first time, then why not. Call it for authentic messages only."""
        sender = self._senders.get(nonce)
        if sender is None:
            if len(self._senders) >= self._limit:
                self._senders = {k: s for k, s in self._senders.items() if ring.find(s.key_id) is not None}
            if len(self._senders) >= self._limit:
                return "overload"
            self._senders[nonce] = _Sender(number, 1, key_id)
            return None
        ahead, window = number - sender.highest, self._mask.bit_length()
        if ahead > 0:
            # A number may be any below 2**64; shifting by as much would be a way to fill the memory.
            sender.seen = (sender.seen << ahead & self._mask if ahead < window else 0) | 1
            sender.highest, sender.key_id = number, key_id
        elif -ahead >= window or sender.seen >> -ahead & 1:
            return "replayed"
        else:
            sender.seen |= 1 << -ahead
        return None


class Codec(Protocol):
    """Messages to bytes and back, for one channel. A `seal` says what a reply to a request must fit."""

    def write_request(self, seq: int, message: Request) -> bytes: ...

    def read_request(self, data: bytes) -> tuple[int, Request, bytes]:
        """The request's number, the request and its seal. Raises `ProtocolError`."""

    def write_reply(self, seal: bytes, seq: int, reply: Reply) -> bytes:
        """Raises `ProtocolError` if the request's key is gone."""

    def read_reply(self, data: bytes) -> tuple[int, Reply]:
        """The number of a request of this channel, and the reply to it. Raises `ProtocolError`."""


def _request(payload: bytes) -> tuple[int, Request]:
    frame = decode(payload)
    if not isinstance(frame.body, Request):
        raise ProtocolError("a reply where a request was expected")
    return frame.seq, frame.body


def _reply(payload: bytes) -> tuple[int, Reply]:
    frame = decode(payload)
    if not isinstance(frame.body, Reply):
        raise ProtocolError("a request where a reply was expected")
    return frame.seq, frame.body


class PlainCodec:
    """Believes everybody: for engines started by hand, behind a firewall."""

    def write_request(self, seq: int, message: Request) -> bytes:
        return encode(seq, message)

    def read_request(self, data: bytes) -> tuple[int, Request, bytes]:
        return (*_request(data), b"")

    def write_reply(self, seal: bytes, seq: int, reply: Reply) -> bytes:
        return encode(seq, reply)

    def read_reply(self, data: bytes) -> tuple[int, Reply]:
        return _reply(data)


class SealingCodec:
    """Signs what is sent with the ring's current key, and believes only holders of one of its keys."""

    def __init__(self, ring: Callable[[], KeyRing], nonce: bytes | None = None) -> None:
        """`ring` is called for every message; `nonce` must be new for every channel."""
        self._ring = ring
        self._nonce = os.urandom(_NONCE_BYTES) if nonce is None else nonce
        self._guard = ReplayGuard()

    def write_request(self, seq: int, message: Request) -> bytes:
        key = self._ring().current
        return _seal(key.id, key.request, self._nonce, seq, encode(seq, message))

    def read_request(self, data: bytes) -> tuple[int, Request, bytes]:
        key, nonce, number = self._open(data, lambda key: key.request)
        refusal = self._guard.refusal(self._ring(), key.id, nonce, number)
        if refusal == "replayed":
            raise SealError(refusal, f"message {number} of one sender came again, or far too late")
        if refusal is not None:
            raise SealError(refusal, f"more than {MAX_SENDERS} senders within one lifetime of the keys")
        seq, message = _request(_payload(data))
        _check_number(seq, number)
        return seq, message, key.id + nonce

    def write_reply(self, seal: bytes, seq: int, reply: Reply) -> bytes:
        key_id, nonce = seal[:_KEY_ID_BYTES], seal[_KEY_ID_BYTES:]
        key = self._ring().find(key_id)
        if key is None:
            raise SealError(
                "unknown_key", f"key {key_id.hex()} was rotated away before its request was answered"
            )
        return _seal(key_id, key.reply, nonce, seq, encode(seq, reply))

    def read_reply(self, data: bytes) -> tuple[int, Reply]:
        _, nonce, number = self._open(data, lambda key: key.reply)
        if nonce != self._nonce:
            raise SealError("replayed", "a reply to another channel")
        seq, reply = _reply(_payload(data))
        _check_number(seq, number)
        return seq, reply

    def _open(self, data: bytes, mac_key: Callable[[Key], bytes]) -> tuple[Key, bytes, int]:
        """(key, nonce, number) of an authentic message."""
        if data[: len(MAGIC)] != MAGIC:
            raise SealError(
                "unauthenticated", "a message without a seal; does its sender have no control_secret_dir?"
            )
        if len(data) < SEAL_BYTES or data[len(MAGIC)] != SEAL_VERSION:
            raise SealError("malformed", "a seal that is cut off or of an unknown version")
        _, _, key_id, nonce, number = _HEADER.unpack_from(data)
        key = self._ring().find(key_id)
        if key is None:
            known = ", ".join(self._ring().ids)
            raise SealError("unknown_key", f"a seal with key {key_id.hex()}, known are {known}")
        if not hmac.compare_digest(_mac(mac_key(key), data[:-_MAC_BYTES]), data[-_MAC_BYTES:]):
            raise SealError("forged", "a seal that does not fit its message")
        return key, nonce, number


def _seal(key_id: bytes, mac_key: bytes, nonce: bytes, number: int, payload: bytes) -> bytes:
    sealed = _HEADER.pack(MAGIC, SEAL_VERSION, key_id, nonce, number) + payload
    return sealed + _mac(mac_key, sealed)


def _mac(key: bytes, message: bytes) -> bytes:
    return hmac.digest(key, message, "sha256")


def _payload(data: bytes) -> bytes:
    return data[_HEADER.size : -_MAC_BYTES]


def _check_number(seq: int, number: int) -> None:
    if seq != number:
        raise ProtocolError(f"message {seq} in the seal of {number}")
