"""Ports to listen at, which nothing else takes between the choice and the listening.

A port that the kernel gives to a socket bound to port 0 may be given to any connection of the host a moment later.
Those here lie outside of the range that the kernel gives from, and a lock file keeps runs side by side apart.
"""

from __future__ import annotations

import fcntl
import os
import random
import socket
import tempfile
from pathlib import Path
from typing import IO

HOST = "127.0.0.1"
_RANGE = range(21000, 30000)


class ReservedPorts:
    """`numbers` are ports of the loopback that no other user of this class takes until they are released.

    Raises:
        RuntimeError: there are not so many free ones.
    """

    def __init__(self, count: int) -> None:
        folder = Path(tempfile.gettempdir()) / f"disagg-ports-{os.getuid()}"
        folder.mkdir(exist_ok=True)
        self.numbers: list[int] = []
        self._locks: list[IO[str]] = []
        for port in random.sample(_RANGE, len(_RANGE)):
            if len(self.numbers) == count:
                return
            lock = (folder / str(port)).open("w")
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                with socket.socket() as probe:
                    probe.bind((HOST, port))
            except OSError:
                lock.close()
                continue
            self.numbers.append(port)
            self._locks.append(lock)
        self.release()
        raise RuntimeError(f"There are no {count} free ports from {_RANGE.start} to {_RANGE.stop - 1}.")

    def release(self) -> None:
        for lock in self._locks:
            lock.close()
        self._locks.clear()


_of_this_process: list[ReservedPorts] = []


def free_port() -> int:
    """A port that is this process's until it ends."""
    _of_this_process.append(ReservedPorts(1))
    return _of_this_process[-1].numbers[0]
