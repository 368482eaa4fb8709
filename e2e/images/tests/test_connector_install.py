"""The entrypoint of the connector's image puts the package where an engine finds it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from e2e.images.recipes import REPOSITORY

INSTALLER = REPOSITORY / "connector" / "install.py"


@pytest.fixture
def application(tmp_path: Path) -> Path:
    """A folder with a package of the connector's name that, like the real one, cannot be imported in this image."""
    package = tmp_path / "app" / "disagg_connector"
    (package / "compat").mkdir(parents=True)
    (package / "__init__.py").write_text("import a_package_that_only_engines_have\n")
    (package / "compat" / "v1.py").write_text("VERSION = 1\n")
    (package / "__pycache__").mkdir()
    (package / "__pycache__" / "stale.pyc").write_bytes(b"")
    return tmp_path / "app"


def install(application: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, INSTALLER, *arguments]
    env = {**os.environ, "PYTHONPATH": str(application)}
    return subprocess.run(
        [str(word) for word in command], env=env, capture_output=True, text=True, check=False
    )


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_the_package_is_copied_without_bytecode(application: Path, tmp_path: Path) -> None:
    target = tmp_path / "volume" / "connector"
    assert install(application, target).returncode == 0
    assert files(target) == ["disagg_connector/__init__.py", "disagg_connector/compat/v1.py"]


def test_a_second_run_replaces_the_first(application: Path, tmp_path: Path) -> None:
    install(application, tmp_path / "volume")
    (application / "disagg_connector" / "compat" / "v1.py").rename(
        application / "disagg_connector" / "compat" / "v2.py"
    )
    assert install(application, tmp_path / "volume").returncode == 0
    assert files(tmp_path / "volume") == ["disagg_connector/__init__.py", "disagg_connector/compat/v2.py"]


def test_the_rest_of_an_interrupted_copy_does_no_harm(application: Path, tmp_path: Path) -> None:
    rest = tmp_path / "volume" / ".disagg_connector.new"
    rest.mkdir(parents=True)
    (rest / "half").write_text("")
    assert install(application, tmp_path / "volume").returncode == 0
    assert files(tmp_path / "volume") == ["disagg_connector/__init__.py", "disagg_connector/compat/v1.py"]


def test_a_folder_that_cannot_be_written_is_named(application: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    ended = install(application, tmp_path / "file" / "below")
    assert ended.returncode == 1
    assert str(tmp_path / "file" / "below") in ended.stderr
    assert "Is the volume writable?" in ended.stderr


def test_an_image_without_the_package_says_so(tmp_path: Path) -> None:
    # -S: without the site-packages where this checkout's own connector is installed.
    command = [sys.executable, "-S", str(INSTALLER), str(tmp_path)]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ended = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert "disagg_connector is not on the Python path" in ended.stderr


def test_no_folder_or_two_are_refused(application: Path) -> None:
    assert install(application).returncode == 2
    assert install(application, "a", "b").returncode == 2
