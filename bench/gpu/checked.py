"""The connector that the soak runs: the tests' own, which writes checksums of all blocks that leave or arrive."""

from __future__ import annotations

from typing import Any

from bench.gpu.tracing import Trace, note_start
from connector.tests.engine.checking import CheckingConnector


class CheckedConnector(CheckingConnector):
    """`CheckingConnector` that also tells how its engine runs."""

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        note_start(Trace(), self._s.vllm_config)
        super().bind_gpu_block_pool(gpu_block_pool)
