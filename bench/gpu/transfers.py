"""What NIXL itself takes for a READ and for a WRITE of the same bytes, without an engine around it.

Two processes, one a GPU, with memory laid out as a model's KV cache: one region a layer, one descriptor a block and
layer. The same blocks are read and written in turn, with the poll of the connector's writer thread. Shows how much
of a transfer in an engine is the transport's.
"""

from __future__ import annotations

import multiprocessing
import time
from dataclasses import asdict, dataclass
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any

_AGENTS = ("initiator", "target")


@dataclass(frozen=True)
class Layout:
    """Of Qwen3-32B in bfloat16 with blocks of 16 tokens: 64 KiB a block and layer."""

    layers: int = 64
    blocks: int = 2_500
    block_bytes: int = 65_536


@dataclass(frozen=True)
class Sample:
    """One transfer. Milliseconds."""

    operation: str
    blocks: int
    scattered: bool
    poll_ms: float
    prepare: float
    post: float
    total: float
    """From the call that prepares it to the poll that finds it done."""
    nixl_xfer_us: float
    descriptors: int


def compare(layout: Layout, repeats: int) -> list[dict[str, Any]]:
    """All samples, in the order they were taken."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    target = context.Process(target=_serve, args=(layout, there), daemon=True)
    target.start()
    results, ours = context.Pipe(duplex=False)
    initiator = context.Process(target=_initiate, args=(layout, repeats, here, ours), daemon=True)
    initiator.start()
    ours.close()
    try:
        samples: list[dict[str, Any]] = results.recv()
    finally:
        for process in (initiator, target):
            process.terminate()
            process.join(10)
    return samples


def _agent(name: str, layout: Layout, gpu: int) -> tuple[Any, Any, list[Any]]:
    """A NIXL agent made as vLLM makes its own, its descriptors, and its memory."""
    import torch
    from nixl._api import nixl_agent, nixl_agent_config

    torch.cuda.set_device(gpu)
    size = layout.blocks * layout.block_bytes
    regions = [torch.ones(size, dtype=torch.uint8, device=f"cuda:{gpu}") for _ in range(layout.layers)]
    agent = nixl_agent(name, nixl_agent_config(num_threads=4, capture_telemetry=True))
    agent.register_memory([(region.data_ptr(), size, gpu, "") for region in regions], "VRAM")
    descriptors = [
        (region.data_ptr() + block * layout.block_bytes, layout.block_bytes, gpu)
        for region in regions
        for block in range(layout.blocks)
    ]
    return agent, agent.get_xfer_descs(descriptors, "VRAM"), regions


def _serve(layout: Layout, pipe: Connection) -> None:
    agent, descriptors, regions = _agent(_AGENTS[1], layout, 1)
    pipe.send((agent.get_agent_metadata(), agent.get_serialized_descs(descriptors)))
    while True:
        agent.get_new_notifs()
        time.sleep(0.001)
        if not regions:
            return


def _initiate(layout: Layout, repeats: int, pipe: Connection, results: Connection) -> None:
    agent, mine, _regions = _agent(_AGENTS[0], layout, 0)
    metadata, serialized = pipe.recv()
    peer = agent.add_remote_agent(metadata)
    local = agent.prep_xfer_dlist("NIXL_INIT_AGENT", mine)
    remote = agent.prep_xfer_dlist(peer, agent.deserialize_descs(serialized))
    samples = []
    for blocks in (layout.blocks * 2 // 5, 19):
        for scattered in (False, True):
            for poll_ms in (1.0, 0.0):
                for _ in range(repeats):
                    for operation in ("READ", "WRITE"):
                        ids = _ids(layout, blocks, scattered)
                        samples.append(
                            asdict(
                                _transfer(agent, operation, local, remote, ids, blocks, scattered, poll_ms)
                            )
                        )
    results.send(samples)


def _ids(layout: Layout, blocks: int, scattered: bool) -> Any:
    numpy: Any = import_module("numpy")  # only engines have it
    chosen = numpy.arange(blocks) * (2 if scattered else 1)
    return numpy.concatenate([chosen + layer * layout.blocks for layer in range(layout.layers)]).astype(
        numpy.int32
    )


def _transfer(
    agent: Any,
    operation: str,
    local: Any,
    remote: Any,
    ids: Any,
    blocks: int,
    scattered: bool,
    poll_ms: float,
) -> Sample:
    begun = time.perf_counter()
    handle = agent.make_prepped_xfer(
        operation, local, ids, remote, ids, b"done:1" if operation == "WRITE" else b""
    )
    prepared = time.perf_counter()
    state = agent.transfer(handle)
    posted = time.perf_counter()
    while state == "PROC":
        if poll_ms:
            time.sleep(poll_ms / 1000)
        state = agent.check_xfer_state(handle)
    over = time.perf_counter()
    if state != "DONE":
        raise RuntimeError(f"NIXL says {state} of a {operation}")
    telemetry = agent.get_xfer_telemetry(handle)
    agent.release_xfer_handle(handle)
    return Sample(
        operation, blocks, scattered, poll_ms,
        round((prepared - begun) * 1000, 3), round((posted - prepared) * 1000, 3), round((over - begun) * 1000, 3),
        float(telemetry.xferDuration), int(telemetry.descCount),
    )  # fmt: skip
