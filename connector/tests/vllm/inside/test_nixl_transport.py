"""Two of vLLM's NIXL workers in this process, one writing into the other's KV cache over loopback. No model."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
import zmq
from vllm.config import set_current_vllm_config
from vllm.distributed import (
    cleanup_dist_env_and_memory,
    init_distributed_environment,
    initialize_model_parallel,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

from disagg_connector.compat import load
from disagg_connector.ports import WriteJob
from disagg_connector.protocol import Address, Peer, read_announcement
from e2e.ports import free_port

compat = load()

CORES = os.sched_getaffinity(0)
HOST, LIMIT = "127.0.0.1", 180.0
BLOCKS, BLOCK, HEADS, HEAD = 8, 32, 2, 32
LAYERS = ["model.layers.0.self_attn.attn", "model.layers.1.self_attn.attn"]


@dataclass
class Side:
    """One engine's worker."""

    transport: Any
    caches: dict[str, torch.Tensor]
    peer: Peer
    ran: list[str]
    """The threads in which the writer's body has run."""


def wait_for(done: Callable[[], Any], what: str) -> Any:
    end = time.monotonic() + LIMIT
    while time.monotonic() < end:
        if result := done():
            return result
        time.sleep(0.005)
    raise AssertionError(f"not within {LIMIT:.0f} s: {what}")


def sides_config(make_config: Any) -> Any:
    config = make_config()
    config.cache_config.num_gpu_blocks = BLOCKS
    config.cache_config.kv_cache_layout = "LBHNC"
    return config


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory, make_config: Any) -> Iterator[tuple[Side, Side]]:
    """The writer and the one that is written into, whose side channel serves its memory's description."""
    port = free_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_NIXL_SIDE_CHANNEL_HOST", HOST)
        patch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", str(port))
        patch.setenv("UCX_TLS", "tcp,self")
        patch.setenv("UCX_NET_DEVICES", "lo")
        config = sides_config(make_config)
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=HEADS, head_size=HEAD, dtype=torch.float32)
        kv_cache = KVCacheConfig(
            num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(LAYERS, spec)]
        )
        rendezvous = tmp_path_factory.mktemp("ranks") / "store"
        with set_current_vllm_config(config):
            init_distributed_environment(1, 0, f"file://{rendezvous}", 0, "gloo")
            initialize_model_parallel(1, 1)
            writer, receiver = (made(name, config, kv_cache, port) for name in ("writer", "receiver"))
            channel = compat.SideChannel(config, "receiver", kv_cache)
            channel.serve({(0, 0): receiver.transport.handshake_metadata})
            yield writer, receiver
            channel.close()
            for side in (writer, receiver):
                side.transport.close()
        cleanup_dist_env_and_memory()


def made(name: str, config: Any, kv_cache: Any, port: int) -> Side:
    transport = compat.NixlTransport(config, name, kv_cache)
    caches = {layer: torch.empty(BLOCKS, HEADS, BLOCK, 2 * HEAD) for layer in LAYERS}
    ran: list[str] = []
    transport.register(caches, lambda: ran.append(threading.current_thread().name))
    peer = Peer(name, Address(HOST, 5700), HOST, port, 1, "fingerprint")
    return Side(transport, caches, peer, ran)


def fill(sides: tuple[Side, Side]) -> None:
    """Every block of every layer of the writer holds a number of its own; the receiver's are empty."""
    for index, layer in enumerate(LAYERS):
        for block in range(BLOCKS):
            sides[0].caches[layer][block] = 1 + index * BLOCKS + block
        sides[1].caches[layer].zero_()


def write(sides: tuple[Side, Side], xid: str, local: tuple[int, ...], remote: tuple[int, ...]) -> str:
    """One transfer; how it ended."""
    writer, receiver = sides
    handshake = writer.transport.connect(receiver.peer)
    if handshake is not None:
        handshake.result(LIMIT)
    posted = writer.transport.post(WriteJob(xid, receiver.peer, local, remote, 10.0))
    assert posted.whole
    assert posted.size == len(local) * len(LAYERS) * 2 * HEADS * BLOCK * HEAD * 4
    pending = posted.handles
    states: set[str] = set()

    def is_over() -> bool:
        for handle in list(pending):
            state = writer.transport.poll(handle)
            if state != "pending":
                pending.remove(handle)
                states.add(state)
        return not pending

    wait_for(is_over, "the write")
    (state,) = states
    return state


def test_a_write_fills_the_blocks_that_were_named_and_no_other(sides: tuple[Side, Side]) -> None:
    fill(sides)
    assert write(sides, "x1", (1, 2, 6), (5, 3, 0)) == "done"
    notes = wait_for(sides[1].transport.notifications, "the receiver's notification")
    assert [read_announcement(note) for note in notes] == [("x1", 0)]
    moved = {5: 1, 3: 2, 0: 6}
    for index, layer in enumerate(LAYERS):
        for block in range(BLOCKS):
            want = 1 + index * BLOCKS + moved[block] if block in moved else 0
            assert torch.all(sides[1].caches[layer][block] == want), f"{layer}, block {block}"


def test_what_was_written_is_counted_by_upstreams_statistics(sides: tuple[Side, Side]) -> None:
    sides[0].transport.take_stats()
    fill(sides)
    write(sides, "x2", (4,), (4,))
    stats = sides[0].transport.take_stats()
    assert stats is not None
    assert stats.num_successful_transfers == 1
    wait_for(sides[1].transport.notifications, "the receiver's notification")


def test_a_peer_that_is_forgotten_is_met_anew(sides: tuple[Side, Side]) -> None:
    writer, receiver = sides
    fill(sides)
    write(sides, "x3", (1,), (1,))
    assert writer.transport.connect(receiver.peer) is None, "known"
    writer.transport.forget(receiver.peer.engine_id)
    assert writer.transport.connect(receiver.peer) is not None, "asked again"
    assert write(sides, "x4", (2,), (2,)) == "done"
    wait_for(sides[1].transport.notifications, "the receiver's notification")


def test_a_peer_that_nobody_is_raises_and_starts_nothing(sides: tuple[Side, Side]) -> None:
    writer, receiver = sides
    stranger = Peer("stranger", receiver.peer.address, HOST, receiver.peer.nixl_port, 1, "fingerprint")
    with pytest.raises(Exception, match="stranger"):
        writer.transport.post(WriteJob("x5", stranger, (1,), (1,), 10.0))
    handshake = writer.transport.connect(stranger)
    assert handshake is not None
    assert handshake.exception(LIMIT) is not None, "the engine there has another id"


def meet(sides: tuple[Side, Side]) -> None:
    """The receiver's side channel is asked anew until it answers: a question that it had received when it failed is lost."""
    writer, receiver = sides
    writer.transport.forget(receiver.peer.engine_id)
    assert writer.transport.connect(receiver.peer) is not None, "asked again"
    wait_for(lambda: writer.transport.connect(receiver.peer) is None, "the side channel to answer")


@pytest.mark.parametrize("garbage", [b"", b"\xc1", b"hello", msgspec.msgpack.encode((b"get_meta_msg", 7, 7))])
def test_a_message_that_nobody_can_read_silences_no_side_channel(
    sides: tuple[Side, Side], garbage: bytes
) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.linger = 0
        stranger.connect(f"tcp://{HOST}:{sides[1].peer.nixl_port}")
        stranger.send_multipart([b"", garbage])
        meet(sides)


def test_a_side_channel_whose_port_is_taken_says_so(sides: tuple[Side, Side], make_config: Any) -> None:
    """Upstream waits for its listener without a limit: the engine would never start, nor end."""
    kv_cache = KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=[])
    with socket.socket() as holder, pytest.MonkeyPatch.context() as patch:
        holder.bind((HOST, 0))
        holder.listen()
        port = holder.getsockname()[1]
        patch.setenv("VLLM_NIXL_SIDE_CHANNEL_HOST", HOST)
        patch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", str(port))
        channel = compat.SideChannel(sides_config(make_config), "third", kv_cache)
        refused = pytest.raises(RuntimeError, match=f"{HOST}:{port} .*in use.*VLLM_NIXL_SIDE_CHANNEL_PORT")
        with refused:
            channel.serve({(0, 0): sides[1].transport.handshake_metadata})
        channel.close()


def test_the_writer_thread_runs_what_it_is_given(sides: tuple[Side, Side]) -> None:
    for side in sides:
        wait_for(lambda side=side: side.ran, "the writer thread")
        assert side.ran == ["nixl-push-writer"]


def test_the_process_keeps_its_cores(sides: tuple[Side, Side]) -> None:
    """On a CPU upstream's worker pins the process to one core."""
    assert os.sched_getaffinity(0) == CORES


class Stubborn:
    """A fake of NIXL whose transfer has failed and whose handle is in use until it is told."""

    def __init__(self) -> None:
        self.lets_go = False

    def check_xfer_state(self, handle: int) -> str:
        return "ERR"

    def release_xfer_handle(self, handle: int) -> None:
        if not self.lets_go:
            raise RuntimeError("the backend has not stopped")


def test_a_failed_write_that_nixl_does_not_release_is_still_under_way() -> None:
    nixl, failures = Stubborn(), []
    transport = object.__new__(compat.NixlTransport)
    stats = SimpleNamespace(record_failed_transfer=lambda: failures.append(1))
    transport._worker = SimpleNamespace(nixl_wrapper=nixl, xfer_stats=stats)
    assert transport.poll(7) == "pending", "its source blocks stay pinned"
    nixl.lets_go = True
    assert transport.poll(7) == "failed"
    assert failures
