"""`vllm serve` in two steps, run inside the engine's interpreter: import everything, wait for a gate, serve.

Imports take longer than all the rest of an engine's start. The benchmark starts the engines of all modes at once and
opens their gates one pair after another, so that imports are over when a mode's turn comes and nothing disturbs the
mode that is being measured.

Two things are added to vLLM here, for measurements only:

* a streamed completion ends with a chunk that carries ``kv_transfer_params``. vLLM 0.32 returns them unstreamed only,
  and upstream's bidirectional pull needs decode's for the next turn;
* with BENCH_WEIGHTS=sharp, random weights of a kind that lets every token depend on the whole context, as those of
  the tiny test model do. vLLM's own dummy weights are so small that attention does nothing.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import AsyncIterator
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import Any

GATE = "BENCH_GATE"
"""The environment variable that names the file whose appearance lets the engine start."""
WEIGHTS = "BENCH_WEIGHTS"

_HEAVY = (
    "vllm.entrypoints.openai.api_server",
    "vllm.entrypoints.openai.completion.serving",
    "vllm.v1.engine.core",
    "vllm.v1.core.sched.async_scheduler",
    "vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector",
    "vllm.model_executor.models.qwen3",
    "vllm.model_executor.model_loader.dummy_loader",
    "transformers.models.qwen3.configuration_qwen3",
)
_HEAVY_ON_GPU = (
    "vllm.v1.worker.gpu_worker",
    "vllm.v1.worker.gpu.model_runner",
    "vllm.v1.attention.backends.flash_attn",
)


def _wait_at_gate(gate: Path) -> None:
    parent = os.getppid()
    while not gate.exists():
        if os.getppid() != parent:
            sys.exit("The benchmark has ended before this engine was wanted.")
        time.sleep(0.05)


def _stream_transfer_params() -> None:
    """Have streamed completions tell their kv_transfer_params before they end."""
    serving: Any = import_module("vllm.entrypoints.openai.completion.serving").OpenAIServingCompletion
    original = serving.completion_stream_generator

    async def generator(
        self: Any, request: Any, inputs: Any, results: Any, *rest: Any, **named: Any
    ) -> AsyncIterator[str]:
        params: list[Any] = []

        async def watched() -> AsyncIterator[Any]:
            async for index, result in results:
                if result.kv_transfer_params is not None:
                    params.append(result.kv_transfer_params)
                yield index, result

        async for chunk in original(self, request, inputs, watched(), *rest, **named):
            if params and chunk.startswith("data: [DONE]"):
                yield f"data: {json.dumps({'choices': [], 'kv_transfer_params': params[-1]})}\n\n"
            yield chunk

    serving.completion_stream_generator = generator


def _use_sharp_weights() -> None:
    """Random weights whose layers' outputs are as large as their inputs, with attention that singles tokens out."""
    import torch

    loader: Any = import_module("vllm.model_executor.model_loader.dummy_loader")
    seeds = count(20240607)

    def fill(param: torch.Tensor) -> None:
        if param.ndim == 0 or param.device.type == "meta" or not torch.is_floating_point(param):
            return
        generator = torch.Generator(device=param.device)
        generator.manual_seed(next(seeds))
        if param.ndim < 2:
            # A norm's: of a head's size those of queries and keys.
            param.data.fill_(2.0 if param.shape[0] <= 256 else 1.0)
            return
        is_embedding = param.shape[0] > 64 * param.shape[1]
        std = 1.0 if is_embedding else param.shape[-1] ** -0.5
        param.data.normal_(mean=0.0, std=std, generator=generator)

    loader.initialize_single_dummy_weight = fill


# Also in the children that multiprocessing spawns: it runs this module there under another name.
if os.environ.get(WEIGHTS) == "sharp":
    _use_sharp_weights()


def main() -> None:
    for name in _HEAVY + (_HEAVY_ON_GPU if os.environ.get("CUDA_VISIBLE_DEVICES") else ()):
        import_module(name)
    _stream_transfer_params()
    _wait_at_gate(Path(os.environ[GATE]))
    import_module("vllm.entrypoints.cli.main").main()


if __name__ == "__main__":
    main()
