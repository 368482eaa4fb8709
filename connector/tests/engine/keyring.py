"""The control channel's secrets for engines under test, in a folder that changes as kubelet changes a Secret volume."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import tempfile
from pathlib import Path

from disagg_connector.auth import SECRET_BYTES, KeyRing, SealingCodec

NAMES = ("previous", "current", "next")


class Keyring:
    """Three random secrets in files; all change at once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._version = 0
        self._publish([os.urandom(SECRET_BYTES) for _ in NAMES])

    def rotate(self) -> None:
        """Shift all by one, as the operator does."""
        self._publish([*self._secrets[1:], os.urandom(SECRET_BYTES)])

    def codec(self, signing: str = "current") -> SealingCodec:
        """Speaks on the channel with one of the secrets as they are now."""
        ring = KeyRing(self._secrets[NAMES.index(signing)])
        return SealingCodec(lambda: ring)

    def _publish(self, secrets: list[bytes]) -> None:
        self._secrets = secrets
        self._version += 1
        data = self.folder / f"..version-{self._version}"
        data.mkdir(mode=0o700)
        for name, secret in zip(NAMES, secrets, strict=True):
            (data / name).write_bytes(secret)
        link = self.folder / "..data_tmp"
        link.symlink_to(data.name)
        os.replace(link, self.folder / "..data")
        for name in NAMES:
            if not (self.folder / name).is_symlink():
                (self.folder / name).symlink_to(f"..data/{name}")


@functools.cache
def shared_keyring() -> Keyring:
    """What all engines of this test run are started with, so that every test runs authenticated."""
    folder = Path(tempfile.mkdtemp(prefix="control-keys-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Keyring(folder)
