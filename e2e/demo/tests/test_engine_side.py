"""Building engine and model beside everything else."""

from pathlib import Path

import pytest

from e2e.demo.engine_side import engine_needs
from e2e.images import engine_bundle

MORE_THAN_ANY_DISK = 10**18


@pytest.fixture(autouse=True)
def empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A cache without a bundle, in a folder that does not exist yet."""
    monkeypatch.setenv("DISAGG_CACHE", str(tmp_path / "not" / "yet"))
    return tmp_path / "not" / "yet"


def test_too_small_a_disk_is_told_with_all_that_goes_onto_it(empty_cache: Path) -> None:
    (need,) = engine_needs(beside=MORE_THAN_ANY_DISK)
    assert f"1000000009 GB of disk at {empty_cache}" in need.what
    assert "DISAGG_CACHE" in need.remedy


def test_a_bundle_that_is_cached_needs_nothing(empty_cache: Path) -> None:
    name = engine_bundle.current_bundle_name(engine_bundle.find_interpreter())
    (empty_cache / name).mkdir(parents=True)
    assert engine_needs(beside=MORE_THAN_ANY_DISK) == []


def test_a_missing_interpreter_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> engine_bundle.Interpreter:
        raise engine_bundle.EngineError("install python3.11")

    monkeypatch.setattr(engine_bundle, "find_interpreter", none)
    (need,) = engine_needs()
    assert "install python3.11" in need.remedy
