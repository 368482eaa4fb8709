"""Runs the tests of `inside` with the engine bundle's interpreter, once for each vLLM that is supported.

The bundle has the older one, built for CPU. The newer one's Python files are laid in front of it.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from disagg_connector.compat import SUPPORTED
from e2e.images.engine import ensure_bundle, ensure_model, ensure_next

INSIDE = Path(__file__).parent / "inside"
SOURCES = Path(__file__).parents[2] / "src"
ROOT = Path(__file__).parents[3]
LIMIT_SECONDS = 600

IN_FRONT: dict[str, Callable[[], list[Path]]] = {"0.32": list, "0.33": lambda: [ensure_next()]}
"""Release series -> the folders to lay in front of the bundle's packages."""


@pytest.mark.engine
@pytest.mark.parametrize("series", SUPPORTED)
def test_what_needs_vllm_passes_with(series: str, tmp_path: Path) -> None:
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        "PYTHONPATH": os.pathsep.join(str(folder) for folder in [SOURCES, *IN_FRONT[series](), ROOT]),
        "DISAGG_TEST_MODEL": str(ensure_model("tiny-qwen3")),
        "DISAGG_TEST_VLLM": series,
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }
    run = subprocess.run(
        [
            str(ensure_bundle() / "bin" / "python3"), "-m", "pytest", "-q", "-c", str(INSIDE / "pytest.ini"),
            "-p", "no:cacheprovider", str(INSIDE),
        ],
        env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
