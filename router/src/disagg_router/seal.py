"""Seals what the replicas of one router say to each other, so that only holders of their secret are listened to. Pure.

A sealed message, all integers big endian::

    version 1 | key id 8 | nonce 16 | number 8 | payload | MAC 32

* The MAC is HMAC-SHA256 over all before it. Questions and answers have keys of their own, derived from the secret
  (HKDF-Expand, RFC 5869 section 2.3) under names that nothing else uses, so a message of one kind is none of another. It is
  checked before anything of the payload is looked at.
* A question carries its sender's nonce, 16 random bytes per process, and a number that grows. Each is accepted once
  (`ReplayGuard`). What the payload means must be bound to the receiver's process, which forgets all this when it ends.
* An answer carries nonce and number of its question: it fits that one only.
* Of three secrets `current` signs and all are accepted, so two replicas may be one rotation apart.

Nothing is encrypted.
"""

from __future__ import annotations

import hmac
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

SECRET_BYTES = 32
NONCE_BYTES = 16
_VERSION = 1
_HEADER = struct.Struct(">B8s16sQ")
_KEY_ID_BYTES = 8
_MAC_BYTES = 32
SEAL_BYTES = _HEADER.size + _MAC_BYTES
"""How much longer a message is with its seal."""

# Numbers below a sender's highest that are still taken, each once: more than messages overtake each other.
WINDOW = 4096
# Processes that are remembered, one per replica and start: a few MB.
MAX_SENDERS = 16_384

Refusal = Literal["malformed", "unknown_key", "forged", "replayed", "overload"]


class SealError(Exception):
    """A message that is not believed. `reason` is for counting."""

    def __init__(self, reason: Refusal) -> None:
        super().__init__(reason)
        self.reason = reason


class _Key:
    __slots__ = ("answer", "id", "question")

    def __init__(self, secret: bytes) -> None:
        if len(secret) != SECRET_BYTES:
            raise ValueError(f"a secret has {len(secret)} bytes, {SECRET_BYTES} are needed")
        # Names the secret without telling anything of it, and is not what other users of the same secret call it.
        self.id = _expand(secret, b"disagg router id")[:_KEY_ID_BYTES]
        self.question = _expand(secret, b"disagg router question")
        self.answer = _expand(secret, b"disagg router answer")


def _expand(secret: bytes, info: bytes) -> bytes:
    return hmac.digest(secret, info + b"\x01", "sha256")


class Secrets:
    """The secrets of one moment. Only what is derived from them is kept."""

    def __init__(self, current: bytes, *others: bytes) -> None:
        """`current` signs, all are accepted. Raises ValueError for one that has not 32 bytes."""
        self.current = _Key(current)
        self._by_id = {key.id: key for key in (*map(_Key, others), self.current)}

    def find(self, key_id: bytes) -> _Key | None:
        return self._by_id.get(key_id)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Secrets):
            return NotImplemented
        return self.current.id == other.current.id and self._by_id.keys() == other._by_id.keys()

    def __hash__(self) -> int:
        return hash((self.current.id, frozenset(self._by_id)))


class ReplayGuard:
    """Accepts each (nonce, number) once: a sliding window per sender, as in RFC 4303, section 3.4.3. Forgets nobody."""

    def __init__(self, window: int = WINDOW, senders: int = MAX_SENDERS) -> None:
        self._window = window
        self._limit = senders
        self._senders: dict[
            bytes, tuple[int, int]
        ] = {}  # the highest number; bit n is set if highest - n has come

    def refusal(self, nonce: bytes, number: int) -> Refusal | None:
        """None the first time, then why not. Call it for authentic messages only."""
        known = self._senders.get(nonce)
        if known is None:
            if len(self._senders) >= self._limit:
                return "overload"
            self._senders[nonce] = (number, 1)
            return None
        highest, seen = known
        ahead = number - highest
        if ahead > 0:
            # A number may be any below 2**64; shifting by as much would be a way to fill the memory.
            shifted = seen << ahead & (1 << self._window) - 1 if ahead < self._window else 0
            self._senders[nonce] = (number, shifted | 1)
        elif -ahead >= self._window or seen >> -ahead & 1:
            return "replayed"
        else:
            self._senders[nonce] = (highest, seen | 1 << -ahead)
        return None


@dataclass(frozen=True, slots=True)
class Question:
    """An authentic one that has not come before. `seal` is what its answer must fit."""

    payload: bytes
    seal: tuple[bytes, bytes, int]


class Channel:
    """One process's end: what it asks, what it is asked, and the answers to both."""

    def __init__(self, secrets: Callable[[], Secrets], nonce: bytes) -> None:
        """`secrets` is called for every message; `nonce` must be new for every process."""
        self._secrets = secrets
        self._nonce = nonce
        self._number = 0
        self._guard = ReplayGuard()

    def ask(self, payload: bytes) -> tuple[int, bytes]:
        """The number of a new question, and the question sealed."""
        self._number += 1
        key = self._secrets().current
        return self._number, _sealed(key.id, key.question, self._nonce, self._number, payload)

    def asked(self, message: bytes) -> Question:
        """Raises SealError."""
        key, nonce, number = self._opened(message, lambda key: key.question)
        refusal = self._guard.refusal(nonce, number)
        if refusal is not None:
            raise SealError(refusal)
        return Question(_payload(message), (key.id, nonce, number))

    def answer(self, question: Question, payload: bytes) -> bytes:
        """Sealed with the key of the question. Raises SealError if that is gone."""
        key_id, nonce, number = question.seal
        key = self._secrets().find(key_id)
        if key is None:
            raise SealError("unknown_key")
        return _sealed(key_id, key.answer, nonce, number, payload)

    def answered(self, number: int, message: bytes) -> bytes:
        """What was answered to question `number`. Raises SealError."""
        _, nonce, given = self._opened(message, lambda key: key.answer)
        if (nonce, given) != (self._nonce, number):
            raise SealError("replayed")
        return _payload(message)

    def _opened(self, message: bytes, mac_key: Callable[[_Key], bytes]) -> tuple[_Key, bytes, int]:
        if len(message) < SEAL_BYTES or message[0] != _VERSION:
            raise SealError("malformed")
        _, key_id, nonce, number = _HEADER.unpack_from(message)
        key = self._secrets().find(key_id)
        if key is None:
            raise SealError("unknown_key")
        mac = hmac.digest(mac_key(key), message[:-_MAC_BYTES], "sha256")
        if not hmac.compare_digest(mac, message[-_MAC_BYTES:]):
            raise SealError("forged")
        return key, nonce, number


def _sealed(key_id: bytes, mac_key: bytes, nonce: bytes, number: int, payload: bytes) -> bytes:
    message = _HEADER.pack(_VERSION, key_id, nonce, number) + payload
    return message + hmac.digest(mac_key, message, "sha256")


def _payload(message: bytes) -> bytes:
    return message[_HEADER.size : -_MAC_BYTES]
