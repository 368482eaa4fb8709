"""The next vLLM's Python files, to be laid in front of the engine bundle's packages.

The connector supports two vLLM series, and only one of them has a build for CPU. Of the other the published wheel is
taken, without its compiled libraries (for GPUs, four fifths of it): what schedules requests and moves KV is Python,
and runs on the bundle's interpreter and packages. No engine can be started from it.
"""

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

from e2e.images.engine_bundle import EngineError
from e2e.images.engine_cache import Say

LOCK_FILE = Path(__file__).parents[2] / "requirements" / "engine-next.txt"
_ATTEMPTS = 3
RECIPE_VERSION = "1"
"""Raise this when the code below changes what is taken out of the wheel."""


def next_version(lock: str) -> str:
    """The version of vLLM that `lock` pins.

    Raises:
        EngineError: it does not pin exactly vLLM.
    """
    pins = [line.split()[0].split("==") for line in lock.splitlines() if line.startswith("vllm==")]
    if len(pins) != 1:
        raise EngineError(f"{LOCK_FILE.name} must pin one version of vllm; it has {len(pins)}.")
    return pins[0][1]


def next_name(lock: bytes) -> str:
    """The cache folder's name: the version, and a hash of everything that decides the content."""
    content = hashlib.sha256(lock + RECIPE_VERSION.encode()).hexdigest()[:12]
    return f"vllm-{next_version(lock.decode())}-{content}"


def build_next(folder: Path, report: Say) -> None:
    """Fill `folder` with what the pinned wheel has in Python: a folder for PYTHONPATH.

    Raises:
        EngineError: the wheel cannot be had, or is not what the recipe expects.
    """
    version = next_version(LOCK_FILE.read_text())
    report(f"vLLM {version}: downloading its wheel for the Python files in it (340 MB)")
    wheel = _download(folder / ".download")
    extract_python(wheel, folder, version)
    wheel.unlink()
    wheel.parent.rmdir()


def _download(into: Path) -> Path:
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--disable-pip-version-check",
        "--no-cache-dir",
    ]
    command += [
        "--no-deps",
        "--require-hashes",
        "--only-binary=:all:",
        "--dest",
        str(into),
        "-r",
        str(LOCK_FILE),
    ]
    for _ in range(_ATTEMPTS):  # pip begins again only where it got no answer at all
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            break
    wheels = list(into.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        last = "\n".join((done.stdout + done.stderr).strip().splitlines()[-15:])
        raise EngineError(
            f"Downloading the wheel of requirements/{LOCK_FILE.name} failed (exit {done.returncode}):\n{last}"
        )
    return wheels[0]


def extract_python(wheel: Path, folder: Path, version: str) -> None:
    """Take the package `vllm` without compiled libraries and sources for GPUs out of a wheel.

    Its distribution is called a build for CPU: vLLM takes its platform from that.

    Raises:
        EngineError: the wheel is not one of vLLM.
    """
    metadata = f"vllm-{version}.dist-info/METADATA"
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.startswith("vllm/") and name.endswith(".py")]
        if not names or metadata not in archive.namelist():
            raise EngineError(f"{wheel.name} has no package vllm with {metadata}.")
        archive.extractall(folder, names)
        told = archive.read(metadata).decode()
    line = f"Version: {version}\n"
    if told.count(line) != 1:
        raise EngineError(f"{metadata} in {wheel.name} does not say `{line.strip()}` exactly once.")
    distribution = folder / f"vllm-{version}+cpu.dist-info"
    distribution.mkdir()
    (distribution / "METADATA").write_text(told.replace(line, f"Version: {version}+cpu\n"))
    (distribution / "INSTALLER").write_text("disagg-inference\n")
