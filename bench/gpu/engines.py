"""Engines of the benchmark: on a GPU of their own each, or on CPU with the tiny model for a rehearsal."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from bench.gpu.chat import write_chat_tokenizer
from bench.gpu.serve import GATE, WEIGHTS
from bench.gpu.shapes import VOCABULARY, write_model
from e2e.engines import Engine, EngineSpec, KVTransferConfig, Ports
from e2e.images.engine import ensure_bundle, ensure_model
from e2e.ports import HOST

REPOSITORY = Path(__file__).resolve().parents[2]
_START_SECONDS = 240.0
_DECODE_GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4]}


@dataclass(frozen=True)
class HeldSpec(EngineSpec):
    """An engine that imports everything and then waits for its gate (`bench.gpu.serve`)."""

    forked: bool = False
    gpu: int | None = None
    """The GPU it runs on; None is CPU."""
    home: Path = Path("/nonexistent")
    """Shared by all engines of a run, so that compiled kernels are found again."""
    gate: Path = Path("/nonexistent")
    weights: Literal["dummy", "sharp"] = "dummy"
    prefix_caching: bool = True
    graphs: bool = False
    max_batched_tokens: int = 16_384
    max_sequences: int = 16

    def command(self, ports: Ports) -> list[str]:
        python = str(ensure_bundle() / "bin" / "python3") if self.gpu is None else sys.executable
        return [python, "-m", "bench.gpu.serve", *self.arguments(ports)]

    def arguments(self, ports: Ports) -> list[str]:
        caching = [] if self.prefix_caching else ["--no-enable-prefix-caching"]
        if self.gpu is None:
            return [*super().arguments(ports), *caching]
        config = self.kv_transfer_config
        rendered = config(ports) if callable(config) else config
        transfer = [] if rendered is None else ["--kv-transfer-config", json.dumps(rendered)]
        return [
            *("serve", str(self.model), "--host", HOST, "--port", str(ports.http)),
            *("--served-model-name", self.served_name, "--dtype", "bfloat16"),
            *("--load-format", "dummy", "--max-model-len", str(self.max_model_len)),
            *("--max-num-batched-tokens", str(self.max_batched_tokens)),
            *("--max-num-seqs", str(self.max_sequences), "--gpu-memory-utilization", "0.8"),
            *("--num-gpu-blocks-override", str(self.kv_blocks)),
            *("--kernel-config", json.dumps({"enable_flashinfer_autotune": False})),
            *(("--compilation-config", json.dumps(_DECODE_GRAPHS)) if self.graphs else ("--enforce-eager",)),
            *transfer,
            *caching,
            *self.extra_args,
        ]

    def environment(self, ports: Ports, scratch: Path) -> dict[str, str]:
        ours = {GATE: str(self.gate), WEIGHTS: self.weights, "HOME": str(self.home)}
        if self.gpu is None:
            return {**super().environment(ports, scratch), **ours, **self.env}
        passed_on = (
            "LD_LIBRARY_PATH",
            "NCCL_NVLS_ENABLE",
            "TORCH_SYMM_MEM_DISABLE_MULTICAST",
            "NVSHMEM_DISABLE_NVLS",
        )
        inherited = {key: os.environ[key] for key in ("PATH", "LANG", *passed_on) if key in os.environ}
        inherited |= {key: value for key, value in os.environ.items() if key.startswith("UCX_")}
        paths = [str(path) for path in self.python_path] + [os.environ.get("PYTHONPATH", "")]
        return {
            **inherited,
            "TMPDIR": str(scratch),
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "PYTHONUNBUFFERED": "1",
            "CUDA_VISIBLE_DEVICES": str(self.gpu),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "4",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_USE_FLASHINFER_SAMPLER": "0",
            "VLLM_DEEP_GEMM_WARMUP": "skip",
            "VLLM_HOST_IP": HOST,
            "VLLM_NIXL_SIDE_CHANNEL_HOST": HOST,
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(ports.side_channel),
            **ours,
            **self.env,
        }


@dataclass(frozen=True)
class Size:
    """A model and how its engines are cut."""

    model: str
    kv_blocks: int
    max_model_len: int
    weights: Literal["dummy", "sharp"] = "dummy"
    max_sequences: int = 16
    chats: bool = False
    """Prompts are texts (`bench.gpu.chat`) and not token ids."""


@dataclass
class Place:
    """Where engines run: the two GPUs of a host, or the CPU."""

    gpus: bool
    folder: Path
    _made: int = field(default=0)

    @property
    def vocabulary(self) -> range:
        """Token ids that prompts may be made of."""
        return range(1000, VOCABULARY) if self.gpus else range(5, 95)

    def hold(
        self,
        name: str,
        role: Literal["prefill", "decode"],
        size: Size,
        transfer: KVTransferConfig | None,
        *,
        prefix_caching: bool = True,
        graphs: bool = False,
        env: Mapping[str, str] | None = None,
        python_path: tuple[Path, ...] = (),
    ) -> Held:
        """Start an engine up to its gate. Prefill runs on the first GPU, decode on the second."""
        self._made += 1
        scratch = self.folder / f"{self._made}-{name}"
        scratch.mkdir(parents=True)
        model = write_model(size.model, self.folder / "models") if self.gpus else ensure_model("tiny-qwen3")
        if size.chats and self.gpus:
            write_chat_tokenizer(model)
        home = self.folder.parent / "home"
        home.mkdir(exist_ok=True)
        spec = HeldSpec(
            model=model,
            kv_transfer_config=transfer,
            kv_blocks=size.kv_blocks,
            max_model_len=size.max_model_len,
            env=dict(env or {}),
            python_path=(*python_path, REPOSITORY / "connector" / "src", REPOSITORY),
            gpu=("prefill", "decode").index(role) if self.gpus else None,
            home=home,
            gate=scratch / "gate",
            weights=size.weights,
            prefix_caching=prefix_caching,
            graphs=graphs,
            max_sequences=size.max_sequences,
        )
        return Held(Engine(spec, name, scratch), spec.gate)


@dataclass
class Held:
    """An engine at its gate."""

    engine: Engine
    gate: Path
    _made: float = field(default_factory=time.monotonic)

    def open(self) -> None:
        self.gate.touch()

    def wait_ready(self) -> Engine:
        """Raises `EngineError` if it has not become ready in time."""
        self.engine.wait_ready(time.monotonic() - self._made + _START_SECONDS)
        return self.engine


def started(held: Mapping[str, Held]) -> tuple[dict[str, Engine], float]:
    """Open the gates of some engines together; the engines when they are ready, and the seconds it took."""
    begun = time.monotonic()
    for one in held.values():
        one.open()
    engines = {name: one.wait_ready() for name, one in held.items()}
    return engines, time.monotonic() - begun


def log_facts(engine: Engine) -> dict[str, Any]:
    """What an engine's log says about how it runs."""
    text = engine.log.read_text(errors="replace")
    return {
        "errors": [line for line in text.splitlines() if " ERROR " in line][:20],
        "warnings": sum(" WARNING " in line for line in text.splitlines()),
    }
