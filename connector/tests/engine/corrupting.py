"""The connector with a worker that writes the wrong blocks: shows that the comparisons can fail."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from disagg_connector.connector import BidirectionalPushConnector
from disagg_connector.ports import Posted, WriteJob


class CorruptingConnector(BidirectionalPushConnector):
    """Writes one block of its own in place of all the blocks that were asked for."""

    def register_kv_caches(self, kv_caches: Any) -> None:
        transport = self._w.transport
        post = transport.post

        def post_one_block_for_all(job: WriteJob) -> Posted:
            # Not a permutation: attention does not see in which order a request's blocks are.
            posted: Posted = post(replace(job, local=(job.local[0],) * len(job.local)))
            return posted

        transport.post = post_one_block_for_all
        super().register_kv_caches(kv_caches)


class LastRankCorruptingConnector(CorruptingConnector):
    """Does so on the last rank alone: the KV heads of all others are right."""

    def register_kv_caches(self, kv_caches: Any) -> None:
        shard = self._w.transport.shard
        if shard.rank == shard.ranks - 1:
            super().register_kv_caches(kv_caches)
        else:
            BidirectionalPushConnector.register_kv_caches(self, kv_caches)
