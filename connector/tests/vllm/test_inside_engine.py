"""Runs the tests of `inside` with the engine bundle's interpreter, once for each vLLM that is supported.

The bundle has the older one, built for CPU. The newer one's Python files are laid in front of it.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType

import pytest

from disagg_connector.compat import SUPPORTED
from e2e.images.engine import ensure_bundle, ensure_model, ensure_next

INSIDE = Path(__file__).parent / "inside"
SOURCES = Path(__file__).parents[2] / "src"
ROOT = Path(__file__).parents[3]
LIMIT_SECONDS = 600

IN_FRONT: dict[str, Callable[[], list[Path]]] = {"0.32": list, "0.33": lambda: [ensure_next()]}
"""Release series -> the folders to lay in front of the bundle's packages."""


pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Run]]:
    """One for each vLLM, side by side: each keeps one core busy."""
    with ExitStack() as stack:
        yield {
            series: stack.enter_context(Run(series, tmp_path_factory.mktemp(series))) for series in SUPPORTED
        }


class Run(subprocess.Popen[bytes]):
    """pytest in the bundle's interpreter, ended with all that it has started when the context is left."""

    def __init__(self, series: str, folder: Path) -> None:
        self.log = folder / "pytest.log"
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(folder),
            "PYTHONPATH": os.pathsep.join(str(path) for path in [SOURCES, *IN_FRONT[series](), ROOT]),
            "DISAGG_TEST_MODEL": str(ensure_model("tiny-qwen3")),
            "DISAGG_TEST_VLLM": series,
            "CUDA_VISIBLE_DEVICES": "",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
        }
        python = str(ensure_bundle() / "bin" / "python3")
        command = [python, "-m", "pytest", "-q", "-c", str(INSIDE / "pytest.ini"), "-p", "no:cacheprovider"]
        with self.log.open("wb") as log:
            super().__init__(
                [*command, str(INSIDE)],
                env=environment,
                cwd=folder,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        super().__exit__(kind, value, trace)


@pytest.mark.parametrize("series", SUPPORTED)
def test_what_needs_vllm_passes_with(series: str, runs: dict[str, Run]) -> None:
    run = runs[series]
    try:
        status = run.wait(LIMIT_SECONDS)
    except subprocess.TimeoutExpired:
        pytest.fail(f"not through within {LIMIT_SECONDS} s:\n{run.log.read_text()[-10_000:]}")
    assert status == 0, run.log.read_text()[-10_000:]
