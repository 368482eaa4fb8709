"""What vLLM needs of a CPU for tests that not every machine can run."""

from pathlib import Path

import pytest

_FLAGS = set(Path("/proc/cpuinfo").read_text().split())

needs_fp8 = pytest.mark.skipif(
    not _FLAGS & {"avx512f", "amx_tile"}, reason="vLLM stores FP8 KV on CPUs with AVX-512 or AMX only"
)
