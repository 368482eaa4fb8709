"""Prefill's duties towards KV that decode brings: land it, publish it, ask for it.

Pure. A landing's blocks become part of the prefix cache only when decode has said that every rank is
through (`Commit`), NIXL has announced the data on every rank of ours, and the cache has not been reset
meanwhile. NIXL's own word is needed beside decode's: over some fabrics a writer's completion does not mean
that the data is visible at the target.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from disagg_connector import counters, protocol
from disagg_connector.brought import Brought
from disagg_connector.context import Context, new_xid
from disagg_connector.events import tell_stored, unpack_tokens
from disagg_connector.landing import Admission, Landing, Landings, Room, admit
from disagg_connector.ports import Incoming, RequestView, Token
from disagg_connector.protocol import (
    Address,
    Commit,
    Committed,
    Grant,
    Held,
    Offer,
    PrefillLeg,
    Refused,
    Reply,
    Want,
)

logger = logging.getLogger(__name__)

# How long NIXL's announcement may come after decode's commit.
ANNOUNCEMENT_WAIT = 5.0


AbortReason = Literal["writer", "epoch", "notification", "lease"]
"""Why a granted write-back is not taken up: the label of the counter."""


@dataclass
class _Wait:
    """A prompt that is held back because decode may bring KV that it lacks."""

    view: RequestView
    decode: Address | None
    since: float | None = None
    held_back: bool = False
    asked: str = ""
    over: bool = False


class WriteBackSide:
    """Landing zone and on-demand requests of a prefill engine. Engine thread only."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._landings = Landings()
        self._waits: dict[str, _Wait] = {}
        self._reserve: deque[int] = deque()
        self._brought = Brought(context.pool)
        context.counters.watch(counters.LANDING_BLOCKS, lambda: self._landings.blocks)
        context.counters.watch(counters.RESERVE_BLOCKS, lambda: len(self._reserve))

    # --- Hooks of the engine ----------------------------------------------------------------------

    def arrived(self, view: RequestView, leg: PrefillLeg) -> None:
        self._waits[view.id] = _Wait(view, leg.decode)
        if leg.decode is not None:
            # Whatever this turn needs of decode, it need not wait for an introduction then.
            self._context.peers.resolve(leg.decode)

    def finished(self, request_id: str) -> None:
        self._waits.pop(request_id, None)

    def may_schedule(self, view: RequestView, local_tokens: int) -> bool:
        """False while it is worth waiting for KV to arrive, `max_wait_milliseconds` at the most."""
        count = self._context.counters
        wait = self._waits.get(view.id)
        if wait is not None and not wait.over and not self._has_waited_enough(wait, view, local_tokens):
            wait.held_back = True
            return False
        if wait is not None and wait.held_back and wait.since is not None:
            wait.held_back = False
            count.observe(counters.WAIT_SECONDS, self._context.clock() - wait.since)
        found = self._brought.found(view.hashes[: local_tokens // self._context.block_size])
        if found:
            count.add(counters.HIT_TOKENS, found * self._context.block_size)
        return True

    def _has_waited_enough(self, wait: _Wait, view: RequestView, local_tokens: int) -> bool:
        index = local_tokens // self._context.block_size
        # The last token is always computed: its block need not be there.
        limit = (view.num_prompt_tokens - 1) // self._context.block_size
        if index >= limit:
            return self._end(wait, "")
        now = self._context.clock()
        if wait.since is None:
            wait.since = now
        if now - wait.since >= self._context.config.max_wait:
            return self._end(wait, "timeout" if wait.asked else "")
        if view.hashes[index] in self._landings.in_flight or wait.asked:
            return False
        return self._ask(wait, view, index, limit)

    def landed(self, xid: str, ranks: int) -> None:
        """NIXL has announced a transfer complete on some ranks."""
        landing = self._landings.by_xid.get(xid)
        if landing is not None:
            landing.ranks_landed += ranks
            self._publish_if_complete(landing)

    def step_is_over(self) -> None:
        self._count_unused(self._brought.look_after())

    def reset(self) -> None:
        """The prefix cache is being reset: what is on its way must not enter it."""
        for landing in list(self._landings.by_xid.values()):
            if landing.commit is None:
                self._call_off(landing, "epoch")
            else:
                self._discard(landing, "epoch", wrote=True)
                self._refuse(landing.commit, protocol.EPOCH)
        self._context.pool.unpin(list(self._reserve))
        self._reserve.clear()

    @property
    def busy(self) -> bool:
        """Whether a landing needs engine steps to get on."""
        return bool(self._landings.committed)

    # --- Messages of decode -----------------------------------------------------------------------

    def on_offer(self, offer: Offer, token: Token) -> None:
        context = self._context
        # Pinned first: taking blocks must neither evict the prefix that they continue nor count on its blocks.
        prefix = self._pin_prefix(offer)
        admission = self._admit(offer)
        if admission.reason:
            context.pool.unpin(prefix)
            self.denied(offer, admission.reason)
            context.channel.answer(token, Refused(admission.reason, context.me().engine_id))
            return
        landing = self._land(offer, admission, prefix)
        context.channel.answer(
            token,
            Grant(landing.start, list(landing.blocks), landing.epoch, context.config.kv_lease_duration),
        )

    def on_commit(self, commit: Commit, token: Token) -> None:
        landing = self._landings.by_xid.get(commit.xid)
        if landing is None:
            is_old = commit.epoch != self._context.epochs.epoch
            self._refuse(token, protocol.EPOCH if is_old else protocol.UNKNOWN)
        elif not commit.ok:
            self._discard(landing, "writer", wrote=commit.wrote)
            self._context.channel.answer(token, Committed(0))
        elif commit.epoch != landing.epoch:
            self._discard(landing, "epoch", wrote=True)
            self._refuse(token, protocol.EPOCH)
        else:
            self._landings.commit(landing, token, self._context.clock() + ANNOUNCEMENT_WAIT)
            self._publish_if_complete(landing)

    # --- Time -------------------------------------------------------------------------------------

    def tick(self) -> None:
        for xid in self._landings.ends.take(self._context.clock()):
            landing = self._landings.by_xid[xid]
            if landing.commit is not None:
                logger.error("NIXL never announced the write-back %s; it is discarded", xid)
                self._discard(landing, "notification", wrote=True)
                self._refuse(landing.commit, protocol.NO_NOTIFICATION)
            else:
                logger.warning(
                    "No word of write-back %s from %s within its lease; its %d blocks are held",
                    landing.xid, landing.peer.address, len(landing.blocks),
                )  # fmt: skip
                self._call_off(landing, "lease")
        self._fill_reserve()

    def next_deadline(self) -> float | None:
        return self._landings.ends.next()

    # --- Landing ----------------------------------------------------------------------------------

    def _room(self, reserved: int) -> Room:
        pool = self._context.pool
        return Room(pool.free(), pool.total, self._context.config.writeback_min_free_percent, reserved)

    def _admit(self, offer: Offer) -> Admission:
        context = self._context
        return admit(
            offer,
            lambda block_hash: context.pool.find(block_hash) is not None,
            lambda block_hash: block_hash in self._landings.in_flight,
            self._room(len(self._reserve)),
        )

    def _pin_prefix(self, offer: Offer) -> tuple[int, ...]:
        pool = self._context.pool
        prefix, _ = pool.held(offer.hashes)
        pool.pin(prefix)
        return tuple(prefix)

    def _land(self, offer: Offer, admission: Admission, prefix: tuple[int, ...]) -> Landing:
        context = self._context
        reserved = min(len(self._reserve), admission.count)
        blocks = [self._reserve.popleft() for _ in range(reserved)]
        blocks += context.pool.take(admission.count - reserved, self._room(0).floor)
        landing = Landing(
            offer.xid,
            offer.sender,
            offer.hashes,
            offer.skip,
            admission.start,
            tuple(blocks),
            prefix,
            context.epochs.epoch,
            context.clock() + context.config.kv_lease_duration,
            offer.want,
            offer.tokens,
        )
        self._landings.add(landing)
        context.orders.expect.append(Incoming(landing.xid, landing.peer.tensor_parallel))
        return landing

    def _publish_if_complete(self, landing: Landing) -> None:
        context = self._context
        if landing.commit is None or landing.ranks_landed < context.sharding.ranks:
            return
        inserted: set[bytes] = set()
        for offset, (block_hash, block) in enumerate(zip(landing.targets, landing.blocks, strict=True)):
            if context.pool.find(block_hash) is None:
                num_tokens = (landing.start + offset + 1) * context.block_size
                context.pool.insert(block_hash, block, num_tokens)
                self._count_unused(self._brought.published(block_hash, block))
                inserted.add(block_hash)
        self._remove(landing)
        if inserted and context.pool.tells:
            tokens = self._tokens_of(landing)
            tell_stored(context.pool, landing.hashes, inserted, tokens, context.block_size)
        # One list, so that of the whole chain the tail is the first to be evicted.
        context.pool.unpin(landing.prefix + landing.blocks)
        context.counters.add(counters.INSERTED_TOKENS, len(inserted) * context.block_size)
        if landing.want:
            context.counters.add(counters.ONDEMAND_TOKENS, len(inserted) * context.block_size)
        context.channel.answer(landing.commit, Committed(len(inserted)))
        self._resolve(landing.want, "served" if inserted else "nothing")

    def _tokens_of(self, landing: Landing) -> Sequence[int]:
        """Those of its chain's last blocks: decode has sent them, or a prompt here has them that asked for these."""
        for wait in self._waits.values():
            if landing.want and wait.asked == landing.want:
                return wait.view.token_ids(0, len(landing.hashes) * self._context.block_size)
        return unpack_tokens(landing.tokens)

    def _call_off(self, landing: Landing, reason: AbortReason) -> None:
        """The transfer is not waited for any more: its blocks are held until its writer lets go of them."""
        self._remove(landing, unpin_prefix=True)
        self._context.held.hold(landing.xid, landing.blocks, landing.peer)
        self._aborted(landing, reason)

    def _discard(self, landing: Landing, reason: AbortReason, *, wrote: bool) -> None:
        """The transfer is over and its data is not used."""
        self._remove(landing, unpin_prefix=True)
        if wrote:
            self._context.held.settle(landing.xid, landing.blocks, landing.peer)
        else:
            self._context.pool.unpin(landing.blocks)
        self._aborted(landing, reason)

    def _aborted(self, landing: Landing, reason: AbortReason) -> None:
        self._context.counters.add(counters.ABORTED, 1, reason)
        self._resolve(landing.want, "error")

    def _count_unused(self, blocks: int) -> None:
        if blocks:
            self._context.counters.add(counters.EVICTED_UNUSED, blocks)

    def _remove(self, landing: Landing, *, unpin_prefix: bool = False) -> None:
        self._landings.remove(landing.xid)
        self._context.orders.ignore.append(landing.xid)
        if unpin_prefix:
            self._context.pool.unpin(landing.prefix)

    def _refuse(self, token: Token, reason: str) -> None:
        self._context.channel.answer(token, Refused(reason, self._context.me().engine_id))

    def _fill_reserve(self) -> None:
        config = self._context.config
        missing = config.writeback_reserve_blocks - len(self._reserve)
        if missing <= 0 or config.role != "prefill":
            return
        room = self._room(0)
        count = min(missing, room.grantable)
        if count > 0:
            self._reserve.extend(self._context.pool.take(count, room.floor))

    # --- On demand --------------------------------------------------------------------------------

    def _ask(self, wait: _Wait, view: RequestView, have: int, limit: int) -> bool:
        """Ask decode for the rest of the chain; True if there is nobody to ask."""
        if wait.decode is None or not self._context.epochs.is_open:
            return self._end(wait, "")
        resolution = self._context.peers.resolve(wait.decode)
        if resolution.verdict == "asking":
            return False
        if resolution.peer is None:
            return self._end(wait, "error")
        wait.asked = new_xid()
        peer, me = resolution.peer, self._context.me()
        message = Want(peer.engine_id, peer.epoch, wait.asked, me, list(view.hashes[:limit]), have)
        self._context.channel.request(
            peer.address, message, self._context.config.max_wait, lambda reply: self._told(wait, reply)
        )
        return False

    def _told(self, wait: _Wait, reply: Reply | None) -> None:
        match reply:
            case Held(count=count) if count > 0:
                return
            case Held():
                self._end(wait, "nothing")
            case Refused(reason=protocol.RESTARTED | protocol.EPOCH as reason):
                if wait.decode is not None:
                    self._context.peers.doubt(wait.decode)
                if reason == protocol.EPOCH:
                    wait.asked = ""  # asked again as soon as the address has answered
                else:
                    self._end(wait, "error")
            case None:
                if wait.decode is not None:
                    # Busy, or gone: if it does not even say who it is, later prompts do not wait for it.
                    self._context.peers.doubt(wait.decode)
                self._end(wait, "timeout")
            case _:
                self._end(wait, "error")

    def denied(self, offer: Offer, reason: str) -> None:
        """An offer is refused: whoever waits for what it would have brought goes on."""
        if reason != protocol.DUPLICATE:
            self._resolve(offer.want, "nothing" if reason == protocol.HAVE else "error")
            return
        # The first copy is on its way: the prompt waits for that, and asks again if it lacks more then.
        for wait in self._waits.values():
            if offer.want and wait.asked == offer.want:
                wait.asked = ""

    def _resolve(self, want: str, result: Literal["served", "nothing", "error"]) -> None:
        if not want:
            return
        for wait in self._waits.values():
            if wait.asked == want:
                self._end(wait, result)

    def _end(self, wait: _Wait, result: str) -> bool:
        """The prompt goes on with what there is."""
        if not wait.over:
            wait.over = True
            if result:
                self._context.counters.add(counters.ONDEMAND, 1, result)
        return True
