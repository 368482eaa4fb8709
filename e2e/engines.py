"""vLLM servers as processes on loopback, from the engine bundle, on CPU.

    with running(EngineSpec(model=ensure_model("tiny-qwen3")), name="plain") as engine:
        ...  # engine.url, engine.metrics_text(), engine.log_tail()

    with running_all({"prefill": prefill_spec, "decode": decode_spec}) as engines:
        ...  # started side by side; the time is import time

Every engine gets ports of its own (vLLM listens with SO_REUSEPORT, so a clash would show up as wrong answers, never as
an error), a log file, and its own process group, which is ended when the context is left or this process dies, even by
SIGKILL.
"""

import json
import os
import resource
import signal
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from e2e.engine_process import Process, fork, spawn
from e2e.images.engine import ensure_bundle, vllm_cache
from e2e.images.engine_bundle import EngineError
from e2e.images.engine_cache import say
from e2e.ports import HOST, ReservedPorts

BLOCK_SIZE = 32
"""Tokens a KV block: the least that vLLM's CPU attention takes (its default, 128, hides short prompts from caches)."""

READY_SECONDS = 420.0
"""A boot is seconds of CPU, and several engines boot at once: up to a minute. One that ends is noticed at once."""

_KILL_SECONDS = 60.0
_ABORT_SECONDS = 60.0

# Reads until its input ends, which is when nobody holds the other end of the pipe any more: the harness is dead,
# however it died. Then it does what `Engine.stop` does. $1 is the server, which leads the process group.
_GUARD = """
read -r _
kill -s TERM "$1"
tenths=0
while kill -0 "$1" && [ "$tenths" -lt 100 ]; do sleep 0.1; tenths=$((tenths + 1)); done
kill -s KILL -- "-$1"
"""


@dataclass(frozen=True)
class Ports:
    """The ports of one engine that its configuration names."""

    http: int
    side_channel: int
    """NIXL handshake, `VLLM_NIXL_SIDE_CHANNEL_PORT`."""
    control: int
    """The connector's control port, as in docs/wire-contract.md."""


KVTransferConfig = Mapping[str, Any] | Callable[[Ports], Mapping[str, Any]]
"""The content of `--kv-transfer-config`, or a function that makes it of the ports the engine got."""


@dataclass(frozen=True)
class EngineSpec:
    """What to start. The defaults are the flags of the CPU profile."""

    model: Path
    kv_transfer_config: KVTransferConfig | None = None
    served_name: str = "test"
    dtype: Literal["float32", "bfloat16"] = "float32"
    kv_blocks: int = 512
    max_model_len: int = 2048
    extra_args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    python_path: tuple[Path, ...] = ()
    """Folders put first on PYTHONPATH, such as connector/src."""
    forked: bool = True
    """As a fork of a process that has imported vLLM, which saves most of the start; False is `vllm serve` as users call it."""

    def start(self, ports: Ports, folder: Path, log: Path) -> Process:
        """Start the server in `folder`."""
        environment = self.environment(ports, folder)
        if self.forked:
            return fork(self.arguments(ports), environment, folder, log)
        return spawn(self.command(ports), environment, folder, log)

    def command(self, ports: Ports) -> list[str]:
        """What is started where the server is not forked."""
        return [str(ensure_bundle() / "bin" / "vllm"), *self.arguments(ports)]

    def arguments(self, ports: Ports) -> list[str]:
        """The arguments of `vllm serve`."""
        arguments = [
            *("serve", str(self.model), "--host", HOST, "--port", str(ports.http)),
            *("--served-model-name", self.served_name, "--enforce-eager", "--dtype", self.dtype),
            *(
                "--max-model-len",
                str(self.max_model_len),
                "--max-num-batched-tokens",
                str(self.max_model_len),
            ),
            *("--max-num-seqs", "8", "--block-size", str(BLOCK_SIZE)),
            *("--num-gpu-blocks-override", str(self.kv_blocks)),
        ]
        config = self.kv_transfer_config
        if config is not None:
            rendered = config(ports) if callable(config) else config
            arguments += ["--kv-transfer-config", json.dumps(rendered)]
        return [*arguments, *self.extra_args]

    def environment(self, ports: Ports, scratch: Path) -> dict[str, str]:
        """The environment of the server; of this process's own only PATH and locale reach it."""
        inherited = {key: os.environ[key] for key in ("PATH", "LANG", "LC_ALL") if key in os.environ}
        return {
            **inherited,
            "HOME": str(scratch),
            "TMPDIR": str(scratch),
            "PYTHONPATH": os.pathsep.join(str(path) for path in self.python_path),
            "PYTHONFAULTHANDLER": "1",
            "PYTHONUNBUFFERED": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "OMP_WAIT_POLICY": "PASSIVE",
            "VLLM_CACHE_ROOT": str(vllm_cache()),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            # The worker in the engine's process, as on one GPU, not in one of its own.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_HOST_IP": HOST,
            "VLLM_NIXL_SIDE_CHANNEL_HOST": HOST,
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(ports.side_channel),
            "UCX_TLS": "tcp,self",
            "UCX_NET_DEVICES": "lo",
            **self.env,
        }


class Engine:
    """One vLLM server, started when made. Use `running` or `running_all`, which also wait for it and stop it.

    Its log and scratch files lie in `folder` (a temporary one by default) and stay there for a failed test to show.
    """

    def __init__(self, spec: EngineSpec, name: str, folder: Path | None = None) -> None:
        self.spec = spec
        self.name = name
        self.folder = folder or Path(tempfile.mkdtemp(prefix=f"engine-{name}-"))
        self.folder.mkdir(parents=True, exist_ok=True)
        self.log = self.folder / f"{name}.log"
        self._reserved = ReservedPorts(3)
        self.ports = Ports(*self._reserved.numbers)
        self.process = spec.start(self.ports, self.folder, self.log)
        # In a session of its own, so that what ends the harness' process group leaves it alive.
        self._guard = subprocess.Popen(
            ["/bin/sh", "-c", _GUARD, "guard", str(self.process.pid)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    @property
    def url(self) -> str:
        """The base of the OpenAI API, without `/v1`."""
        return f"http://{HOST}:{self.ports.http}"

    @property
    def pid(self) -> int:
        """The API server's process, which leads the process group."""
        return self.process.pid

    def wait_ready(self, limit_seconds: float = READY_SECONDS) -> None:
        """Return when `/health` answers 200.

        Raises:
            EngineError: the server exited or is not ready within the limit; the text ends with its last log lines.
        """
        deadline = time.monotonic() + limit_seconds
        while True:
            if (status := self.process.poll()) is not None:
                raise EngineError(
                    f"Engine {self.name} exited with {status} while starting.\n{self.log_tail()}"
                )
            if self._is_healthy():
                return
            if time.monotonic() > deadline:
                raise EngineError(
                    f"Engine {self.name} is not ready after {limit_seconds:.0f} s.\n{self._where_it_hangs()}"
                )
            time.sleep(0.25)

    def _where_it_hangs(self) -> str:
        """The end of the log of a server that is aborted, when Python writes the stacks of all threads."""
        for process in live_members(self.process.pid):
            with suppress(ProcessLookupError):
                resource.prlimit(
                    process, resource.RLIMIT_CORE, (0, 0)
                )  # gigabytes, of which nobody reads one
                os.kill(process, signal.SIGABRT)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(_ABORT_SECONDS)
        return self.log_tail(lines=150)

    def _is_healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def metrics_text(self) -> str:
        """The body of `/metrics`."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=60) as answer:
            return str(answer.read().decode())

    def log_tail(self, lines: int = 30) -> str:
        """The last lines of the log, headed by its path."""
        text = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        return "\n".join([f"Last lines of {self.log}:", *text[-lines:]])

    def kill(self) -> None:
        """End the server and its children at once (SIGKILL), as a lost node would."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        deadline = time.monotonic() + _KILL_SECONDS
        while left := live_members(self.process.pid):
            if time.monotonic() > deadline:
                raise EngineError(
                    f"Engine {self.name}: processes {left} outlive SIGKILL for {_KILL_SECONDS:.0f} s."
                )
            time.sleep(0.02)
        with self._guard:  # waits for it
            self._guard.kill()
        self._reserved.release()

    def stop(self, grace_seconds: float = 10) -> None:
        """End the server by SIGTERM, then its whole process group by SIGKILL. Does nothing when it has ended."""
        if self.process.poll() is None:
            self.process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(grace_seconds)
        self.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


@contextmanager
def running(
    spec: EngineSpec, name: str, folder: Path | None = None, limit_seconds: float = READY_SECONDS
) -> Iterator[Engine]:
    """A ready engine, stopped when the context is left."""
    with running_all({name: spec}, folder, limit_seconds) as engines:
        yield engines[name]


@contextmanager
def running_all(
    specs: Mapping[str, EngineSpec], folder: Path | None = None, limit_seconds: float = READY_SECONDS
) -> Iterator[dict[str, Engine]]:
    """Ready engines by name, started side by side and stopped together."""
    with ExitStack() as stack:
        engines = {name: stack.enter_context(Engine(spec, name, folder)) for name, spec in specs.items()}
        for engine in engines.values():
            engine.wait_ready(limit_seconds)
            say(f"engine {engine.name}: ready at {engine.url}, log {engine.log}")
        yield engines


def live_members(group: int) -> list[int]:
    """The processes of a process group that still run; zombies, which nobody may have reaped yet, do not."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            # pid (name) state ppid pgrp ...; the name may hold spaces and parentheses.
            state, _, process_group = stat.read_text().rpartition(")")[2].split()[:3]
            if int(process_group) == group and state not in "ZX":
                found.append(int(stat.parent.name))
    return found
