"""Which conversation a request belongs to, and where that conversation's last turn was. Pure but for the memory.

Nothing is stored outside the process, and several router replicas must agree without talking. So a conversation is
named by something that every turn of it carries: a header that the client sets, a field of its body, or else the
conversation's root, that is, its system prompt and first user message. The name alone decides the pods (see
`pick`). `Memory` only adds what one replica knows better: where the last turn really went.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from disagg_router.http1.message import Headers
from disagg_router.legs import Body

Origin = Literal["header", "body", "root"]

KEY_BYTES = 16
"""Length of a conversation's name."""

# Text completions have no messages: the beginning of the prompt stands for the conversation.
_PROMPT_ROOT_BYTES = 512


@dataclass(frozen=True, slots=True)
class Session:
    """A conversation's name (`KEY_BYTES` long) and how it was found. `earlier_turn`: the request itself shows that it is
    not the conversation's first."""

    key: bytes
    origin: Origin
    earlier_turn: bool


class _Message(msgspec.Struct):
    role: str = ""  # /v1/responses has items beside messages: calls of tools and what they gave
    content: msgspec.Raw = msgspec.Raw(b"null")


_messages = msgspec.json.Decoder(list[_Message])


def identify(headers: Headers, header_keys: Sequence[str], body_fields: Sequence[str], body: Body) -> Session:
    """Name the conversation of a request.

    In this order: the first configured header that is there; the first configured field of the body that is a text;
    OpenAI's `prompt_cache_key` together with the root (it is often shared by many conversations); the root alone.
    """
    root, earlier_turn = _root(body)
    for name in header_keys:
        value = headers.get(name.lower().encode("latin-1"))
        if value:
            return Session(_digest(b"header", name.lower().encode(), value), "header", earlier_turn)
    for name in body_fields:
        text = body.text(name)
        if text:
            return Session(_digest(name.encode(), text.encode()), "body", earlier_turn)
    cache_key = body.text("prompt_cache_key")
    if cache_key:
        return Session(_digest(b"prompt_cache_key", cache_key.encode(), root), "body", earlier_turn)
    return Session(_digest(b"root", root), "root", earlier_turn)


def _root(body: Body) -> tuple[bytes, bool]:
    """What stays the same in all turns of the conversation, and whether an earlier turn shows in the body."""
    digest = hashlib.blake2b(digest_size=KEY_BYTES)
    raw = body.fields.get("messages")
    if body.endpoint == "responses":
        digest.update(bytes(body.fields.get("instructions", b"")))
        raw = body.fields.get("input", msgspec.Raw(b"null"))
        if bytes(raw).startswith(b'"'):
            # A text is what its user says first; in later turns it is a message like any other.
            raw = msgspec.Raw(b'[{"role":"user","content":' + bytes(raw) + b"}]")
    if raw is None:
        prompt = bytes(body.fields.get("prompt", b""))
        return _digest(prompt[:_PROMPT_ROOT_BYTES]), False
    try:
        messages = _messages.decode(raw)
    except (msgspec.DecodeError, RecursionError):
        return _digest(bytes(raw)), False  # the engine will say what is wrong with it
    for message in messages:
        digest.update(message.role.encode())
        digest.update(bytes(message.content))
        if message.role == "user":
            break
    return digest.digest(), any(message.role == "assistant" for message in messages)


def _digest(*parts: bytes) -> bytes:
    digest = hashlib.blake2b(digest_size=KEY_BYTES)
    for part in parts:
        digest.update(len(part).to_bytes(8, "big"))
        digest.update(part)
    return digest.digest()


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a turn went, by pod names. `prefill` is None if decode computed the prompt itself."""

    revision: str
    decode: str
    prefill: str | None


class Memory:
    """The last placement of each conversation that this process served: least recently used entries go first."""

    def __init__(
        self, clock: Callable[[], float], max_entries: int = 50_000, ttl_seconds: float = 3600.0
    ) -> None:
        self._clock = clock
        self._max_entries = max_entries
        self._ttl = ttl_seconds
        self._entries: OrderedDict[bytes, tuple[float, Placement]] = OrderedDict()

    def recall(self, key: bytes) -> Placement | None:
        entry = self._entries.get(key)
        if entry is None:
            return None
        if self._clock() - entry[0] > self._ttl:
            del self._entries[key]
            return None
        return entry[1]

    def rested(self, key: bytes) -> float | None:
        """Seconds since a conversation was last remembered or ended a turn."""
        entry = self._entries.get(key)
        return None if entry is None else self._clock() - entry[0]

    def ended(self, key: bytes) -> None:
        """The conversation's turn is over: from now on it rests."""
        entry = self._entries.get(key)
        if entry is not None:
            self._entries[key] = (self._clock(), entry[1])
            self._entries.move_to_end(key)

    def newest(self, limit: int) -> list[tuple[bytes, float, Placement]]:
        """At most `limit` conversations with their age in seconds, the latest turn first."""
        now = self._clock()
        found: list[tuple[bytes, float, Placement]] = []
        for key in reversed(self._entries):
            since, placement = self._entries[key]
            if len(found) == limit or now - since > self._ttl:
                break
            found.append((key, now - since, placement))
        return found

    def remember(self, key: bytes, placement: Placement) -> None:
        self._entries[key] = (self._clock(), placement)
        self._entries.move_to_end(key)
        if len(self._entries) > self._max_entries:
            self._entries.popitem(last=False)

    def __len__(self) -> int:
        return len(self._entries)
