"""The routers that are measured, each a process of its own before the same fake engines, and the way past them."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import resource
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from bench.router.peers import Play, serve
from e2e.images.engine_cache import build_once, cache_root, say
from e2e.ports import free_port

_LOCK = Path(__file__).parents[2] / "requirements" / "bench-router.txt"
_TICKS = os.sysconf("SC_CLK_TCK")
_START_SECONDS = 60.0

Name = Literal["direct", "bare", "ours", "ours_pd", "vllm_router", "vllm_router_pd"]
NAMES: tuple[Name, ...] = ("direct", "bare", "ours", "vllm_router", "ours_pd", "vllm_router_pd")
TITLES: Mapping[Name, str] = {
    "direct": "no router",
    "bare": "bare relay",
    "ours": "ours, decode alone",
    "vllm_router": "vllm-router, round robin",
    "ours_pd": "ours, prefill and decode",
    "vllm_router_pd": "vllm-router, prefill and decode",
}


@dataclass(frozen=True)
class Contender:
    """Where requests go, and what they cost there."""

    name: Name
    port: int
    pid: int | None
    """The router's process; None where there is none."""

    def cpu_seconds(self) -> float:
        """User and system time of the process and its children so far."""
        used = 0.0
        for pid in self._tree():
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            used += (int(fields[11]) + int(fields[12])) / _TICKS
        return used

    def rss_kib(self) -> int:
        """Resident memory of the process and its children."""
        total = 0
        for pid in self._tree():
            for line in Path(f"/proc/{pid}/status").read_text().splitlines():
                if line.startswith("VmRSS:"):
                    total += int(line.split()[1])
        return total

    def _tree(self) -> Iterator[int]:
        pending = [self.pid] if self.pid is not None else []
        while pending:
            pid = pending.pop()
            yield pid
            for task in Path(f"/proc/{pid}/task").iterdir():
                pending += map(int, (task / "children").read_text().split())


def pin(core: int, pid: int = 0) -> None:
    """Keep a process, this one by default, on a core."""
    os.sched_setaffinity(pid, {core})


def allow_many_files() -> None:
    """As many open sockets as the system lets this process and those that it starts have."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


@contextmanager
def contender(name: Name, play: Play, core: int) -> Iterator[Contender]:
    """Start engines beside this process and a router on `core`."""
    with _engine(play) as prefill, _engine(play) as decode:
        match name:
            case "direct":
                yield Contender(name, decode, None)
            case "bare":
                with _bare(decode, core) as (port, pid):
                    yield Contender(name, port, pid)
            case "ours":
                with _ours(f"decode=http://127.0.0.1:{decode}", core) as (port, pid):
                    yield Contender(name, port, pid)
            case "ours_pd":
                engines = f"prefill=http://127.0.0.1:{prefill},decode=http://127.0.0.1:{decode}"
                with _ours(engines, core) as (port, pid):
                    yield Contender(name, port, pid)
            case "vllm_router":
                options = ["--worker-urls", f"http://127.0.0.1:{decode}", "--policy", "round_robin"]
                with _vllm_router(options, core) as (port, pid):
                    yield Contender(name, port, pid)
            case "vllm_router_pd":
                options = ["--vllm-pd-disaggregation", "--policy", "round_robin"]
                options += ["--prefill", f"http://127.0.0.1:{prefill}"]
                options += ["--decode", f"http://127.0.0.1:{decode}"]
                with _vllm_router(options, core) as (port, pid):
                    yield Contender(name, port, pid)


@contextmanager
def _engine(play: Play) -> Iterator[int]:
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(play, there), daemon=True)
    process.start()
    there.close()
    try:
        if not here.poll(_START_SECONDS):
            raise RuntimeError(f"The fake engine did not start within {_START_SECONDS:.0f} s.")
        try:
            port = here.recv()
        except EOFError:
            raise RuntimeError("The fake engine ended while it started; its error is above.") from None
        yield port
    finally:
        process.terminate()
        process.join()


@contextmanager
def _bare(engine: int, core: int) -> Iterator[tuple[int, int]]:
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "relay.log")
        with _process([sys.executable, "-m", "bench.router.bare", str(engine)], log, core) as process:
            yield int(_first_line(log, process)), process.pid


@contextmanager
def _ours(engines: str, core: int) -> Iterator[tuple[int, int]]:
    config = {
        "version": 1,
        "namespace": "bench",
        "name": "bench",
        "model": {"name": "m"},
        "ports": {"http": 0, "admin": 0},
        "overload": {"turnsPerEngine": 100_000},
    }
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "router.json").write_text(json.dumps(config))
        command = [sys.executable, "-m", "disagg_router", "--host", "127.0.0.1"]
        command += ["--drain-delay", "0", "--grace", "1"]
        command += ["--config", f"{folder}/router.json", "--engines", engines]
        log = Path(folder, "router.log")
        with _process(command, log, core) as process:
            serving = json.loads(_first_line(log, process))
            urllib.request.urlopen(f"http://127.0.0.1:{serving['admin_port']}/readyz", timeout=10).close()
            yield serving["port"], process.pid


@contextmanager
def _vllm_router(options: list[str], core: int) -> Iterator[tuple[int, int]]:
    port, metrics = free_port(), free_port()
    command = [sys.executable, "-m", "vllm_router.launch_router", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--prometheus-port", str(metrics), "--log-level", "warning", *options]
    packages = {"PYTHONPATH": str(_vllm_router_packages())}
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "router.log")
        with _process(command, log, core, packages) as process:
            _wait_until_listening(port, process, log)
            yield port, process.pid


def _vllm_router_packages() -> Path:
    key = hashlib.sha256(_LOCK.read_bytes() + sys.version.encode()).hexdigest()[:12]

    def build(folder: Path) -> None:
        say("installing vllm-router")
        uv = str(Path(sys.prefix) / "bin" / "uv")
        command = [uv, "pip", "install", "--quiet", "--require-hashes", "--only-binary=:all:"]
        subprocess.run([*command, "--target", str(folder), "-r", str(_LOCK)], check=True)

    return build_once(cache_root() / f"vllm-router-{key}", build, say)


@contextmanager
def _process(
    command: list[str], log: Path, core: int, env: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env={**os.environ, **(env or {})}, start_new_session=True
        )
    try:
        pin(core, process.pid)
        yield process
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _first_line(log: Path, process: subprocess.Popen[bytes]) -> str:
    return _awaited("first line", log, process, lambda: log.read_text().partition("\n")[0])


def _wait_until_listening(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    def answer() -> str:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                return "healthy"
        except OSError:
            return ""

    _awaited("healthy answer", log, process, answer)


def _awaited(what: str, log: Path, process: subprocess.Popen[bytes], look: Callable[[], str]) -> str:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        if found := str(look()):
            return found
        if process.poll() is not None:
            raise RuntimeError(f"The router ended while it started:\n{log.read_text()[-2000:]}")
        time.sleep(0.05)
    raise RuntimeError(f"The router gave no {what} in {_START_SECONDS:.0f} s:\n{log.read_text()[-2000:]}")
