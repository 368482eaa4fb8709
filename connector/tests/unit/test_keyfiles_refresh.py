"""The folder with the control channel's secrets, as kubelet and people change it."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from disagg_connector.auth import Key, PlainCodec, SealingCodec
from disagg_connector.config import ConfigError, ConnectorConfig
from disagg_connector.keyfiles import LOOK_EVERY, KeyFolder, codec_for

A, B, C, D = (letter * 32 for letter in (b"a", b"b", b"c", b"d"))


class Mount:
    """A Secret volume: kubelet writes a new folder and swaps one link."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._version = 0

    def publish(self, **files: bytes) -> None:
        self._version += 1
        data = self.folder / f"..version-{self._version}"
        data.mkdir()
        for name, content in files.items():
            (data / name).write_bytes(content)
        link = self.folder / "..data_tmp"
        link.symlink_to(data.name)
        os.replace(link, self.folder / "..data")
        for name in ("previous", "current", "next"):
            path = self.folder / name
            if name in files and not path.is_symlink():
                path.symlink_to(f"..data/{name}")
            if name not in files:
                path.unlink(missing_ok=True)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def mount(tmp_path: Path) -> Mount:
    return Mount(tmp_path)


def later(folder: KeyFolder, clock: Clock) -> bytes:
    """The id of the current key when it is time to look again."""
    clock.now += LOOK_EVERY
    return folder.ring().current.id


def test_a_rotation_is_seen(mount: Mount) -> None:
    clock = Clock()
    mount.publish(current=A, next=B)
    folder = KeyFolder(str(mount.folder), clock)
    assert folder.ring().current.id == Key(A).id
    mount.publish(previous=A, current=B, next=C)
    assert folder.ring().current.id == Key(A).id, "not looked at yet"
    assert later(folder, clock) == Key(B).id
    assert all(folder.ring().find(Key(key).id) for key in (A, B, C))
    mount.publish(previous=B, current=C, next=D)
    assert later(folder, clock) == Key(C).id
    assert folder.ring().find(Key(A).id) is None


def test_a_half_written_file_changes_nothing_and_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    (tmp_path / "current").write_bytes(A)
    folder = KeyFolder(str(tmp_path), clock)
    (tmp_path / "current").write_bytes(B[:20])
    with caplog.at_level(logging.ERROR):
        for _ in range(5):
            assert later(folder, clock) == Key(A).id
    assert len(caplog.records) == 1
    assert "20 bytes" in caplog.text
    assert "bbbb" not in caplog.text
    (tmp_path / "current").write_bytes(B)
    assert later(folder, clock) == Key(B).id


def test_a_folder_that_vanishes_changes_nothing(tmp_path: Path) -> None:
    clock = Clock()
    place = tmp_path / "keys"
    place.mkdir()
    (place / "current").write_bytes(A)
    folder = KeyFolder(str(place), clock)
    place.rename(tmp_path / "away")
    assert later(folder, clock) == Key(A).id
    (tmp_path / "away" / "current").write_bytes(B)
    (tmp_path / "away").rename(place)
    assert later(folder, clock) == Key(B).id


def test_an_extra_key_of_the_wrong_size_changes_nothing(mount: Mount) -> None:
    clock = Clock()
    mount.publish(current=A)
    folder = KeyFolder(str(mount.folder), clock)
    mount.publish(current=B, next=C[:1])
    assert later(folder, clock) == Key(A).id


@pytest.mark.parametrize("content", [None, b"", b"short"])
def test_an_engine_without_secrets_does_not_start(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "current").write_bytes(content)
    config = ConnectorConfig(role="decode", control_secret_dir=str(tmp_path))
    with pytest.raises(ConfigError, match=r"control_secret_dir.*current"):
        codec_for(config)


def test_without_the_setting_everybody_is_believed_and_that_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert isinstance(codec_for(ConnectorConfig(role="decode")), PlainCodec)
    assert "not authenticated" in caplog.text
    (tmp_path / "current").write_bytes(A)
    config = ConnectorConfig(role="decode", control_secret_dir=str(tmp_path))
    assert isinstance(codec_for(config), SealingCodec)
