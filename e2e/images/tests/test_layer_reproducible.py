"""Layers: the same content gives the same bytes, and all that matters about a file is kept."""

import os
import tarfile
from pathlib import Path

import pytest

from e2e.images import layer
from e2e.images.layer import Entry, cached_layer, folder_entries, write_layer


def make_folder(root: Path) -> Path:
    (root / "package" / "data").mkdir(parents=True)
    (root / "package" / "code.py").write_text("x = 1\n")
    (root / "package" / "tool").write_text("#!/bin/sh\n")
    (root / "package" / "tool").chmod(0o755)
    (root / "package" / "data" / "link").symlink_to("../code.py")
    return root / "package"


def members(path: Path) -> dict[str, tarfile.TarInfo]:
    with tarfile.open(path) as tar:
        return {member.name: member for member in tar.getmembers()}


def test_times_and_owners_do_not_change_a_layer(tmp_path: Path) -> None:
    first = make_folder(tmp_path / "one")
    second = make_folder(tmp_path / "two")
    os.utime(second / "code.py", (1, 1))
    digests = {write_layer(folder_entries(folder, "opt"), tmp_path / "out") for folder in (first, second)}
    assert len(digests) == 1


def test_content_mode_and_place_change_a_layer(tmp_path: Path) -> None:
    entries = [
        Entry("opt/a", content=b"x"),
        Entry("opt/a", content=b"y"),
        Entry("opt/a", content=b"x", mode=0o600),
        Entry("opt/b", content=b"x"),
        Entry("opt/a", link="x"),
    ]
    assert len({write_layer([entry], tmp_path / "out") for entry in entries}) == len(entries)


def test_a_folder_keeps_links_and_the_right_to_execute(tmp_path: Path) -> None:
    write_layer(folder_entries(make_folder(tmp_path), "opt/app"), tmp_path / "out")
    found = members(tmp_path / "out")
    assert found["opt/app/tool"].mode == 0o755
    assert found["opt/app/code.py"].mode == 0o644
    assert found["opt/app/data/link"].linkname == "../code.py"
    assert {(member.uid, member.gid, member.mtime) for member in found.values()} == {(0, 0, 0)}


def test_parent_folders_are_added_and_come_first(tmp_path: Path) -> None:
    write_layer([Entry("a/b/c", content=b"")], tmp_path / "out")
    assert list(members(tmp_path / "out")) == ["a", "a/b", "a/b/c"]


def test_two_contents_for_one_path_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="/etc/passwd"):
        write_layer([Entry("etc/passwd", content=b"1"), Entry("etc/passwd", content=b"2")], tmp_path / "out")


def test_a_cached_layer_is_gathered_once_per_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISAGG_CACHE", str(tmp_path))
    gathered: list[str] = []

    def gather(content: str) -> layer.Layer:
        def entries(_: Path) -> list[Entry]:
            gathered.append(content)
            return [Entry("file", content=content.encode())]

        return cached_layer("name", layer.fingerprint(content), entries)

    assert gather("one") == gather("one") != gather("two")
    assert gathered == ["one", "two"]


def test_the_cache_keeps_only_the_newest_layers_of_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DISAGG_CACHE", str(tmp_path))
    other = cached_layer(
        "name-of-another", layer.fingerprint("other"), lambda _: [Entry("file", content=b"")]
    )
    made = []
    for number in range(8):
        made.append(cached_layer("name", layer.fingerprint(number), lambda _: [Entry("file", content=b"")]))
        os.utime(made[-1].tar.parent, (number + 1, number + 1))
    last = cached_layer("name", layer.fingerprint("last"), lambda _: [Entry("file", content=b"last")])
    assert last.tar.exists()
    assert made[-1].tar.exists()
    assert not made[0].tar.exists()
    assert other.tar.exists()
