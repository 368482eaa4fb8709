"""Decode's duties towards prefill's cache: offer a turn's KV, and what prefill asks for.

Pure. What is offered are cached blocks that anybody may evict until prefill has granted its own. They are pinned only
then, if all of them still hold what was offered, until every rank has written them. Of a turn's end a few are pinned
before, so that they can be written without waiting for an engine step (`direct`), as long as nobody wants them. So what is
written back never stands in the way of a request, however long prefill takes to answer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import is_

from disagg_connector import counters, protocol
from disagg_connector.context import Context, new_xid
from disagg_connector.deadlines import Deadlines
from disagg_connector.direct import COMMIT_TIMEOUT, Reservation, time_left
from disagg_connector.direct import Committed as CommittedDirectly
from disagg_connector.events import pack_tokens, tell_stored
from disagg_connector.hashes import written_blocks
from disagg_connector.ports import FinishKind, RequestView, Token
from disagg_connector.protocol import (
    Address,
    Commit,
    Committed,
    Grant,
    Held,
    Offer,
    Peer,
    Refused,
    Reply,
    Want,
)
from disagg_connector.sending import Sent

logger = logging.getLogger(__name__)

# Prefill's engine thread answers between its steps, and a step with a long prompt takes seconds.
OFFER_TIMEOUT = 15.0

# How long a turn that has ended waits for prefill's address to answer, and how often it is looked at.
PEER_WAIT = 10.0
PEER_INTERVAL = 0.1

_DENIALS = frozenset(
    {
        protocol.HAVE,
        protocol.DUPLICATE,
        protocol.NO_BLOCKS,
        protocol.FINGERPRINT,
        protocol.EPOCH,
        protocol.CLOSED,
    }
)


@dataclass(frozen=True)
class Chain:
    """Blocks of this engine that hold the blocks `first`.. of a chain of hashes."""

    view: RequestView | None
    """A request that has them, if it is known."""
    hashes: list[bytes]
    """Of the chain from `skip` on, to the last of `blocks`."""
    skip: int
    first: int
    blocks: tuple[int, ...]
    stamps: tuple[object | None, ...]
    """What the pool said of the blocks when they were found to hold this."""
    fence: int
    """The step that may still be computing them."""
    epoch: int
    """This engine's when they were found."""


@dataclass(frozen=True)
class TurnEnd:
    """What a turn leaves to be offered."""

    chain: Chain
    prefill: Address
    at: float
    there: int
    """Blocks from the chain's beginning on that prefill is taken to have."""

    def is_late(self, now: float) -> bool:
        """Whether the address has had enough time to answer."""
        return now >= self.at + PEER_WAIT


@dataclass(frozen=True)
class Ended:
    """What became of an offer."""

    result: str
    """``written``, ``error`` or ``withdrawn``, or the reason of prefill's refusal."""
    end: int
    """Blocks from the chain's beginning on that are now, or will be, at prefill; of use if it has not refused."""
    whole: bool = True
    """Whether these are all that were offered."""


@dataclass(frozen=True)
class _Offered:
    xid: str
    peer: Peer
    chain: Chain
    at: float
    turn_ended_at: float | None
    """When the turn ended that this is the rest of; None if it goes on, or if prefill had asked."""
    on_end: Callable[[Ended], None]

    def end(self, result: str) -> None:
        self.on_end(Ended(result, self.chain.first + len(self.chain.blocks)))


class OfferSide:
    """Write-backs of a decode engine. Engine thread only, except `peek`."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._unresolved: dict[Address, list[TurnEnd]] = {}
        self._resolve_at: Deadlines[Address] = Deadlines()

    def turn_end(
        self, view: RequestView, blocks: Sequence[int], kind: FinishKind, prefill: Address, there: int
    ) -> TurnEnd | None:
        """All full blocks of a finished request whose KV has been computed, for `close`; None if there are none.
        Prefill is taken to have the first `there` of them."""
        context = self._context
        if context.config.writeback_mode == "off" or kind == "other" or not context.epochs.is_open:
            return None
        valid = written_blocks(view.num_valid_tokens, view.num_tokens, context.block_size)
        count = min(valid, len(view.hashes), len(blocks))
        if count <= 0:
            return None
        hashes, held = list(view.hashes[:count]), tuple(blocks[:count])
        # With steps in flight the engine need not have come to publish the last one; it is whole all the same.
        unpublished = [index for index, stamp in enumerate(context.pool.stamps(held)) if stamp is None]
        for index in unpublished:
            context.pool.insert(hashes[index], held[index], (index + 1) * context.block_size)
        if unpublished and context.pool.tells:
            tokens = view.token_ids(0, count * context.block_size)
            tell_stored(context.pool, hashes, {hashes[i] for i in unpublished}, tokens, context.block_size)
        stamps = tuple(context.pool.stamps(held))
        chain = Chain(view, hashes, 0, 0, held, stamps, 0, context.epochs.epoch)
        return TurnEnd(chain, prefill, context.clock(), there)

    def close(self, end: TurnEnd) -> None:
        """Offer a turn's KV, or keep it in mind for a while if it is not known yet who answers at the address."""
        resolution = self._context.peers.resolve(end.prefill)
        if resolution.peer is not None:
            self.offer(
                resolution.peer,
                end.chain,
                turn_ended_at=end.at,
                there=end.there,
                on_end=lambda ended: self._closed(end, ended),
            )
        elif resolution.verdict == "incompatible":
            self._context.counters.add(counters.OFFERS, 1, protocol.FINGERPRINT)
        elif end.is_late(self._context.clock()):
            self._context.counters.add(counters.OFFERS, 1, "peer")
        else:
            self._unresolved.setdefault(end.prefill, []).append(end)
            self._resolve_at.set(end.prefill, self._context.clock() + PEER_INTERVAL)

    def find(self, hashes: list[bytes], skip: int, first: int, view: RequestView | None = None) -> Chain:
        """What the prefix cache holds of the chain of `hashes` (from `skip` on) without a gap from `first` on."""
        context = self._context
        blocks, stamps = context.pool.held(hashes[first - skip :])
        hashes = hashes[: first - skip + len(blocks)]
        # Their hashes may have been published by the step that is being built just now.
        fence, epoch = context.steps.scheduled, context.epochs.epoch
        return Chain(view, hashes, skip, first, tuple(blocks), tuple(stamps), fence, epoch)

    def offer(
        self,
        peer: Peer,
        chain: Chain,
        want: str = "",
        *,
        turn_ended_at: float | None = None,
        there: int | None = None,
        on_end: Callable[[Ended], None] = lambda ended: None,
    ) -> None:
        """Offer blocks to prefill and write what it takes; `on_end` is called exactly once.

        What it is taken to lack, the blocks from `there` on, may be written without waiting for an engine step.
        """
        context = self._context
        offered = _Offered(new_xid(), peer, chain, context.clock(), turn_ended_at, on_end)
        message = Offer(
            to=peer.engine_id,
            epoch=peer.epoch,
            xid=offered.xid,
            sender=context.me(),
            hashes=chain.hashes,
            first=chain.first,
            want=want,
            tokens=self._tokens_for(peer, chain),
            skip=chain.skip,
        )
        is_reserved = there is not None and self._reserve(offered, there)
        context.channel.request(
            peer.address,
            message,
            OFFER_TIMEOUT,
            lambda reply: self._answered(offered, reply),
            partial(context.direct.answered, offered.xid) if is_reserved else None,
        )

    def peek(self, want: Want) -> bool:
        """Whether there is anything for `want` here. Any thread; `on_want` decides."""
        if want.have >= len(want.hashes):
            return False
        return self._context.pool.find(want.hashes[want.have]) is not None

    def on_want(self, want: Want, token: Token) -> None:
        """Offer what the prefix cache holds of a chain beyond what prefill has."""
        context = self._context
        chain = self.find(want.hashes, 0, want.have)
        context.channel.answer(token, Held(len(chain.blocks)))
        if chain.blocks:
            self.offer(want.sender, chain, want.xid)

    def tick(self) -> None:
        """See whether addresses have answered that turns' ends wait for."""
        for address in self._resolve_at.take(self._context.clock()):
            for end in self._unresolved.pop(address):
                self.close(end)

    def next_deadline(self) -> float | None:
        return self._resolve_at.next()

    def reset(self) -> None:
        """The prefix cache is being reset: what is offered is out of date, a grant for it will be declined."""
        self._unresolved.clear()
        self._resolve_at = Deadlines()

    # --- Inside -----------------------------------------------------------------------------------

    def _closed(self, end: TurnEnd, ended: Ended) -> None:
        """Prefill has answered a turn's end. Another boot or epoch of it than was meant is offered it anew."""
        is_another = ended.result in (protocol.RESTARTED, protocol.EPOCH)
        if is_another and not end.is_late(self._context.clock()):
            # The engine may tell another address than the router does.
            self._context.peers.doubt(end.prefill)
            self.close(end)

    def _tokens_for(self, peer: Peer, chain: Chain) -> bytes:
        """The tokens of the offered blocks, if the peer has a use for them and they are known."""
        if chain.view is None or not peer.events:
            return b""
        size = self._context.block_size
        return pack_tokens(chain.view.token_ids(chain.first * size, (chain.first + len(chain.blocks)) * size))

    def _answered(self, offered: _Offered, reply: Reply | None) -> None:
        counts = self._context.counters
        begun = self._context.sender.answered(offered.xid)
        if begun is not None:
            self._count_grant(offered, begun.at)
            return
        match reply:
            case Grant() if self._is_sound(offered, reply):
                self._granted(offered, reply)
            case Refused(reason=reason):
                counts.add(counters.OFFERS, 1, reason if reason in _DENIALS else "error")
                if reason in (protocol.RESTARTED, protocol.EPOCH):
                    self._context.peers.doubt(offered.peer.address)
                offered.end(reason)
            case None:
                # A grant that comes after this is not taken up; prefill gets its blocks back now if it
                # hears this, else by its lease.
                self._context.peers.doubt(offered.peer.address)
                self._withdraw(offered, "timeout")
            case _:
                self._withdraw(offered, "error")

    def _withdraw(self, offered: _Offered, result: str) -> None:
        """Nothing is written for this offer: prefill need not wait for it."""
        self._context.counters.add(counters.OFFERS, 1, result)
        self._commit(offered.peer, offered.xid, offered.peer.epoch, ok=False, wrote=False)
        offered.end("withdrawn")

    def _is_sound(self, offered: _Offered, grant: Grant) -> bool:
        """Whether a grant is for blocks that were offered."""
        first = offered.chain.first
        end = first + len(offered.chain.blocks)
        return bool(grant.blocks) and first <= grant.start <= end - len(grant.blocks)

    def _granted(self, offered: _Offered, grant: Grant) -> None:
        context, chain = self._context, offered.chain
        mine = slice(grant.start - chain.first, grant.start - chain.first + len(grant.blocks))
        blocks, stamps = chain.blocks[mine], chain.stamps[mine]
        if chain.epoch != context.epochs.epoch:
            self._withdraw(offered, protocol.EPOCH)
            return
        if not all(map(is_, context.pool.stamps(blocks), stamps)):
            self._withdraw(offered, "evicted")
            return
        self._count_grant(offered, context.clock())
        context.pool.pin(blocks)
        context.direct.follow(self._reservation(offered, grant.start, blocks), grant)
        context.sender.start(
            offered.xid,
            offered.peer,
            blocks,
            grant.blocks,
            time_left(grant, offered.at, context.clock()),
            partial(self._step_told, offered, grant),
            chain.fence,
        )

    def _count_grant(self, offered: _Offered, at: float) -> None:
        self._context.counters.add(counters.OFFERS, 1, "granted")
        self._context.counters.observe(counters.GRANT_SECONDS, at - offered.at)

    def _written(self, offered: _Offered, grant: Grant, sent: Sent) -> None:
        # What was read during a reset may be neither the old KV nor the new.
        ok = sent.ok and offered.chain.epoch == self._context.epochs.epoch

        def on_reply(reply: Reply | None) -> None:
            self._end(offered, grant, taken=ok and self._committed(sent, offered, reply))

        self._commit(sent.peer, sent.xid, grant.epoch, ok=ok, wrote=sent.wrote, on_reply=on_reply)

    def _end(self, offered: _Offered, grant: Grant, *, taken: bool) -> None:
        end = grant.start + len(grant.blocks)
        whole = end == offered.chain.first + len(offered.chain.blocks)
        offered.on_end(Ended("written" if taken else "error", end, whole))

    # --- Without waiting for engine steps, see `direct` -------------------------------------------

    def _reserve(self, offered: _Offered, there: int) -> bool:
        """Pin what prefill is taken to lack, so that it can be written as soon as it is granted."""
        context, chain = self._context, offered.chain
        index = max(0, there - chain.first)
        blocks, stamps = chain.blocks[index:], chain.stamps[index:]
        is_old = chain.fence > context.steps.processed or chain.epoch != context.epochs.epoch
        if not blocks or is_old or None in stamps or not all(map(is_, context.pool.stamps(blocks), stamps)):
            return False
        reservation = self._reservation(offered, chain.first + index, blocks)
        return context.sender.reserve(reservation, partial(self._step_told, offered))

    def _reservation(self, offered: _Offered, first: int, blocks: tuple[int, ...]) -> Reservation:
        return Reservation(
            offered.xid,
            offered.peer,
            first,
            blocks,
            offered.chain.epoch,
            offered.at,
            lambda committed: self._committed_directly(offered, committed),
        )

    def _step_told(self, offered: _Offered, grant: Grant, sent: Sent) -> None:
        """The engine's steps have told the end of a write, which may have been committed without them."""
        if not self._context.direct.end(sent.xid):
            self._written(offered, grant, sent)

    def _committed_directly(self, offered: _Offered, committed: CommittedDirectly) -> None:
        grant, tally = committed.grant, committed.tally
        sent = Sent(
            offered.xid, offered.peer, len(grant.blocks), True, tally.posted > 0, tally.size, tally.seconds
        )
        self._end(offered, grant, taken=self._committed(sent, offered, committed.reply, committed.at))

    def _commit(
        self,
        peer: Peer,
        xid: str,
        epoch: int,
        *,
        ok: bool,
        wrote: bool,
        on_reply: Callable[[Reply | None], None] = lambda reply: None,
    ) -> None:
        message = Commit(peer.engine_id, epoch, xid, ok, wrote)
        self._context.channel.request(peer.address, message, COMMIT_TIMEOUT, on_reply)

    def _committed(self, sent: Sent, offered: _Offered, reply: Reply | None, at: float | None = None) -> bool:
        """Whether prefill has taken up what was written; its reply came just now, or at `at`."""
        if not isinstance(reply, Committed):
            logger.warning("Prefill did not take up write-back %s: %s", sent.xid, reply)
            return False
        counts, direction = self._context.counters, protocol.DECODE_TO_PREFILL
        counts.add(counters.PUSH_TOKENS, sent.blocks * self._context.block_size, direction)
        counts.add(counters.PUSH_BLOCKS, sent.blocks, direction)
        counts.add(counters.PUSH_BYTES, sent.size, direction)
        counts.observe(counters.WRITE_SECONDS, sent.seconds, direction)
        if offered.turn_ended_at is not None and reply.inserted:
            at = self._context.clock() if at is None else at
            counts.observe(counters.WRITEBACK_SECONDS, at - offered.turn_ended_at)
        return True
