"""The engine bundle and the model, made in a process of their own beside everything else."""

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from e2e.cluster.preflight import Need
from e2e.demo.errors import DemoError
from e2e.images import engine_bundle
from e2e.images.engine_cache import cache_root

MODEL = "smollm2-135m"


def engine_needs(beside: int = 0) -> list[Need]:
    """What building the bundle lacks on this machine; empty where the bundle is cached.

    `beside` is how many bytes the rest of the preparation takes on the same disk.
    """
    try:
        python = engine_bundle.find_interpreter()
    except engine_bundle.EngineError as error:
        return [Need("the engine bundle's interpreter", str(error))]
    if (cache_root() / engine_bundle.current_bundle_name(python)).is_dir():
        return []
    existing = next(path for path in (cache_root(), *cache_root().parents) if path.exists())
    free, needed = shutil.disk_usage(existing).free, engine_bundle.BYTES_NEEDED + beside
    if free >= needed:
        return []
    what = f"{needed / 1e9:.0f} GB of disk at {cache_root()}, engine bundle included: {free / 1e9:.1f} GB are free"
    return [Need(what, "free some space or set DISAGG_CACHE to another disk")]


class EngineBuild:
    """Starts building when entered; `result` waits for it; left early, it is stopped and leaves nothing half-made."""

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "e2e.images.engine", "model", MODEL],
            cwd=Path(__file__).resolve().parents[2],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # so that all of it can be stopped, the package installer too
        )
        self._said: list[str] = []
        self._reader = threading.Thread(target=self._pass_on, args=(self._process.stderr,), daemon=True)
        self._reader.start()
        return self

    def _pass_on(self, stderr: IO[str]) -> None:
        for line in stderr:
            self._said.append(line.rstrip())
            self._report(f"  {line.rstrip()}")

    def result(self) -> None:
        """Return when bundle and model are in the cache.

        Raises:
            DemoError: they could not be made; the text has the builder's last words.
        """
        status = self._process.wait()
        self._reader.join()
        if status != 0:
            last = "\n".join(self._said[-20:])
            raise DemoError(f"The engine bundle or the model could not be made (exit {status}).\n{last}")

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGTERM)
            self._process.wait()
