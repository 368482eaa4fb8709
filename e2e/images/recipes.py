"""Our images for local clusters. What a container of each starts is the same as in the Dockerfiles; a test compares."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from e2e.images import python_base
from e2e.images.archive import Image
from e2e.images.layer import Entry, Layer, cached_layer, fingerprint, folder_entries
from e2e.images.shared_objects import shared_objects_below

REPOSITORY = Path(__file__).resolve().parents[2]
DEPENDENCIES = "opt/disagg/deps"
APPLICATION = "opt/disagg/app"
_PATH = "/usr/local/bin:/usr/bin:/bin"
_PYTHON_ENV = {
    "PATH": _PATH,
    "PYTHONPATH": f"/{APPLICATION}:/{DEPENDENCIES}",
    "PYTHONUNBUFFERED": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "SSL_CERT_FILE": "/etc/ssl/certs/ca-certificates.crt",
    "HOME": "/home/nonroot",
}


class ImageError(Exception):
    """An image cannot be built."""


@dataclass(frozen=True)
class Recipe:
    """How one image is made."""

    reference: str
    layers: Callable[[], tuple[Layer, ...]]
    entrypoint: tuple[str, ...] = ()
    user: str = python_base.USER
    env: dict[str, str] = field(default_factory=lambda: dict(_PYTHON_ENV))
    dockerfile: str | None = None
    """Of the production image, relative to the repository; None for an image of local clusters alone."""

    def build(self) -> Image:
        """The image, its layers built where the cache lacks them."""
        return Image(self.reference, self.layers(), self.entrypoint, self.user, self.env)


def dependencies_layers(name: str) -> tuple[Layer, ...]:
    """The packages that requirements/`name`.txt locks: first those that all our images share, then its own.

    Raises:
        ImageError: uv cannot install them.
    """
    locks = {path.stem: locked_packages(path.read_text()) for path in map(_lock_path, ("operator", "router"))}
    shared = set.intersection(*(set(lock.items()) for lock in locks.values()))
    own = set(locks[name].items()) - shared
    return (_dependencies_layer("shared", dict(shared)), _dependencies_layer(name, dict(own)))


def locked_packages(lock: str) -> dict[str, str]:
    """Splits a lock file by package: `name==version` -> its lines, with the hashes and without comments."""
    packages: dict[str, str] = {}
    head = ""
    for line in lock.splitlines():
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        if not line[0].isspace():
            head = line.split()[0]
            packages[head] = ""
        packages[head] += line + "\n"
    return packages


def package_layer(folder: Path) -> Layer:
    """One Python package of ours."""
    return cached_layer(folder.name, _content_key(folder), lambda scratch: _package(folder, scratch))


def pause_layer() -> Layer:
    """The program that holds a pod's namespaces: static C, so that the image needs nothing else."""
    source = Path(__file__).parent / "pause.c"
    return cached_layer("pause", fingerprint(source.read_bytes()), lambda scratch: _pause(source, scratch))


def _operator() -> tuple[Layer, ...]:
    package = REPOSITORY / "operator" / "src" / "disagg_operator"
    return (python_base.base_layer(), *dependencies_layers("operator"), package_layer(package))


def _router() -> tuple[Layer, ...]:
    package = REPOSITORY / "router" / "src" / "disagg_router"
    return (python_base.base_layer(), *dependencies_layers("router"), package_layer(package))


def _connector() -> tuple[Layer, ...]:
    package = REPOSITORY / "connector" / "src" / "disagg_connector"
    installer = REPOSITORY / "connector" / "install.py"
    install = Entry("opt/disagg/install.py", source=installer, mode=0o644)
    layer = cached_layer("install", fingerprint(installer.read_bytes()), lambda _: [install])
    return (python_base.base_layer(), layer, package_layer(package))


def _engine_cpu() -> tuple[Layer, ...]:
    entries = [*python_base.SKELETON, Entry("opt/engine"), Entry("models"), Entry("var/tmp", mode=0o1777)]
    return (cached_layer("engine-cpu", fingerprint(entries), lambda _: entries),)


PAUSE = Recipe("localhost/disagg/pause:1", lambda: (pause_layer(),), ("/pause",), env={})
RECIPES = {
    "pause": PAUSE,
    # The base alone, for clients and servers that tests run in the cluster.
    "python": Recipe("localhost/disagg/python:dev", lambda: (python_base.base_layer(),)),
    "operator": Recipe(
        "localhost/disagg/operator:dev",
        _operator,
        ("python", "-m", "disagg_operator"),
        dockerfile="operator/Dockerfile",
    ),
    "router": Recipe(
        "localhost/disagg/router:dev",
        _router,
        ("python", "-m", "disagg_router"),
        dockerfile="router/Dockerfile",
    ),
    "connector": Recipe(
        "localhost/disagg/connector:dev",
        _connector,
        ("python", "/opt/disagg/install.py"),
        dockerfile="connector/Dockerfile",
    ),
    # Empty: the CPU profile mounts the host's /usr and the engine bundle over it. An image of its 6 GB is not worth
    # importing into every node.
    "engine-cpu": Recipe(
        "localhost/disagg/engine-cpu:dev",
        _engine_cpu,
        env={"PATH": f"/opt/engine/bin:{_PATH}", "HOME": "/tmp"},
    ),
}


def _lock_path(name: str) -> Path:
    return REPOSITORY / "requirements" / f"{name}.txt"


def _dependencies_layer(name: str, packages: dict[str, str]) -> Layer:
    lock = "".join(packages[head] for head in sorted(packages))
    key = fingerprint(lock, sys.version, python_base.RECIPE)
    return cached_layer(f"{name}-deps", key, lambda scratch: _dependencies(name, lock, scratch))


def _dependencies(name: str, lock: str, scratch: Path) -> list[Entry]:
    requirements = scratch / "requirements.txt"
    requirements.write_text(lock)
    target = scratch / "deps"
    target.mkdir()
    uv = Path(sys.prefix) / "bin" / "uv"
    command = [uv, "pip", "install", "--quiet", "--require-hashes", "--no-deps", "--only-binary=:all:"]
    command += ["--python", sys.executable, "--target", target, "-r", requirements]
    _run([str(word) for word in command], f"Installing the {name} packages into an image layer")
    # Scripts would name the interpreter of the machine that installed them.
    shutil.rmtree(target / "bin", ignore_errors=True)
    (target / ".lock").unlink(missing_ok=True)
    python_base.compile_folder(target, DEPENDENCIES)
    return [*folder_entries(target, DEPENDENCIES), *_extra_libraries(target)]


def _extra_libraries(folder: Path) -> list[Entry]:
    """Libraries of the machine that the packages load and the base does not have."""
    base = {entry.path for entry in python_base.library_entries([python_base.interpreter()])}
    needed = python_base.library_entries(shared_objects_below(folder))
    bundled = {path.name for path in shared_objects_below(folder)}
    return [entry for entry in needed if entry.path not in base and Path(entry.path).name not in bundled]


def _package(folder: Path, scratch: Path) -> list[Entry]:
    copy = scratch / folder.name
    shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("__pycache__"))
    place = f"{APPLICATION}/{folder.name}"
    python_base.compile_folder(copy, place)
    return folder_entries(copy, place)


def _content_key(folder: Path) -> str:
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and "__pycache__" not in path.parts]
    content = [(str(path.relative_to(folder)), path.read_bytes()) for path in files]
    return fingerprint(content, sys.version, python_base.RECIPE)


def _pause(source: Path, scratch: Path) -> list[Entry]:
    program = scratch / "pause"
    command = ["gcc", "-static", "-Os", "-s", "-Wall", "-Werror", "-o", str(program), str(source)]
    _run(command, f"Compiling {source.name}")
    return [Entry("pause", source=program)]


def _run(command: list[str], doing: str) -> None:
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode != 0:
        raise ImageError(f"{doing} failed:\n{ended.stderr.strip()}")
