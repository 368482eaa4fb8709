"""The generated files: current in the repository, and a stale one is noticed."""

from pathlib import Path

import pytest
import yaml

from disagg_operator.api import crd

ROOT = Path(__file__).parents[3]


def test_the_checked_in_files_are_current() -> None:
    assert crd.main(["--check", "--root", str(ROOT)]) == 0


def test_a_stale_file_is_noticed_with_a_diff_and_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "pyproject.toml").touch()
    assert crd.main(["--root", str(tmp_path)]) == 0
    assert crd.main(["--check", "--root", str(tmp_path)]) == 0
    path = tmp_path / "crds" / "inference.disagg.dev_disagginferences.yaml"
    path.write_text(path.read_text().replace("default: 120", "default: 30", 1))
    assert crd.main(["--check", "--root", str(tmp_path)]) == 1
    complaint = capsys.readouterr().err
    assert "default: 30" in complaint
    assert "make crds" in complaint


def test_elsewhere_than_in_the_repository_nothing_is_written(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        crd.main(["--root", str(tmp_path)])
    assert list(tmp_path.iterdir()) == []


def test_the_yaml_says_what_the_crd_is() -> None:
    for manifest in (crd.disagginference_crd(), crd.scaler_crd()):
        assert yaml.safe_load(crd.to_yaml(manifest)) == manifest


def test_the_scaler_can_be_scaled_and_the_inference_cannot() -> None:
    scaler, inference = (
        c["spec"]["versions"][0]["subresources"] for c in (crd.scaler_crd(), crd.disagginference_crd())
    )
    assert scaler["scale"]["labelSelectorPath"] == ".status.selector"
    assert "scale" not in inference


def test_columns_show_readiness_of_both_pools() -> None:
    columns = crd.disagginference_crd()["spec"]["versions"][0]["additionalPrinterColumns"]
    narrow = [column["name"] for column in columns if not column.get("priority")]
    assert narrow == ["Ready", "Prefill", "Decode", "Reuse%", "Mode", "Age"]


def test_the_chart_takes_the_same_schema_as_the_crd_folder() -> None:
    for name, text in crd.generated_files().items():
        if name.startswith("crds/"):
            template = (ROOT / "charts/disagg-operator/templates" / name).read_text()
            assert text.split("spec:\n", 1)[1] in template
