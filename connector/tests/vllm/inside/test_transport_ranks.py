"""Real NIXL between the ranks of two engines in one process: every head of every block gets to where it belongs.

Only the ranks' numbers are put in; registration, handshake, descriptors, writes and announcements are upstream's and
the connector's own. What is compared are bytes, block by block, those of blocks that nothing was to be written into too.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MLAAttentionSpec

from connector.tests.processor import needs_fp8
from disagg_connector.compat import load
from disagg_connector.ports import Incoming, Orders, Tally, WorkerReport, WriteJob
from disagg_connector.protocol import Address, Peer
from disagg_connector.ranks import heads_of
from disagg_connector.worker import Worker
from e2e.ports import free_port

HOST = "127.0.0.1"
LAYERS, BLOCKS = 3, 12
LIMIT_SECONDS = 180
compat = load()


@dataclass(frozen=True)
class Model:
    """What decides the shape of a KV cache."""

    heads: int
    mla: bool = False
    kv_dtype: str = "auto"

    @property
    def block_size(self) -> int:
        return 16 if self.mla else 32  # what the CPU's kernels take

    @property
    def element(self) -> torch.dtype:
        return torch.float32 if self.kv_dtype == "auto" else torch.uint8

    @property
    def content(self) -> int:
        """Elements of one token and head: key and value, or the latent."""
        return 576 if self.mla else 64

    def spec(self, ranks: int) -> FullAttentionSpec:
        if self.mla:
            return MLAAttentionSpec(
                block_size=self.block_size, num_kv_heads=1, head_size=self.content, dtype=self.element
            )
        here = max(1, self.heads // ranks)
        return FullAttentionSpec(
            block_size=self.block_size, num_kv_heads=here, head_size=self.content // 2, dtype=self.element
        )

    def shape(self, ranks: int) -> tuple[int, ...]:
        if self.mla:
            return BLOCKS, self.block_size, self.content
        return BLOCKS, max(1, self.heads // ranks), self.block_size, self.content

    def config(self, folder: Path) -> Any:
        """vLLM's configuration, of a model that exists as far as its config.json."""
        common = {
            "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": LAYERS,
            "max_position_embeddings": 512, "num_attention_heads": 16,
        }  # fmt: skip
        own: dict[str, Any] = {"num_key_value_heads": self.heads, "head_dim": 32}
        if self.mla:
            own = {
                "num_key_value_heads": 16, "kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 32,
                "qk_rope_head_dim": 64, "v_head_dim": 32, "n_routed_experts": 4, "num_experts_per_tok": 2,
            }  # fmt: skip
        kind = ("deepseek_v2", "DeepseekV2ForCausalLM") if self.mla else ("qwen3", "Qwen3ForCausalLM")
        (folder / "config.json").write_text(
            json.dumps({"model_type": kind[0], "architectures": [kind[1]], **common, **own})
        )
        transfer = {
            "kv_connector": "BidirectionalPushConnector",
            "kv_connector_module_path": "disagg_connector.connector",
            "kv_role": "kv_both",
        }
        made = EngineArgs(
            model=str(folder), skip_tokenizer_init=True, dtype="float32", block_size=self.block_size,
            kv_cache_dtype=self.kv_dtype, kv_transfer_config=transfer, max_model_len=512,
            # Left alone, vLLM takes another on a CPU with AMX, of blocks of another size.
            attention_backend=AttentionBackendEnum.CPU_MLA if self.mla else None,
        ).create_engine_config()  # fmt: skip
        made.cache_config.num_gpu_blocks = BLOCKS
        made.cache_config.kv_cache_layout = "LBNHC" if self.mla else "LBHNC"
        return made


class Rank:
    """One rank's KV cache, transport and writer thread."""

    def __init__(self, model: Model, config: Any, engine_id: str, rank: int, ranks: int) -> None:
        names = [f"model.layers.{index}.self_attn.attn" for index in range(LAYERS)]
        groups = [KVCacheGroupSpec(names, model.spec(ranks))]
        kv_cache = KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=groups)
        self.layers = [torch.zeros(model.shape(ranks), dtype=model.element) for _ in names]
        self.transport = compat.NixlTransport(config, engine_id, kv_cache)
        self.worker = Worker(self.transport)
        self.transport.register(dict(zip(names, self.layers, strict=True)), self.worker.run)

    def close(self) -> None:
        self.worker.stop()
        self.transport.close()


class Engine:
    """The workers of an engine of so many ranks, and the side channel at which they are known."""

    def __init__(self, model: Model, ranks: int, folder: Path, patch: pytest.MonkeyPatch) -> None:
        config = model.config(folder)
        config.kv_transfer_config.engine_id = str(uuid.uuid4())
        port = free_port()
        patch.setenv("VLLM_NIXL_SIDE_CHANNEL_HOST", HOST)
        patch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", str(port))
        engine_id = config.kv_transfer_config.engine_id
        self.model, self.size = model, ranks
        self.peer = Peer(engine_id, Address(HOST, 1), HOST, port, ranks, "fp")
        self.ranks = []
        patch.setattr(base_worker, "get_tensor_model_parallel_world_size", lambda: ranks)
        for rank in range(ranks):
            patch.setattr(base_worker, "get_tensor_model_parallel_rank", lambda rank=rank: rank)
            self.ranks.append(Rank(model, config, engine_id, rank, ranks))
        kv_cache = KVCacheConfig(
            num_blocks=BLOCKS,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["l"], model.spec(ranks))],
        )
        self.side_channel = compat.SideChannel(config, engine_id, kv_cache)
        self.side_channel.serve(
            {(0, rank): made.transport.handshake_metadata for rank, made in enumerate(self.ranks)}
        )

    def fill(self) -> None:
        """Every block of every layer and head with bytes of its own, the same on all ranks that hold the head."""
        for rank, made in enumerate(self.ranks):
            for layer, cache in enumerate(made.layers):
                for place, head in enumerate(heads_of(rank, self.size, self.model.heads)):
                    for block in range(BLOCKS):
                        of_head(cache, block, place).copy_(truth(self.model, layer, block, head))

    def submit(self, orders: Orders) -> None:
        for made in self.ranks:
            made.worker.submit(orders)

    def close(self) -> None:
        for made in self.ranks:
            made.close()
        self.side_channel.close()


def of_head(cache: torch.Tensor, block: int, place: int) -> torch.Tensor:
    """One head's part of a block; a latent is whole."""
    return cache[block, place] if cache.ndim == 4 else cache[block]


def truth(model: Model, layer: int, block: int, head: int) -> torch.Tensor:
    """What block `block` holds of a head, as its writer has it."""
    seed = torch.Generator().manual_seed((layer * BLOCKS + block) * 64 + head)
    shape = (model.block_size, model.content)
    if model.element == torch.uint8:
        return torch.randint(1, 256, shape, generator=seed, dtype=torch.uint8)
    return torch.rand(shape, generator=seed) + 1


Start = Callable[[Model, int], Engine]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    kv_cache_utils.init_none_hash(get_hash_fn_by_name("sha256"))
    started: list[Engine] = []

    def start_engine(model: Model, ranks: int) -> Engine:
        # One folder: its path is a part of the compatibility hash.
        started.append(Engine(model, ranks, tmp_path, monkeypatch))
        return started[-1]

    yield start_engine
    for engine in started:
        engine.close()


def gather(engine: Engine, enough: Callable[[WorkerReport], bool], what: str) -> WorkerReport:
    """All that the ranks report until it is enough."""
    all_of_it = WorkerReport()
    deadline = time.monotonic() + LIMIT_SECONDS
    while not enough(all_of_it):
        assert time.monotonic() < deadline, f"Not within {LIMIT_SECONDS} s: {what}; so far {all_of_it}"
        for made in engine.ranks:
            report = made.worker.take_report()
            if report is not None:
                all_of_it.merge(report)
        time.sleep(0.002)
    return all_of_it


def move(writer: Engine, owner: Engine, local: tuple[int, ...], remote: tuple[int, ...]) -> Tally:
    """One transfer, until the writer's ranks are through and it has landed on all of the owner's."""
    owner.submit(Orders(expect=[Incoming("xid", writer.size)]))
    writer.submit(Orders(writes=[WriteJob("xid", owner.peer, local, remote, LIMIT_SECONDS)]))
    sent = gather(
        writer, lambda r: "xid" in r.sent and r.sent["xid"].done == writer.size, "ranks are through"
    )
    tally = sent.sent["xid"]
    assert not tally.failed, "see the log"
    gather(owner, lambda r: r.landed.get("xid") == owner.size, "the write has landed on every rank")
    return tally


def check(owner: Engine, local: tuple[int, ...], remote: tuple[int, ...]) -> None:
    """The owner holds the writer's blocks `local` in `remote`, and nothing anywhere else."""
    came_from = dict(zip(remote, local, strict=True))
    for rank, made in enumerate(owner.ranks):
        for layer, cache in enumerate(made.layers):
            for place, head in enumerate(heads_of(rank, owner.size, owner.model.heads)):
                for block in range(BLOCKS):
                    got = of_head(cache, block, place)
                    if block in came_from:
                        want = truth(owner.model, layer, came_from[block], head)
                        assert torch.equal(got, want), (rank, layer, head, block)
                    else:
                        assert not got.any(), f"block {block} was not to be written into"


DENSE, WIDE, ONE_HEAD = Model(heads=2), Model(heads=8), Model(heads=1)
LATENT, FP8 = Model(heads=1, mla=True), Model(heads=2, kv_dtype="fp8")

# The model, writing and owning ranks, and how many copies of the KV are written in all.
CASES = {
    "one to one": (DENSE, 1, 1, 1),
    "two to two": (DENSE, 2, 2, 1),
    "one to two": (DENSE, 1, 2, 1),
    "two to one": (DENSE, 2, 1, 1),
    "two to four": (WIDE, 2, 4, 1),
    "four to two": (WIDE, 4, 2, 1),
    "one to four, two heads": (DENSE, 1, 4, 2),
    "four to one, two heads": (DENSE, 4, 1, 1),
    "two to four, two heads": (DENSE, 2, 4, 2),
    "one to two, one head": (ONE_HEAD, 1, 2, 2),
    "four to two, one head": (ONE_HEAD, 4, 2, 2),
    "latent, one to two": (LATENT, 1, 2, 2),
    "latent, two to one": (LATENT, 2, 1, 1),
    "latent, two to two": (LATENT, 2, 2, 2),
    "fp8, one to two": (FP8, 1, 2, 1),
    "fp8, two to one": (FP8, 2, 1, 1),
}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[needs_fp8] if CASES[case][0] is FP8 else []) for case in CASES]
)
def test_every_head_lands_on_every_rank_that_holds_it(case: str, start: Start) -> None:
    model, writers, owners, copies = CASES[case]
    writer, owner = start(model, writers), start(model, owners)
    writer.fill()
    local, remote = (3, 4, 9, 1), (2, 7, 5, 10)
    tally = move(writer, owner, local, remote)
    check(owner, local, remote)
    block_bytes = LAYERS * model.heads * model.block_size * model.content * model.element.itemsize
    assert tally.size == copies * len(local) * block_bytes


def test_a_wrong_slice_would_be_noticed(start: Start) -> None:
    """The negative control of `check`."""
    writer, owner = start(DENSE, 2), start(DENSE, 1)
    writer.fill()
    first, second = (made.layers[0][3] for made in writer.ranks)
    first.copy_(second.clone())
    move(writer, owner, (3,), (2,))
    with pytest.raises(AssertionError):
        check(owner, (3,), (2,))
