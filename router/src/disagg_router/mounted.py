"""Files of a mounted Secret, read again whenever they change."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import ClassVar

from disagg_router.config import ConfigError
from disagg_router.logs import event

_log = logging.getLogger(__name__)

# A mounted Secret is exchanged under its path, by a link: looking is surer than being told, and the files are small.
_EVERY_SECONDS = 2.0


class Mounted(ABC):
    """Says `_take_over` what the files hold, at first and after each change. Secrets themselves are not kept here."""

    what: ClassVar[str]
    """What the files hold, in the plural."""

    def __init__(self, *paths: Path) -> None:
        """Raises ConfigError if there is nothing usable to begin with."""
        self._paths = paths
        self._unreadable = False
        try:
            contents = self._read()
        except OSError as exc:
            raise ConfigError(f"{exc.filename}: {self.what} cannot be read: {exc.strerror}") from exc
        self._seen = _digest(contents)
        self._begin(contents)

    @abstractmethod
    def _begin(self, contents: Sequence[bytes]) -> None:
        """Take what the files hold at first. Raises ConfigError."""

    @abstractmethod
    def _take_over(self, contents: Sequence[bytes]) -> None:
        """Take what the files hold now, or log why that cannot be."""

    async def follow(self) -> None:
        """Look again and again, until cancelled."""
        while True:
            await asyncio.sleep(_EVERY_SECONDS)
            self.look()

    def look(self) -> None:
        """Take over what the files hold now. Files that cannot be read say nothing: what is known stays."""
        try:
            contents = self._read()
        except OSError as exc:
            if not self._unreadable:
                event(_log, logging.ERROR, f"{self.what} cannot be read; those known stay", error=str(exc))
            self._unreadable = True
            return
        self._unreadable = False
        seen = _digest(contents)
        if seen != self._seen:
            self._seen = seen
            self._take_over(contents)

    def _read(self) -> tuple[bytes, ...]:
        return tuple(path.read_bytes() for path in self._paths)


def _digest(contents: Sequence[bytes]) -> tuple[bytes, ...]:
    return tuple(sha256(content).digest() for content in contents)
