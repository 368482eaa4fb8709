"""NIXL through upstream's push worker: the side channel, the transport, statistics, the KV cache layout it wants."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from threading import Event
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_scheduler import NixlBaseConnectorScheduler
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlBaseConnector
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.push_worker import NixlPushConnectorWorker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import NixlKVConnectorStats, NixlPromMetrics
from vllm.v1.kv_cache_layout import KVCacheLayout

from disagg_connector.compat.identity import kv_heads
from disagg_connector.ports import Posted, WriteJob
from disagg_connector.protocol import Peer, announcement
from disagg_connector.ranks import Piece, Shard

logger = logging.getLogger(__name__)

NixlStats = NixlKVConnectorStats
NixlMetrics = NixlPromMetrics


def kv_cache_layout(vllm_config: Any) -> str | None:
    """The KV cache layout that NIXL wants."""
    layout: str | None = NixlBaseConnector.get_required_kvcache_layout(vllm_config)
    return layout


class _NixlScheduler(NixlBaseConnectorScheduler):  # type: ignore[misc]
    """Upstream's scheduler side, whose listener says when it cannot listen and outlives what it cannot read."""

    listener_failure: Exception | None = None

    def _nixl_handshake_listener(
        self, encoded_data: Any, ready_event: Event, stop_event: Event, host: str, port: int
    ) -> None:
        while not stop_event.is_set():
            try:
                super()._nixl_handshake_listener(encoded_data, ready_event, stop_event, host, port)
            except Exception as error:
                if not ready_event.is_set():
                    self.listener_failure = error
                    ready_event.set()  # upstream waits for it without a limit
                    return
                logger.warning("NIXL's side channel failed and listens again in a second: %r", error)
                stop_event.wait(1.0)  # so that a failure that stays fills no log


class SideChannel:
    """Serves this engine's NIXL agent metadata, as upstream's scheduler side does."""

    def __init__(self, vllm_config: Any, engine_id: str, kv_cache_config: Any) -> None:
        self._scheduler = _NixlScheduler(vllm_config, engine_id, kv_cache_config)

    def serve(self, metadata: Any) -> None:
        """Raises `RuntimeError` if the address cannot be listened at, as when the port is taken."""
        self._scheduler.set_xfer_handshake_metadata(metadata)
        failure = self._scheduler.listener_failure
        if failure is not None:
            host, port = self._scheduler.side_channel_host, self._scheduler.side_channel_port
            raise RuntimeError(
                f"NIXL's side channel cannot listen at {host}:{port} ({failure}). Other engines learn there how to"
                " write into this one's KV cache. Set VLLM_NIXL_SIDE_CHANNEL_PORT to a port that is free,"
                " VLLM_NIXL_SIDE_CHANNEL_HOST to an address of this host."
            ) from failure

    def close(self) -> None:
        self._scheduler.shutdown()


class _NixlWorker(NixlPushConnectorWorker):  # type: ignore[misc]
    """Upstream's worker for registration, handshake and descriptors; its writer thread runs `body`."""

    body: Callable[[], None]

    def _push_writer_loop(self) -> None:
        self.body()

    def _validate_remote_agent_handshake(
        self, nixl_agent_meta: Any, remote_tp_size: int, remote_dcp_size: int = 1
    ) -> None:
        topology = self.transfer_topo
        if (
            self.use_mla
            or topology.tp_ratio(remote_tp_size) > 0
            or remote_tp_size <= topology.total_num_kv_heads
        ):
            super()._validate_remote_agent_handshake(nixl_agent_meta, remote_tp_size, remote_dcp_size)
            return
        # More ranks there than KV heads, fewer here: upstream refuses, since it has readers in mind. What it
        # prepares fits writers: one slice of a local block a head, whole blocks on every remote rank.
        ours = (
            self.kv_cache_layout,
            [size // topology.local_physical_heads for size in self.block_len_per_layer],
        )
        theirs = (nixl_agent_meta.kv_cache_layout, list(nixl_agent_meta.block_lens))
        if ours != theirs or not KVCacheLayout[self.kv_cache_layout].is_block_contiguous:
            raise RuntimeError(f"KV caches differ: layout and bytes a head {ours} here, {theirs} there")


class NixlTransport:
    """`worker.Transport` over upstream's NIXL worker.

    Writes and notifications are used from the writer thread alone, which is started by `register`.
    """

    def __init__(self, vllm_config: Any, engine_id: str, kv_cache_config: Any) -> None:
        # On a CPU device upstream pins the process to one core; two engines would share it.
        mask = os.sched_getaffinity(0)
        try:
            self._worker = _NixlWorker(vllm_config, engine_id, kv_cache_config)
        finally:
            os.sched_setaffinity(0, mask)
        self.shard = Shard(self._worker.tp_rank, self._worker.world_size, kv_heads(vllm_config))

    def register(self, kv_caches: Any, body: Callable[[], None]) -> None:
        """Register the KV cache with NIXL and run `body` in the writer thread."""
        self._worker.body = body
        self._worker.register_kv_caches(kv_caches)

    @property
    def handshake_metadata(self) -> Any:
        return self._worker.xfer_handshake_metadata

    def connect(self, peer: Peer) -> Future[Any] | None:
        """None if the peer's memory is known or need not be, else what to wait for."""
        if not self.shard.writes_into(peer.tensor_parallel):
            return None
        future: Future[Any] | None = self._worker._ensure_handshake(
            peer.engine_id, peer.nixl_host, peer.nixl_port, peer.tensor_parallel
        )
        return future

    def post(self, job: WriteJob) -> Posted:
        """Start writing this rank's part. Raises if nothing was started."""
        worker, engine = self._worker, job.peer.engine_id
        parts = self.shard.writes_into(job.peer.tensor_parallel)
        posted = Posted()
        if not parts:
            return posted
        worker._engine_last_active[engine] = time.perf_counter()
        here, there = (
            worker._physical_blocks_per_logical_kv_block,
            worker.transfer_topo.get_engine_info(engine),
        )
        local = self._descriptors(job.local, worker.engine_id, here)
        remote = self._descriptors(job.remote, engine, there.remote_physical_blocks_per_logical)
        block_bytes = sum(worker.block_len_per_layer) * here
        for part in parts:
            try:
                handle = self._prepare(job, part, local, remote)
            except Exception:
                logger.exception("NIXL refused the write %s to rank %d of %s", job.xid, part.owner, engine)
                posted.whole = False
                break
            posted.handles.append(handle)
            posted.size += (
                len(job.local) * block_bytes * part.heads // worker.transfer_topo.local_physical_heads
            )
            try:
                worker.nixl_wrapper.transfer(handle)
            except Exception:
                # What may have been started is waited for like any other write, which has failed then.
                logger.exception("The write %s to rank %d of %s did not start", job.xid, part.owner, engine)
        return posted

    def _prepare(self, job: WriteJob, part: Piece, local: Any, remote: Any) -> Any:
        """A write to one rank, between the descriptor lists that the handshake has prepared."""
        worker, there = self._worker, job.peer.tensor_parallel
        if there > worker.world_size and not worker.use_mla:
            # Lists of slices of our blocks, one for each distinct slice.
            slices = worker.src_xfer_handles_by_tp_ratio[
                worker.transfer_topo.tp_ratio(there), worker.block_size
            ]
            source = slices[part.source // part.heads]
        else:
            source = worker.src_xfer_handles_by_block_size[worker.block_size]
        target = worker.dst_xfer_side_handles[job.peer.engine_id][part.owner]
        note = announcement(job.xid, worker.tp_rank)
        return worker.nixl_wrapper.make_prepped_xfer("WRITE", source, local, target, remote, notif_msg=note)

    def _descriptors(self, blocks: Sequence[int], engine: str, ratio: int) -> Any:
        """Where blocks are in an engine's prepared descriptor list."""
        worker = self._worker
        return worker._compute_desc_ids(
            block_ids=worker._logical_to_kernel_block_ids((list(blocks),), ratio),
            dst_num_blocks=worker.dst_num_blocks[engine],
            block_size_ratio=None,
            physical_blocks_per_logical=ratio,
            region_num_blocks=worker.dst_region_num_blocks[engine],
            region_group_ids=worker.dst_region_group_ids[engine],
            uses_region_group_mapping=worker.dst_uses_region_group_mapping[engine],
        )

    def poll(self, handle: Any) -> str:
        """ "pending", "done" or "failed". A failed handle that NIXL will not release is still pending: the
        backend may not have stopped."""
        nixl = self._worker.nixl_wrapper
        try:
            state = nixl.check_xfer_state(handle)
            if state == "PROC":
                return "pending"
            if state == "DONE":
                self._worker.xfer_stats.record_transfer(nixl.get_xfer_telemetry(handle))
                nixl.release_xfer_handle(handle)
                return "done"
        except Exception as error:
            state = repr(error)
        self._worker.xfer_stats.record_failed_transfer()
        try:
            nixl.release_xfer_handle(handle)
        except Exception:
            return "pending"
        return "failed"

    def notifications(self) -> list[bytes]:
        """What peers' writes have announced since the last call."""
        return [note for notes in self._worker.nixl_wrapper.get_new_notifs().values() for note in notes]

    def forget(self, engine_id: str) -> None:
        """Drop everything that NIXL keeps of a peer that is gone."""
        if engine_id in self._worker._remote_agents:
            self._worker._cleanup_remote_engine(engine_id)

    def take_stats(self) -> Any:
        """Upstream's statistics since the last call, or None."""
        return self._worker.get_kv_connector_stats()

    def close(self) -> None:
        self._worker.shutdown()
