"""What the example manifests become, in full and readable: a change of any builder shows up here as a diff.

After a wanted change: UPDATE_GOLDEN=1 pytest operator/tests/test_golden_rendering.py, then read the diff.
"""

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from disagg_operator.cli import app

REPOSITORY = Path(__file__).resolve().parents[2]
GOLDEN = Path(__file__).parent / "golden"
EXAMPLES = sorted(
    path
    for path in (REPOSITORY / "examples").rglob("*.yaml")
    if "\nkind: DisaggInference\n" in path.read_text()
)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_renders_as_recorded(example: Path) -> None:
    images = ["--router-image", "disagg-router:test", "--connector-image", "disagg-connector:test"]
    result = CliRunner().invoke(app, ["render", str(example), *images])
    assert result.exit_code == 0, result.output
    golden = GOLDEN / f"{example.stem}.yaml"
    if os.environ.get("UPDATE_GOLDEN"):
        golden.write_text(result.stdout)
    assert golden.exists(), f"no {golden}: run with UPDATE_GOLDEN=1"
    assert result.stdout == golden.read_text()


def test_there_are_examples() -> None:
    assert EXAMPLES


def test_a_manifest_without_our_kind_is_an_error(tmp_path: Path) -> None:
    other = tmp_path / "other.yaml"
    other.write_text("apiVersion: v1\nkind: ConfigMap\nmetadata: {name: x}\n")
    result = CliRunner().invoke(app, ["render", str(other)])
    assert result.exit_code == 1
    assert "no object of kind DisaggInference" in result.output


def test_a_spec_that_is_refused_is_an_error_with_its_reason(tmp_path: Path) -> None:
    manifest = tmp_path / "fail.yaml"
    manifest.write_text(
        "apiVersion: inference.disagg.dev/v1alpha1\nkind: DisaggInference\nmetadata: {name: x}\n"
        "spec: {model: {uri: 'hf://a/b'}, engine: {image: x}, kvTransfer: {loadFailurePolicy: Fail}}\n"
    )
    result = CliRunner().invoke(app, ["render", str(manifest)])
    assert result.exit_code == 1
    assert (
        "x: NotImplemented: spec.kvTransfer.loadFailurePolicy: Fail is not implemented yet" in result.output
    )
