"""Cached folders are absent or complete, whoever builds them and however that ends."""

import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest

from e2e.images.engine_cache import build_once, cache_root


def _write_content(folder: Path) -> None:
    (folder / "content").write_text("complete")


def test_a_folder_is_built_once_and_then_returned(tmp_path: Path) -> None:
    builds: list[Path] = []

    def build(folder: Path) -> None:
        builds.append(folder)
        _write_content(folder)

    first = build_once(tmp_path / "x", build, print)
    second = build_once(tmp_path / "x", build, print)

    assert first == second == tmp_path / "x"
    assert len(builds) == 1
    assert (first / "content").read_text() == "complete"


def test_others_may_read_the_folder(tmp_path: Path) -> None:
    assert build_once(tmp_path / "x", _write_content, print).stat().st_mode & 0o777 == 0o755


def test_a_failed_build_leaves_nothing_and_the_next_one_succeeds(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        _write_content(folder)
        raise RuntimeError("half-way")

    with pytest.raises(RuntimeError, match="half-way"):
        build_once(tmp_path / "x", fail, print)
    assert [path.name for path in tmp_path.iterdir()] == [".x.lock"]

    assert (build_once(tmp_path / "x", _write_content, print) / "content").exists()


def _build_and_hang(target: Path, begun: Path) -> None:
    def build(folder: Path) -> None:
        _write_content(folder)
        begun.touch()
        time.sleep(600)

    build_once(target, build, print)


def test_what_a_killed_build_left_is_removed_by_the_next(tmp_path: Path) -> None:
    target, begun = tmp_path / "cache" / "x", tmp_path / "begun"
    child = multiprocessing.get_context("fork").Process(target=_build_and_hang, args=(target, begun))
    child.start()
    try:
        _wait_for(begun)
    finally:
        assert child.pid is not None
        os.kill(child.pid, signal.SIGKILL)
        child.join()
    assert not target.exists()
    assert list(target.parent.glob(".x.building-*"))

    build_once(target, _write_content, print)

    assert (target / "content").exists()
    assert not list(target.parent.glob(".x.building-*"))


def _build_slowly(target: Path, begun: Path, proceed: Path) -> None:
    def build(folder: Path) -> None:
        begun.touch()
        _wait_for(proceed)
        _write_content(folder)

    build_once(target, build, print)


def test_a_second_run_waits_for_the_first_and_builds_nothing(tmp_path: Path) -> None:
    target, begun, proceed = tmp_path / "cache" / "x", tmp_path / "begun", tmp_path / "proceed"
    child = multiprocessing.get_context("fork").Process(target=_build_slowly, args=(target, begun, proceed))
    child.start()
    said: list[str] = []

    def let_the_first_finish(line: str) -> None:
        said.append(line)
        proceed.touch()

    try:
        _wait_for(begun)
        built = build_once(target, lambda _: pytest.fail("built a second time"), let_the_first_finish)
    finally:
        proceed.touch()
        child.join(120)
    assert (built / "content").read_text() == "complete"
    assert said == ["x: another run is building it, waiting for that one"]


def test_the_cache_can_be_moved(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DISAGG_CACHE", str(tmp_path))
    assert cache_root() == tmp_path


def _wait_for(path: Path, limit_seconds: float = 120) -> None:
    deadline = time.monotonic() + limit_seconds
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.01)
