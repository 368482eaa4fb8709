"""Which API keys are accepted. Pure.

Keys are compared by their SHA-256, each of them and to the end: how long that takes says nothing about any key.
"""

from __future__ import annotations

import hmac
from codecs import BOM_UTF8
from hashlib import sha256

from disagg_router.http1.message import Headers


class KeyRing:
    """The accepted keys. It holds digests only, so that no key is ever printed or kept longer than it has to be."""

    def __init__(self, text: bytes = b"") -> None:
        """Read keys, one a line; blank lines and blanks around a key do not count."""
        lines = (line.strip() for line in text.removeprefix(BOM_UTF8).splitlines())
        self._digests = frozenset(sha256(line).digest() for line in lines if line)

    def __len__(self) -> int:
        return len(self._digests)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, KeyRing) and self._digests == other._digests

    def __hash__(self) -> int:
        return hash(self._digests)

    def accepts(self, key: bytes) -> bool:
        given, found = sha256(key).digest(), False
        for digest in self._digests:
            found |= hmac.compare_digest(digest, given)
        return found


def why_refused(ring: KeyRing, headers: Headers) -> str | None:
    """What to tell a client whose request carries no accepted key; None if it does."""
    given = headers.count(b"authorization")
    if not given:
        return "No API key was given. Send it as `Authorization: Bearer KEY`."
    scheme, _, key = (headers.get(b"authorization") or b"").partition(b" ")
    if given > 1 or scheme.lower() != b"bearer":
        return "The API key cannot be read. Send it once, as `Authorization: Bearer KEY`."
    return None if ring.accepts(key.strip()) else "The API key is not accepted."
