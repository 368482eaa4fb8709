"""The cluster's long-running processes: started in a network namespace, remembered, recognised again.

A process is remembered by its id and the time it started, so an id that the kernel has given to somebody else in the
meantime is never taken for ours.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from e2e.cluster.errors import DaemonDied
from e2e.cluster.layout import Layout
from e2e.cluster.shell import in_netns, run

_START = 'log=$1; shift; setsid "$@" >>"$log" 2>&1 </dev/null & echo $!'


@dataclass(frozen=True)
class Daemon:
    """One process. `started` is in clock ticks since boot."""

    name: str
    pid: int
    started: int
    log: str

    @property
    def is_alive(self) -> bool:
        """Whether this very process runs (a zombie does not)."""
        return _start_time(self.pid) == self.started

    @property
    def resident_bytes(self) -> int:
        """Resident memory; 0 when it is gone."""
        try:
            pages = Path(f"/proc/{self.pid}/statm").read_text().split()[1]
        except (OSError, IndexError):
            return 0
        return int(pages) * os.sysconf("SC_PAGE_SIZE")


class Daemons:
    """The daemons of one cluster."""

    def __init__(self, layout: Layout) -> None:
        self._folder = layout.run / "daemons"
        self._logs = layout.logs

    def start(
        self, name: str, netns: str, argv: Sequence[str | Path], *, path: Sequence[Path] = ()
    ) -> Daemon:
        """Start a program in a network namespace; `path` goes before the usual PATH.

        The shell that starts it ends at once, so the process belongs to init and not to us.

        Raises:
            DaemonDied: it ended before it could be recorded.
        """
        self._logs.mkdir(parents=True, exist_ok=True)
        self._folder.mkdir(parents=True, exist_ok=True)
        log = self._logs / f"{name}.log"
        env = {"PATH": ":".join([*(str(folder) for folder in path), os.environ.get("PATH", os.defpath)])}
        command = ["sh", "-c", _START, "sh", str(log), *in_netns(netns, argv)]
        pid = int(run(command, f"Starting {name}", env=env))
        started = _start_time(pid)
        if started is None:
            raise DaemonDied(f"{name} ended at once. Its last words, from {log}:\n{_tail(log)}")
        daemon = Daemon(name, pid, started, str(log))
        # At once: another process may be reading, or this one be killed.
        unfinished = self._folder / f".{name}"
        unfinished.write_text(json.dumps(asdict(daemon)))
        unfinished.rename(self._folder / f"{name}.json")
        return daemon

    def all(self) -> list[Daemon]:
        """Every daemon that was started, dead or alive, by name."""
        return [Daemon(**json.loads(path.read_text())) for path in sorted(self._folder.glob("*.json"))]

    def named(self, name: str) -> Daemon | None:
        """One daemon, or None if it was never started."""
        path = self._folder / f"{name}.json"
        return Daemon(**json.loads(path.read_text())) if path.exists() else None


def require_alive(*daemons: Daemon) -> None:
    """Raise DaemonDied, with the end of its log, if one of `daemons` has ended."""
    for daemon in daemons:
        if not daemon.is_alive:
            log = Path(daemon.log)
            raise DaemonDied(f"{daemon.name} ended by itself. Its last words, from {log}:\n{_tail(log)}")


def _tail(log: Path, lines: int = 15) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:]) if log.exists() else "(no log)"


def _start_time(pid: int) -> int | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The second field is the program's name in parentheses and may contain anything; the rest has fixed places.
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])
