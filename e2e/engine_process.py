"""How a server's process is started: by its own command, or as a fork of one that has imported vLLM (`engine_parent`)."""

import atexit
import functools
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Protocol

from e2e.images.engine import ensure_bundle
from e2e.images.engine_bundle import EngineError

_PARENT = Path(__file__).with_name("engine_parent.py")
_IMPORT_SECONDS = 300.0
_FORK_SECONDS = 300.0
_END_SECONDS = 60.0


class Process(Protocol):
    """What of `subprocess.Popen` an engine needs. The process leads a group of its own."""

    pid: int

    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def terminate(self) -> None: ...


def spawn(command: Sequence[str], environment: Mapping[str, str], folder: Path, log: Path) -> Process:
    """Start `command`."""
    with log.open("ab") as output:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env=environment,
            start_new_session=True,
        )


def fork(arguments: Sequence[str], environment: Mapping[str, str], folder: Path, log: Path) -> Process:
    """Start the vllm command with `arguments` as a fork of the parent, which is started first where there is none.

    Raises:
        EngineError: there is no parent, or it does not answer.
    """
    order = {
        "arguments": list(arguments),
        "environment": dict(environment),
        "folder": str(folder),
        "log": str(log),
    }
    parent = _parent_for(environment)
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(_FORK_SECONDS)
    try:
        connection.connect(str(parent))
        connection.sendall(json.dumps(order).encode() + b"\n")
        return _Forked(connection)
    except (OSError, ValueError) as error:
        connection.close()
        raise EngineError(f"The parent of engines does not fork: {error!r}.") from error


class _Forked:
    """A fork, as its keeper tells of it."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._told = connection.makefile("r")
        self.pid = int(self._told.readline())
        self._status: int | None = None

    def poll(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            return self.wait(0)
        return None

    def wait(self, timeout: float | None = None) -> int:
        if self._status is None:
            if not _readable(self._connection, timeout):
                raise subprocess.TimeoutExpired(f"engine {self.pid}", timeout or 0)
            self._connection.settimeout(_FORK_SECONDS)
            # A keeper that ends without a word has been killed; so is what it kept, or it soon will be.
            self._status = int(self._told.readline() or -signal.SIGKILL)
            self._told.close()
            self._connection.close()
        return self._status

    def terminate(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGTERM)


def _readable(source: socket.socket | IO[bytes], timeout: float | None) -> bool:
    return bool(select.select([source], [], [], timeout)[0])


# What an interpreter, torch or vLLM reads once, when it starts or is imported. Servers that differ in it cannot have one parent.
_READ_ONCE = ("CUDA_", "HF_", "LANG", "LC_", "LD_", "OMP_", "PATH", "PYTHON")


def _parent_for(environment: Mapping[str, str]) -> Path:
    once = {key: value for key, value in environment.items() if key.startswith(_READ_ONCE)}
    once.pop("PYTHONPATH", None)
    return _parent(frozenset(once.items()))


@functools.cache
def _parent(environment: frozenset[tuple[str, str]]) -> Path:
    """The socket of a parent with this environment. It ends with this process, whose end of a pipe it holds."""
    folder = Path(tempfile.mkdtemp(prefix="engine-parent-"))
    listens, log = folder / "socket", folder / "parent.log"
    with log.open("wb") as errors:
        parent = subprocess.Popen(
            [str(ensure_bundle() / "bin" / "python3"), "-P", str(_PARENT), str(listens)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            cwd=folder,
            env={"HOME": str(folder), "TMPDIR": str(folder), **dict(environment)},
            start_new_session=True,
        )
    assert parent.stdout is not None
    if not _readable(parent.stdout, _IMPORT_SECONDS) or parent.stdout.readline() != b"ready\n":
        parent.kill()
        raise EngineError(
            f"No process to fork engines from after {_IMPORT_SECONDS:.0f} s.\n{log.read_text()[-2000:]}"
        )
    atexit.register(_end, parent, folder)
    return listens


def _end(parent: subprocess.Popen[bytes], folder: Path) -> None:
    assert parent.stdin is not None
    parent.stdin.close()
    try:
        parent.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        parent.kill()
    shutil.rmtree(folder, ignore_errors=True)
