"""No process of an engine is left, however the harness ends. The server here is a shell, so no engine is needed.

This file is also the harness that gets killed: run as a program, it starts such a server, says its process and waits.
"""

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from e2e import engine_process
from e2e.engines import Engine, EngineSpec, Ports, live_members
from e2e.images.engine_bundle import EngineError

ROOT = Path(__file__).parents[3]
LIMIT_SECONDS = 60.0


class StandIn(EngineSpec):
    """A server that SIGTERM ends, with a child that it does not end, as a worker in the middle of something."""

    def command(self, ports: Ports) -> list[str]:
        return ["/bin/sh", "-c", "(trap '' TERM; exec sleep 600) & exec sleep 600"]


def _until(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + LIMIT_SECONDS
    while not holds():
        assert time.monotonic() < deadline, f"Not within {LIMIT_SECONDS:.0f} s: {what}"
        time.sleep(0.02)


def _start(folder: Path) -> Engine:
    engine = Engine(StandIn(Path("/m"), forked=False), "stand-in", folder)
    _until(lambda: len(live_members(engine.pid)) == 2, "the server has its child")
    return engine


def test_a_context_that_is_left_by_an_exception_ends_the_whole_group(tmp_path: Path) -> None:
    with pytest.raises(KeyError), _start(tmp_path) as engine:
        raise KeyError
    assert live_members(engine.pid) == []


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_a_harness_that_is_killed_leaves_nothing(end: signal.Signals, tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, __file__, str(tmp_path)],
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as harness:
        assert harness.stdout is not None
        server = int(harness.stdout.readline())
        assert len(live_members(server)) == 2
        harness.send_signal(end)
        assert harness.wait(LIMIT_SECONDS) == -end
    _until(lambda: not live_members(server), "the server and its child are gone")


class Hanging(EngineSpec):
    """A server that never listens."""

    def command(self, ports: Ports) -> list[str]:
        wait = "def never_listens(): print('begun', flush=True); threading.Event().wait(600)"
        return [sys.executable, "-c", f"import threading\n{wait}\nnever_listens()"]


def test_a_server_that_hangs_shows_where(tmp_path: Path) -> None:
    with Engine(Hanging(Path("/m"), forked=False), "hanging", tmp_path) as engine:
        _until(lambda: "begun" in engine.log.read_text(), "the server hangs")
        with pytest.raises(EngineError, match=r"(?s)not ready after 0 s.* in never_listens"):
            engine.wait_ready(0)


def test_a_parent_of_engines_that_does_not_end_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_process, "_END_SECONDS", 0.1)
    parent = subprocess.Popen(["/bin/sleep", "600"], stdin=subprocess.PIPE)
    engine_process._end(parent, tmp_path)
    assert parent.wait(LIMIT_SECONDS) == -signal.SIGKILL


if __name__ == "__main__":
    held = _start(Path(sys.argv[1]))
    print(held.pid, flush=True)
    sys.stdin.read()
    held.stop()
