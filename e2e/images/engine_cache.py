"""Folders that are expensive to make, made once.

A cached folder is either absent or complete: it is built beside its final place and renamed into it. A lock file
lets one of several runs build while the others wait, and whoever holds the lock removes what a killed run left.
"""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

Say = Callable[[str], None]
"""Receives one line of progress at a time."""


def say(line: str) -> None:
    """Print one line of progress at once, also when the output is a pipe."""
    print(line, flush=True)


def cache_root() -> Path:
    """The folder for everything cached: `$DISAGG_CACHE`, else `~/.cache/disagg-inference`."""
    configured = os.environ.get("DISAGG_CACHE")
    return Path(configured) if configured else Path.home() / ".cache" / "disagg-inference"


def build_once(target: Path, build: Callable[[Path], None], report: Say) -> Path:
    """Return `target`, calling `build(folder)` to fill a new folder for it if it does not exist yet.

    Safe against two runs at once and against a run that is killed half-way. Raises what `build` raises, and then
    leaves nothing behind.
    """
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target.with_name(f".{target.name}.lock"), target.name, report):
        if target.is_dir():
            return target
        for stale in target.parent.glob(f".{target.name}.building-*"):
            shutil.rmtree(stale)
        unfinished = Path(tempfile.mkdtemp(prefix=f".{target.name}.building-", dir=target.parent))
        try:
            build(unfinished)
            unfinished.chmod(0o755)
            unfinished.rename(target)
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise
    return target


@contextmanager
def _locked(path: Path, what: str, report: Say) -> Iterator[None]:
    with path.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report(f"{what}: another run is building it, waiting for that one")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
