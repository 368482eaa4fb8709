"""The connector with its eyes open: writes a checksum of every block that leaves or arrives into a ledger.

Set `ledger.FOLDER` in an engine's environment and load `CheckingConnector` of this module in place of the connector.
The path of the data is the connector's own; only looks are added. A test can also have a fault put in, to see that the
checksums show it: by a file in the ledger's folder, which the next transfer that fits takes away.

* `flip-ROLE-RANK`: one bit of one block changes on its way into this rank of this role's engine;
* `substitute-ROLE-RANK`: this rank writes its transfer's first block in place of all others.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

from connector.tests.engine.checksums import Checksums
from connector.tests.engine.ledger import FOLDER, Ledger, Stage
from disagg_connector.connector import BidirectionalPushConnector
from disagg_connector.ports import Posted, WriteJob

FLIP, SUBSTITUTE = "flip", "substitute"


def heads_of_rank(total_heads: int, rank: int, ranks: int) -> list[int]:
    """Which of the model's KV heads a rank keeps; with more ranks than heads several keep the same."""
    if ranks > total_heads:
        return [rank * total_heads // ranks]
    each = total_heads // ranks
    return list(range(rank * each, (rank + 1) * each))


class CheckingConnector(BidirectionalPushConnector):
    """Writes a ledger; see the module's docstring."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.folder = Path(os.environ[FOLDER])
        self.engine_role: str = vllm_config.kv_transfer_config.kv_connector_extra_config["role"]
        if role == KVConnectorRole.SCHEDULER:
            self._landing_in: dict[int, str] = {}
            self._published: dict[str, list[int]] = {}
            return
        rank = get_tensor_model_parallel_rank()
        model, ranks = vllm_config.model_config, vllm_config.parallel_config.tensor_parallel_size
        heads = 1 if model.use_mla else model.get_total_num_kv_heads()
        self._heads = heads_of_rank(heads, rank, ranks)
        self._num_blocks: int = kv_cache_config.num_blocks
        self.ledger = Ledger(self.folder, rank)
        self._targets: dict[str, Sequence[int]] = {}
        self._loads: dict[str, str] = {}

    # --- Scheduler side: which blocks a transfer is to fill, and which it has -----------------------

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        super().bind_gpu_block_pool(gpu_block_pool)
        if self.engine_role != "prefill":
            return  # decode publishes only what it has computed itself
        pool: Any = self._s.scheduler.context.pool
        insert = pool.insert

        def insert_and_note(block_hash: bytes, block: int, num_tokens: int) -> None:
            insert(block_hash, block, num_tokens)
            self._published.setdefault(self._landing_in.get(block, "unknown"), []).append(block)

        pool.insert = insert_and_note

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        meta = super().build_connector_meta(scheduler_output)
        meta.targets = {
            coming.xid: self._blocks_of(coming.xid, coming.request) for coming in meta.orders.expect
        }
        for xid, blocks in meta.targets.items():
            self._landing_in.update(dict.fromkeys(blocks, xid))
        meta.published, self._published = self._published, {}
        return meta

    def _blocks_of(self, xid: str, request: str) -> tuple[int, ...]:
        """The blocks that a transfer may write into; none if it has been called off already."""
        scheduler = self._s.scheduler
        if request:
            turn = scheduler.loads._turns.get(request)
            return turn.blocks if turn is not None and turn.xid == xid else ()
        landing = scheduler.writeback._landings.by_xid.get(xid)
        return () if landing is None else landing.blocks

    # --- Worker side --------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: Any) -> None:
        self.checksums = Checksums(kv_caches, self._num_blocks)
        transport = self._w.transport
        post = transport.post

        def check_and_post(job: WriteJob, *more: Any) -> Posted:
            self._note("source", job.xid, job.remote, job.local)
            if len(set(job.local)) > 1 and self._asked_for(SUBSTITUTE):
                self._note("corrupted", job.xid)
                # Not a permutation: attention does not see in which order a request's blocks are.
                job = replace(job, local=(job.local[0],) * len(job.local))
            posted: Posted = post(job, *more)
            return posted

        transport.post = check_and_post
        super().register_kv_caches(kv_caches)

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        orders = connector_metadata.orders
        for xid, blocks in connector_metadata.published.items():
            self._note("published", xid, blocks)
        for xid in orders.ignore:
            self._targets.pop(xid, None)
        self._targets.update(connector_metadata.targets)
        self._loads.update({coming.request: coming.xid for coming in orders.expect if coming.request})
        super().bind_connector_metadata(connector_metadata)

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        results = super().get_transfer_results(finished_req_ids)
        failed = results.failed_recving or set()
        for request in results.finished_recving or ():
            xid = self._loads.pop(request)
            if request not in failed:
                self._arrived(xid)
        return results

    def build_connector_worker_meta(self) -> Any:
        meta = super().build_connector_worker_meta()
        landed: Mapping[str, int] = {} if meta is None else meta.report.landed
        for xid in landed:
            self._arrived(xid)
        return meta

    def _arrived(self, xid: str) -> None:
        """NIXL has announced a transfer on this rank; the engine has not heard of it yet."""
        blocks = self._targets.get(xid, ())
        if not blocks:
            return  # called off meanwhile: nobody will read what has arrived
        if self._asked_for(FLIP):
            self._note("corrupted", xid)
            self.checksums.flip(blocks[len(blocks) // 2])
        self._note("target", xid, blocks)

    def _note(
        self, stage: Stage, xid: str, blocks: Sequence[int] = (), local: Sequence[int] | None = None
    ) -> None:
        """Write down what lies in `local` blocks of ours, for the receiver's `blocks`: the same if it is us."""
        if not blocks:
            self.ledger.write(stage, xid)
            return
        found = self.checksums.of(blocks if local is None else local)
        self.ledger.write(stage, xid, blocks, self._heads, found)

    def _asked_for(self, fault: str) -> bool:
        """Whether a test wants this fault now; asking takes the wish away."""
        try:
            (self.folder / f"{fault}-{self.engine_role}-{self.ledger.rank}").unlink()
        except FileNotFoundError:
            return False
        return True
