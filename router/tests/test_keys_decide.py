"""Which keys are accepted, and what the file of keys may become."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg_router.config import ConfigError
from disagg_router.http1 import Headers
from disagg_router.keyfile import KeyFile
from disagg_router.keys import KeyRing, why_refused

RING = KeyRing(b"first-key\r\n\n  second-key  \nthird-key")


def asks(*values: bytes) -> str | None:
    return why_refused(RING, Headers((b"Authorization", value) for value in values))


@pytest.mark.parametrize(
    "value", [b"Bearer first-key", b"bearer second-key", b"BEARER  third-key ", b"Bearer\x20second-key"]
)
def test_every_key_of_the_file_is_accepted(value: bytes) -> None:
    assert asks(value) is None
    assert len(RING) == 3


@pytest.mark.parametrize(
    "values",
    [
        (),
        (b"",),
        (b"Bearer",),
        (b"Bearer ",),
        (b"first-key",),
        (b"Basic first-key",),
        (b"Bearerfirst-key",),
        (b"Bearer first-ke",),
        (b"Bearer first-key2",),
        (b"Bearer First-key",),
        (b"Bearer first-key\r\nsecond-key",),
        (b"Bearer first-key second-key",),
        (b"Bearer \xff\xfe",),
        (b"Bearer first-key", b"Bearer first-key"),
        (b"Bearer nope", b"Bearer first-key"),
    ],
)
def test_anything_else_is_not(values: tuple[bytes, ...]) -> None:
    told = asks(*values)
    assert told is not None
    assert "first-key" not in told


@given(st.binary(max_size=40))
def test_an_empty_ring_accepts_nothing(key: bytes) -> None:
    assert not KeyRing(b"\n \r\n\t\n").accepts(key)
    assert not KeyRing().accepts(key)


def test_keys_cannot_be_read_off_a_ring() -> None:
    assert "first-key" not in repr(vars(RING))


# -- the file --------------------------------------------------------------------------------------------------


def test_a_changed_file_is_taken_over(tmp_path: Path) -> None:
    file = tmp_path / "api-keys"
    file.write_bytes(b"old")
    keys = KeyFile(file)
    assert keys.ring.accepts(b"old")
    # As the kubelet does: the path becomes another file.
    (tmp_path / "next").write_bytes(b"new\nnewer")
    (tmp_path / "next").rename(file)
    keys.look()
    assert [keys.ring.accepts(key) for key in (b"old", b"new", b"newer")] == [False, True, True]


def test_an_emptied_file_takes_all_keys_away(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "api-keys"
    file.write_bytes(b"old")
    keys = KeyFile(file)
    file.write_bytes(b"\n")
    keys.look()
    assert not keys.ring.accepts(b"old")
    assert not keys.ring.accepts(b"")
    assert [record.levelno for record in caplog.records] == [logging.ERROR]


def test_a_file_that_cannot_be_read_takes_none_away(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "api-keys"
    file.write_bytes(b"key")
    keys = KeyFile(file)
    file.unlink()
    for _ in range(3):
        keys.look()
    assert keys.ring.accepts(b"key")
    assert len(caplog.records) == 1, "said once, not every two seconds"
    file.write_bytes(b"other")
    keys.look()
    assert keys.ring.accepts(b"other")


@pytest.mark.parametrize(
    ("text", "words"), [(None, "cannot be read"), (b"", "no API key"), (b" \n", "no API key")]
)
def test_without_any_key_there_is_no_start(tmp_path: Path, text: bytes | None, words: str) -> None:
    file = tmp_path / "api-keys"
    if text is not None:
        file.write_bytes(text)
    with pytest.raises(ConfigError, match=words):
        KeyFile(file)


def test_no_key_is_ever_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    file = tmp_path / "api-keys"
    file.write_bytes(b"secret-one")
    keys = KeyFile(file)
    file.write_bytes(b"secret-two")
    keys.look()
    assert caplog.records
    assert "secret" not in caplog.text + repr([vars(record) for record in caplog.records])


def test_a_mark_at_the_beginning_is_no_part_of_a_key() -> None:
    assert KeyRing(b"\xef\xbb\xbffirst-key\n").accepts(b"first-key")
