"""The secrets that replicas know each other by, from the folder that their Secret is mounted as."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from disagg_router.config import ConfigError
from disagg_router.logs import event
from disagg_router.mounted import Mounted
from disagg_router.seal import Secrets

_log = logging.getLogger(__name__)

_NAMES = ("current", "previous", "next")


class SecretDir(Mounted):
    """`secrets` is what the folder held when it could last be read and used."""

    what: ClassVar[str] = "replicas' secrets"
    secrets: Secrets

    def __init__(self, folder: Path) -> None:
        """Raises ConfigError if there are no secrets to begin with."""
        super().__init__(*(folder / name for name in _NAMES))

    def _begin(self, contents: Sequence[bytes]) -> None:
        try:
            self.secrets = Secrets(*contents)
        except ValueError as exc:
            files = ", ".join(map(str, self._paths))
            raise ConfigError(f"{files}: {exc}, the same for all replicas") from exc

    def _take_over(self, contents: Sequence[bytes]) -> None:
        try:
            self.secrets = Secrets(*contents)
        except ValueError as exc:
            event(_log, logging.ERROR, f"{self.what} cannot be used; the old ones stay", error=str(exc))
        else:
            event(_log, logging.INFO, f"{self.what} changed")
