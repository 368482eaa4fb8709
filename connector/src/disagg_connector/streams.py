"""Decode's turns under way, whose full blocks go to prefill while decode still generates. Pure.

At a turn's end only its last blocks are left to move then. A turn's batches go one after the other, each when
prefill has published the one before, so that each continues what prefill has; the end comes last and names the
whole chain, so that it also brings what a batch did not.

A step costs what is due in it and not what is running: a turn is looked at when its next batch can be full at the
earliest, and batches are offered some steps apart. With many turns the batches grow instead.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

from disagg_connector import protocol
from disagg_connector.context import Context
from disagg_connector.decode import TurnState
from disagg_connector.hashes import full_blocks, written_blocks
from disagg_connector.offers import Ended, OfferSide
from disagg_connector.ports import RequestView
from disagg_connector.protocol import Address

# Steps between one batch and the next, of whichever turns. A batch costs decode's scheduler up to 100 us from its offer
# to prefill's last word; a step may cost 50.
STEPS_APART = 4


@dataclass
class Stream:
    """One turn's way to prefill while it runs."""

    view: RequestView
    address: Address
    sent: int | None = None
    """Blocks of the chain that prefill is taken to have; None before the turn has its prompt's KV."""
    engine_id: str = ""
    """The boot that this is true of."""
    seen: int = -1
    """Valid tokens when it was last looked at."""
    is_out: bool = False
    """Whether a batch is under way."""
    resynced: bool = False
    """Whether prefill has once lacked what it was taken to have."""
    over: bool = False
    """No more batches: the turn has ended, or prefill does not take any."""
    _then: Callable[[], None] | None = None

    def at_rest(self, then: Callable[[], None]) -> None:
        """Call this when no batch is under way."""
        if self.is_out:
            self._then = then
        else:
            then()

    def rest(self) -> None:
        """The batch that was under way is through."""
        self.is_out = False
        if self._then is not None:
            self._then()


class Streams:
    """All streams of a decode engine. Engine thread only."""

    def __init__(self, context: Context, offers: OfferSide, state: Callable[[str], TurnState | None]) -> None:
        self._context = context
        self._offers = offers
        self._state = state
        self._on = context.config.writeback_mode == "streaming"
        self._batch = context.config.writeback_batch_blocks
        self._streams: dict[str, Stream] = {}
        self._due: list[tuple[int, int, Stream]] = []
        self._number = count()
        self._next_batch = 0

    # --- Hooks of the engine ----------------------------------------------------------------------

    def arrived(self, view: RequestView, prefill: Address) -> None:
        if self._on:
            stream = self._streams[view.id] = Stream(view, prefill)
            self._look_in(stream, self._batch * self._context.block_size)

    def finished(self, request_id: str) -> Stream | None:
        """The request is over, and so is its stream but for a batch that is under way."""
        stream = self._streams.pop(request_id, None)
        if stream is not None:
            stream.over = True
        return stream

    def step(self) -> None:
        """A step is being built: offer a batch, if there is one."""
        now = self._context.steps.scheduled
        while self._due and self._due[0][0] <= now and now >= self._next_batch:
            stream = heapq.heappop(self._due)[2]
            if not stream.over and self._offer_batch(stream):
                self._next_batch = now + STEPS_APART

    def reset(self) -> None:
        """The prefix cache is being reset: what runs now goes back at its end, if then."""
        for stream in self._streams.values():
            stream.over = True

    # --- Inside -----------------------------------------------------------------------------------

    def _look_in(self, stream: Stream, tokens: int) -> None:
        """Look at a stream again when it can have so many more tokens: one a step, or later."""
        step = self._context.steps.scheduled + tokens
        heapq.heappush(self._due, (step, next(self._number), stream))

    def _offer_batch(self, stream: Stream) -> bool:
        """Offer what has become full, if that is a batch; False if nothing was offered."""
        view, size = stream.view, self._context.block_size
        a_batch = self._batch * size
        if stream.sent is None and not self._start(stream):
            self._look_in(stream, a_batch)
            return False
        assert stream.sent is not None
        valid = view.num_valid_tokens
        end = written_blocks(valid, view.num_tokens, size)
        if end - stream.sent < self._batch:
            left = (stream.sent + self._batch) * size - valid
            # One that does not get on (it may wait to be resumed) is not looked at in every step.
            self._look_in(stream, a_batch if valid == stream.seen else max(1, min(left, a_batch)))
            stream.seen = valid
            return False
        peer = self._context.peers.resolve(stream.address).peer
        if peer is None or not self._context.epochs.is_open:
            self._look_in(stream, a_batch)
            return False
        if stream.engine_id not in ("", peer.engine_id):
            stream.sent = 0
        stream.engine_id = peer.engine_id
        # The block before the first new one tells prefill whether it has what this continues.
        skip = max(0, stream.sent - 1)
        chain = self._offers.find(list(view.hashes[skip:end]), skip, stream.sent, view)
        if not chain.blocks:
            # With several steps in flight a block is published a step later than it is full.
            self._look_in(stream, size)
            return False
        stream.is_out = True
        self._offers.offer(peer, chain, on_end=lambda ended: self._ended(stream, ended))
        return True

    def _start(self, stream: Stream) -> bool:
        """Whether the turn has its prompt's KV; prefill has what it pushed, else it is not known what it has."""
        state = self._state(stream.view.id)
        if state == "loaded":
            stream.sent = full_blocks(stream.view.num_prompt_tokens, self._context.block_size)
        elif state == "local":
            stream.sent = 0
        return stream.sent is not None

    def _ended(self, stream: Stream, ended: Ended) -> None:
        if ended.result in ("written", protocol.HAVE, protocol.DUPLICATE):
            stream.sent = ended.end
            # Less than was offered: prefill is short of blocks. It is asked once more, at the turn's end.
            stream.over |= not ended.whole
        elif ended.result in (protocol.GAP, protocol.EPOCH) and not stream.resynced:
            stream.sent, stream.resynced = 0, True
        else:
            stream.over = True
        if not stream.over:
            self._look_in(stream, 1)
        stream.rest()
