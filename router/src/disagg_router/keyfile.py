"""Reads the accepted API keys from a file, again whenever it changes."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from disagg_router.config import ConfigError
from disagg_router.keys import KeyRing
from disagg_router.logs import event

_log = logging.getLogger(__name__)

# A mounted Secret is exchanged under its path, by a link: looking is surer than being told, and the file is small.
_EVERY_SECONDS = 2.0


class KeyFile:
    """`ring` is what the file held when it could last be read."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError if there is no key to begin with."""
        self._path = path
        self._unreadable = False
        try:
            text = path.read_bytes()
        except OSError as exc:
            raise ConfigError(f"{path}: API keys cannot be read: {exc.strerror}") from exc
        self.ring = KeyRing(text)
        if not self.ring:
            raise ConfigError(f"{path}: no API key in it: put one on each line")

    async def follow(self) -> None:
        """Read the file again and again, until cancelled."""
        while True:
            await asyncio.sleep(_EVERY_SECONDS)
            self.look()

    def look(self) -> None:
        """Take over what the file holds now.

        A file without keys takes all away, as its owner wants it. One that cannot be read says nothing: keys stay.
        """
        try:
            text = self._path.read_bytes()
        except OSError as exc:
            if not self._unreadable:
                event(_log, logging.ERROR, "API keys cannot be read; those known stay", error=str(exc))
            self._unreadable = True
            return
        self._unreadable = False
        ring = KeyRing(text)
        if ring == self.ring:
            return
        self.ring = ring
        level = logging.INFO if self.ring else logging.ERROR
        event(_log, level, "API keys changed", keys=len(self.ring))
