"""What is taken out of the next vLLM's wheel, and how its folder is called."""

import importlib.metadata
import sys
import zipfile
from pathlib import Path

import pytest

from e2e.images import engine_next
from e2e.images.engine import EngineError

METADATA = "Metadata-Version: 2.4\nName: vllm\nVersion: 9.1.0\nSummary: Version: 9.1.0 of it\n"


def _wheel(tmp_path: Path, metadata: str = METADATA) -> Path:
    path = tmp_path / "vllm-9.1.0-cp38-abi3-manylinux_2_28_x86_64.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name in ("vllm/__init__.py", "vllm/v1/request.py", "vllm/_C.abi3.so", "vllm/a.cu", "other/x.py"):
            archive.writestr(name, f"# {name}\n")
        archive.writestr("vllm-9.1.0.dist-info/METADATA", metadata)
    return path


def test_python_files_alone_are_taken_and_the_platform_is_cpu(tmp_path: Path) -> None:
    folder = tmp_path / "next"
    engine_next.extract_python(_wheel(tmp_path), folder, "9.1.0")
    files = {str(path.relative_to(folder)) for path in folder.rglob("*.*") if path.is_file()}
    assert files == {"vllm/__init__.py", "vllm/v1/request.py"}
    (found,) = importlib.metadata.distributions(name="vllm", path=[str(folder)])
    assert found.version == "9.1.0+cpu"


def test_a_wheel_of_another_version_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"no package vllm with vllm-9\.2\.0"):
        engine_next.extract_python(_wheel(tmp_path), tmp_path / "next", "9.2.0")
    with pytest.raises(EngineError, match="exactly once"):
        engine_next.extract_python(_wheel(tmp_path, "Name: vllm\n"), tmp_path / "next", "9.1.0")


def test_the_name_tells_the_version_and_changes_with_the_lock() -> None:
    lock = b"vllm==9.1.0 \\\n    --hash=sha256:00\n    # via -r x\n"
    name = engine_next.next_name(lock)
    assert name.startswith("vllm-9.1.0-")
    assert engine_next.next_name(lock.replace(b"00", b"01")) != name


@pytest.mark.parametrize("lock", ["torch==2.0\n", "vllm==1.0 \\\nvllm==2.0 \\\n"])
def test_a_lock_that_does_not_pin_one_vllm_is_refused(lock: str) -> None:
    with pytest.raises(EngineError, match="must pin one version"):
        engine_next.next_version(lock)


def test_the_pinned_version_is_one_that_the_connector_supports() -> None:
    from disagg_connector.compat import SUPPORTED

    version = engine_next.next_version(engine_next.LOCK_FILE.read_text())
    assert version.rpartition(".")[0] == list(SUPPORTED)[-1]


@pytest.mark.parametrize("failures", [engine_next._ATTEMPTS - 1, engine_next._ATTEMPTS])
def test_a_download_that_breaks_off_is_begun_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    pip, into = tmp_path / "python", tmp_path / "into"
    pip.write_text(
        f"#!/bin/sh\necho >> {tmp_path}/runs\n"
        f"[ $(wc -l < {tmp_path}/runs) -gt {failures} ] || {{ echo 'connection broken' >&2; exit 1; }}\n"
        f"mkdir -p {into} && echo > {into}/vllm.whl\n"
    )
    pip.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(pip))
    if failures < engine_next._ATTEMPTS:
        assert engine_next._download(into) == into / "vllm.whl"
    else:
        with pytest.raises(EngineError, match="connection broken"):
            engine_next._download(into)
