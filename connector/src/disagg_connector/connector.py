"""BidirectionalPush: vLLM's connector interface, in two thin halves.

Scheduler side (in the EngineCore process, role SCHEDULER), by `scheduler.Scheduler`:

* read a request's ``kv_transfer_params`` and decide which leg of a turn it is;
* prefill: pin a finished prompt until decode has said where to write it; land what decode writes back,
  publish it in the prefix cache, ask decode for what is missing;
* decode: have the prompt's missing blocks written by prefill or compute them; offer a turn's blocks to
  prefill at its end, and what prefill asks for;
* talk to peers' schedulers over the control channel, and give the workers their orders.

Worker side (in each worker process, role WORKER), by `worker.Worker`:

* register the KV cache with NIXL, write blocks into peers, notice what peers have written, report.

Two envelopes a step link the halves: `StepOrders` down and `StepReport` up; on decode a socket besides, so that a
turn's end is written back between steps (`direct`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from disagg_connector.compat import load
from disagg_connector.config import check_reserve, parse_config
from disagg_connector.context import Board
from disagg_connector.control import ControlChannel
from disagg_connector.direct import Link, NoLink
from disagg_connector.hashes import blocks_for
from disagg_connector.keyfiles import codec_for
from disagg_connector.link import LinkServer, RankLink, join
from disagg_connector.metrics import PushMetrics, PushStats
from disagg_connector.ports import Orders, Tally, WorkerReport
from disagg_connector.scheduler import FastAnswers, Identity, Scheduler
from disagg_connector.worker import Worker

logger = logging.getLogger(__name__)


def _log_like_vllm() -> None:
    """Send this package's log where vLLM's goes: only loggers below "vllm" are set up by it."""
    ours, theirs = logging.getLogger("disagg_connector"), logging.getLogger("vllm")
    ours.handlers, ours.propagate = theirs.handlers, not theirs.handlers
    ours.setLevel(theirs.level)


_log_like_vllm()


class StepOrders(KVConnectorMetadata):  # type: ignore[misc]
    """Scheduler to workers."""

    def __init__(self, orders: Orders) -> None:
        self.orders = orders


class StepReport(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """Workers to scheduler."""

    def __init__(self, report: WorkerReport) -> None:
        self.report = report

    def aggregate(self, other: KVConnectorWorkerMetadata) -> StepReport:
        self.report.merge(other.report)
        return self


class _SchedulerHalf:
    """Everything that lives in the EngineCore process."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any) -> None:
        self.compat = load()
        self.compat.check_engine(vllm_config, kv_cache_config)
        self.vllm_config = vllm_config
        self.config = parse_config(vllm_config.kv_transfer_config.kv_connector_extra_config)
        self.block_size: int = vllm_config.cache_config.block_size
        engine_id: str = vllm_config.kv_transfer_config.engine_id
        address = self.compat.own_address(vllm_config, self.config)
        self.board = Board(time.monotonic)
        checkpoint = self.compat.read_checkpoint(vllm_config)
        self.identity = Identity(
            lambda: self.compat.fingerprint(vllm_config, checkpoint),
            lambda digest: self.compat.own_peer(vllm_config, address, digest),
        )
        self.answers = FastAnswers(self.config, engine_id, self.identity, self.board)
        wake: Callable[[], None] | None = self.compat.find_waker()
        if wake is None:
            logger.warning("This engine has no input queue: while idle it takes no part in transfers")
        self.channel = ControlChannel(address, self.answers, wake or (lambda: None), codec_for(self.config))
        self.side_channel = self.compat.SideChannel(vllm_config, engine_id, kv_cache_config)
        self.link: LinkServer | None = None
        self.scheduler: Scheduler

    def bind(self, block_pool: Any) -> None:
        """vLLM's blocks are there: start."""
        pool = self.compat.EnginePool(block_pool)
        longest = blocks_for(self.vllm_config.model_config.max_model_len, self.block_size)
        check_reserve(self.config, pool.total, longest)
        sharding = self.compat.sharding(self.vllm_config)
        self.scheduler = Scheduler(
            self.config,
            self.block_size,
            sharding,
            self.identity,
            self.channel,
            self.board,
            pool,
            link=self._listen(sharding.ranks),
        )
        if self.link is not None:
            self.link.serve(self.scheduler.context.direct.told)
        self.answers.peek = self.scheduler.offers.peek
        lifecycle = self.scheduler.lifecycle
        self.compat.on_cache_reset(block_pool, lifecycle.resetting, lifecycle.was_reset)
        if not self.compat.watch_engine(lifecycle):
            logger.warning(
                "This engine cannot be watched: after new weights, restart it before it exchanges KV"
            )
        self.channel.start()

    def _listen(self, ranks: int) -> Link:
        """For the ranks, where anything goes between steps."""
        if self.config.role != "decode":
            return NoLink()
        try:
            self.link = LinkServer(ranks, self.channel)
        except OSError as error:
            logger.warning("Write-backs wait for engine steps, there is no socket for the ranks: %s", error)
            return NoLink()
        return self.link

    def view(self, request: Any) -> Any:
        return self.compat.EngineRequest(request, self.block_size)

    def close(self) -> None:
        self.channel.close()
        if self.link is not None:
            self.link.close()
        self.side_channel.close()


class _WorkerHalf:
    """Everything that lives in a worker process."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any) -> None:
        engine_id = vllm_config.kv_transfer_config.engine_id
        self.transport = load().NixlTransport(vllm_config, engine_id, kv_cache_config)
        self.worker = Worker(self.transport, tell=self._tell)
        self.link: RankLink | None = None
        self._was_invited = False

    def submit(self, orders: Orders) -> None:
        if orders.link and not self._was_invited:
            self._was_invited = True
            self.link = join(orders.link, self.transport.shard.rank, self.worker.write)
        self.worker.submit(orders)

    def _tell(self, xid: str, tally: Tally) -> None:
        if self.link is not None:
            self.link.tell(xid, tally)

    def close(self) -> None:
        if self.link is not None:
            self.link.close()
        self.worker.stop()
        self.transport.close()


class BidirectionalPushConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Pushes KV from prefill to decode and back. See the module's docstring."""

    _cache_hit_source = CacheHitSource.P2P

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._half: _SchedulerHalf | _WorkerHalf
        if role == KVConnectorRole.SCHEDULER:
            self._half = _SchedulerHalf(vllm_config, kv_cache_config)
        else:
            self._half = _WorkerHalf(vllm_config, kv_cache_config)

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        layout: str | None = load().kv_cache_layout(vllm_config)
        return layout

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """No: see `compat.refusals`, which says so to a vLLM that does not ask."""
        return False

    @property
    def _s(self) -> _SchedulerHalf:
        assert isinstance(self._half, _SchedulerHalf)
        return self._half

    @property
    def _w(self) -> _WorkerHalf:
        assert isinstance(self._half, _WorkerHalf)
        return self._half

    # --- Scheduler side ----------------------------------------------------------------------------

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self._s.bind(gpu_block_pool)

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Any) -> None:
        self._s.side_channel.serve(metadata)

    def on_new_request(self, request: Any) -> None:
        params = request.kv_transfer_params
        if not isinstance(params, dict | None):
            # vLLM itself looks into them after this call.
            request.kv_transfer_params = None
        self._s.scheduler.arrived(self._s.view(request), params, self._s.compat.is_exchangeable(request))

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._s.scheduler.matched_tokens(self._s.view(request), num_computed_tokens)

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        groups: tuple[int, ...] = self._kv_cache_config.transfer_group_ids
        return groups

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._s.scheduler.allocated(self._s.view(request), blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepOrders:
        return StepOrders(self._s.scheduler.orders())

    def update_connector_output(self, connector_output: Any) -> None:
        meta = connector_output.kv_connector_worker_meta
        self._s.scheduler.reported(
            meta.report if isinstance(meta, StepReport) else None,
            set(connector_output.finished_recving or ()),
            set(connector_output.failed_recving or ()),
        )

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        # Blocks that are still needed are pinned in the pool, so the request itself is never kept.
        self._s.scheduler.finished(self._s.view(request), block_ids[0], self._s.compat.finish_kind(request))
        return False, None

    def has_pending_push_work(self) -> bool:
        return self._s.scheduler.needs_steps

    def reset_cache(self) -> bool:
        # The block pool's own reset, which comes before this, has been announced to us.
        return True

    # --- Worker side -------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: Any) -> None:
        self._w.transport.register(kv_caches, self._w.worker.run)

    def get_handshake_metadata(self) -> Any:
        return self._w.transport.handshake_metadata

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        # Here, not in start_load_kv: that runs after this step's forward pass has been launched (on a CPU:
        # has ended). All that is ordered concerns blocks of steps that are over.
        super().bind_connector_metadata(connector_metadata)
        self._w.submit(connector_metadata.orders)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing is left to do; see `bind_connector_metadata`."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        finished, failed = self._w.worker.take_results()
        return KVConnectorTransferResults(finished_recving=finished, failed_recving=failed)

    def build_connector_worker_meta(self) -> StepReport | None:
        report = self._w.worker.take_report()
        return None if report is None else StepReport(report)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are complete before a request is scheduled."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Blocks are written after their step, not layer by layer."""

    def wait_for_save(self) -> None:
        """Nothing is saved inside a step."""

    # --- Both --------------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> PushStats | None:
        if isinstance(self._half, _WorkerHalf):
            return PushStats.of({}, self._half.transport.take_stats())
        # vLLM calls this once for every step whose output it has processed.
        return PushStats.of(self._s.scheduler.step_is_over())

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> PushStats:
        return PushStats(data)

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> PushMetrics:
        return PushMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        self._half.close()
