"""Reads the control channel's secrets from a folder, again whenever they change.

The folder is a Secret that kubelet mounts: files `current` and, where there are any, `previous` and `next`, of 32
bytes each. kubelet changes them by swapping a link, all at once, some time after the Secret has changed; people
write files one by one. What cannot be read, or not as a whole, changes nothing: the last good secrets stay.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path

from disagg_connector.auth import SECRET_BYTES, Codec, KeyRing, PlainCodec, SealingCodec
from disagg_connector.config import ConfigError, ConnectorConfig
from disagg_connector.ports import Clock

logger = logging.getLogger(__name__)

# How often the folder is looked at, at most. kubelet takes a minute to bring a change.
LOOK_EVERY = 2.0
COMPLAIN_EVERY = 60.0

_NAMES = ("previous", "current", "next")
_Look = tuple[tuple[int, int, int] | None, ...]
"""Of each file: inode, time of change in ns, size; None if it is not there."""


def codec_for(config: ConnectorConfig) -> Codec:
    """What the configuration asks for. Raises `ConfigError` if the secrets cannot be read."""
    if config.control_secret_dir is None:
        logger.warning(
            "The control channel is not authenticated: whoever reaches port %d may write KV. Set control_secret_dir",
            config.control_port,
        )
        return PlainCodec()
    return SealingCodec(KeyFolder(config.control_secret_dir).ring)


class KeyFolder:
    """The secrets in a folder. Used by one thread only, which a slow file system may hold up."""

    def __init__(self, folder: str, clock: Clock = time.monotonic) -> None:
        """Raises `ConfigError` if there are no secrets to begin with."""
        self._folder = Path(folder)
        self._clock = clock
        self._looked_at = clock()
        self._complained_at = float("-inf")
        try:
            self._seen = self._look()
            self._ring = self._read()
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"control_secret_dir: {error}. {folder} must hold a file 'current' of 32 random bytes, the same for "
                "prefill and decode; 'previous' and 'next' are optional"
            ) from error
        logger.info("Control channel: keys %s", ", ".join(self._ring.ids))

    def ring(self) -> KeyRing:
        """The secrets, at most `LOOK_EVERY` seconds old if the folder can be read."""
        now = self._clock()
        if now - self._looked_at >= LOOK_EVERY:
            self._looked_at = now
            try:
                self._refresh()
            except (OSError, ValueError) as error:
                self._complain(now, str(error))
        return self._ring

    def _refresh(self) -> None:
        seen = self._look()
        if seen == self._seen:
            return
        ring = self._read()
        if self._look() != seen:
            return  # changed while it was read: next time
        self._seen, self._ring = seen, ring
        logger.info("Control channel: keys are now %s", ", ".join(ring.ids))

    def _look(self) -> _Look:
        return tuple(self._stat(name) for name in _NAMES)

    def _stat(self, name: str) -> tuple[int, int, int] | None:
        try:
            stat = (self._folder / name).stat()
        except FileNotFoundError:
            return None
        return stat.st_ino, stat.st_mtime_ns, stat.st_size

    def _read(self) -> KeyRing:
        """Raises ValueError for a file of another size, OSError if `current` is not there."""
        return KeyRing(self._secret("current"), self._optional("previous"), self._optional("next"))

    def _optional(self, name: str) -> bytes | None:
        try:
            return self._secret(name)
        except FileNotFoundError:
            return None

    def _secret(self, name: str) -> bytes:
        path = self._folder / name
        secret = path.read_bytes()
        if len(secret) != SECRET_BYTES:
            raise ValueError(f"{path} has {len(secret)} bytes, not {SECRET_BYTES}")
        return secret

    def _complain(self, now: float, why: str) -> None:
        if now - self._complained_at >= COMPLAIN_EVERY:
            self._complained_at = now
            logger.error("Control channel: the keys in %s stay as they were: %s", self._folder, why)
