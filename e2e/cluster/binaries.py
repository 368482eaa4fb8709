"""Building the cluster's programs with `go build`, once, into the cache.

A program is either absent or complete: it is built beside its final place and renamed into it. A killed run loses at
most the program it was at, and Go's own build cache keeps the compiled packages of that one.
"""

import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from e2e.cluster.errors import ClusterError, CommandError
from e2e.cluster.progress import Progress
from e2e.cluster.recipes import Toolset, toolset_of
from e2e.cluster.shell import STILL_RUNNING, Result, run
from e2e.images.engine_cache import cache_root

_BUILD_LIMIT_SECONDS = 3600.0
_ATTEMPTS = 3
_PAUSE_SECONDS = 10.0


def folder_of(toolset: Toolset) -> Path:
    """Where a tool set's programs lie, built or not."""
    return cache_root() / f"bin-{toolset.name}-{toolset.digest()}"


def path_of(program: str) -> Path:
    """Where a program lies, built or not."""
    return folder_of(toolset_of(program)) / program


def missing(programs: Iterable[str]) -> list[str]:
    """Those of `programs` that have to be built."""
    return [program for program in programs if not _is_complete(program)]


def ensure(programs: Iterable[str], progress: Progress) -> Mapping[str, Path]:
    """Build what is missing of `programs` and return where each lies.

    Raises:
        ClusterError: one cannot be built; the message carries the compiler's words.
    """
    wanted = list(programs)
    todo = missing(wanted)
    for number, program in enumerate(todo, start=1):
        toolset = toolset_of(program)
        with _locked(folder_of(toolset)):
            if not _is_complete(program):
                with progress.long_step(f"building {program} ({number} of {len(todo)})"):
                    _build(toolset, program)
    return {program: path_of(program) for program in wanted}


def _is_complete(program: str) -> bool:
    toolset = toolset_of(program)
    folder = folder_of(toolset)
    assets = (Path(name).name for names in toolset.assets.values() for name in names)
    return (folder / program).is_file() and all((folder / name).is_file() for name in assets)


def _build(toolset: Toolset, program: str) -> None:
    folder = folder_of(toolset)
    for stale in folder.glob(".*.building"):
        stale.unlink(missing_ok=True)
    _copy_assets(toolset, folder)
    unfinished = folder / f".{program}.{os.getpid()}.building"
    flags = f"{os.environ.get('GOFLAGS', '')} -mod=readonly".strip()
    env = {"CGO_ENABLED": "1" if toolset.cgo else "0", "GOFLAGS": flags, "GOWORK": "off"}

    def go_build() -> None:
        run(
            toolset.build_command(program, unfinished),
            f"Building {program}",
            env=env,
            cwd=toolset.folder,
            timeout=_BUILD_LIMIT_SECONDS,
        )

    try:
        _insist(go_build)
    except CommandError as error:
        raise ClusterError(
            f"{error}\nGo fetches modules through the proxy that `go env GOPROXY` names: check that it is reachable and "
            f"that the disk is not full, then run the same command again; what is built already is kept."
        ) from error
    unfinished.rename(folder / program)


def _insist(fetch: Callable[[], Result]) -> Result:
    """Try what fetches modules some times. Go asks once for each, and keeps what it has got and compiled."""
    for left in reversed(range(_ATTEMPTS)):
        try:
            return fetch()
        except CommandError as error:
            if not left or error.code == STILL_RUNNING:
                raise
            time.sleep(_PAUSE_SECONDS)
    raise AssertionError


def _copy_assets(toolset: Toolset, folder: Path) -> None:
    for module, names in toolset.assets.items():
        download = ["go", "mod", "download", "-json", module]
        described = _insist(partial(run, download, f"Fetching {module}", cwd=toolset.folder, timeout=600))
        source = Path(json.loads(described)["Dir"])
        for name in names:
            unfinished = folder / f".{Path(name).name}.building"
            shutil.copyfile(source / name, unfinished)
            unfinished.rename(folder / Path(name).name)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
