"""The accepted API keys, from a file."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import ClassVar

from disagg_router.config import ConfigError
from disagg_router.keys import KeyRing
from disagg_router.logs import event
from disagg_router.mounted import Mounted

_log = logging.getLogger(__name__)


class KeyFile(Mounted):
    """`ring` is what the file held when it could last be read. A file without keys takes all away, as its owner wants it."""

    what: ClassVar[str] = "API keys"
    ring: KeyRing

    def _begin(self, contents: Sequence[bytes]) -> None:
        self.ring = KeyRing(contents[0])
        if not self.ring:
            raise ConfigError(f"{self._paths[0]}: no API key in it: put one on each line")

    def _take_over(self, contents: Sequence[bytes]) -> None:
        ring = KeyRing(contents[0])
        if ring == self.ring:
            return
        self.ring = ring
        level = logging.INFO if self.ring else logging.ERROR
        event(_log, level, "API keys changed", keys=len(self.ring))
