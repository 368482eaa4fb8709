"""Making models: naming, and what the caller learns when a script fails."""

from pathlib import Path

import pytest

from e2e.images import engine_models
from e2e.images.engine import EngineError, ensure_model
from e2e.images.engine_models import ModelRecipe


def test_an_unknown_model_is_refused_before_anything_is_built() -> None:
    with pytest.raises(EngineError, match=r"'gpt2'.*smollm2-135m, tiny-qwen3"):
        ensure_model("gpt2")


def test_the_folder_changes_with_the_script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = tmp_path / "make.py"
    monkeypatch.setitem(engine_models.RECIPES, "x", ModelRecipe(script, "making x"))
    script.write_text("one")
    first = engine_models.model_folder_name("x")
    script.write_text("two")
    assert engine_models.model_folder_name("x") != first
    assert first.startswith("model-x-")


def _bundle_whose_python_runs(tmp_path: Path, script: str) -> Path:
    python = tmp_path / "bundle" / "bin" / "python3"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    return tmp_path / "bundle"


def test_a_failing_script_is_told_with_its_last_words(tmp_path: Path) -> None:
    bundle = _bundle_whose_python_runs(tmp_path, "echo no such tensor >&2; exit 3")
    with pytest.raises(EngineError, match=r"(?s)tiny-qwen3.*exit 3.*no such tensor"):
        engine_models.build_model("tiny-qwen3", tmp_path, bundle, print)


def test_files_are_readable_for_everybody(tmp_path: Path) -> None:
    bundle = _bundle_whose_python_runs(tmp_path, 'touch "$3/weights"; chmod 600 "$3/weights"')
    folder = tmp_path / "model"
    folder.mkdir()
    engine_models.build_model("tiny-qwen3", folder, bundle, print)
    assert (folder / "weights").stat().st_mode & 0o777 == 0o644
