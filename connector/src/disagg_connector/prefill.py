"""Prefill's duties towards a turn's decode engine: compute the prompt, then push it.

Pure. A prompt whose prefill leg has finished stays pinned under a lease until decode has named the
blocks to write into (`Load`), until decode says that it does not need it, or until the lease runs out.
Landing what decode writes back is `writeback`'s business.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from disagg_connector import counters, protocol
from disagg_connector.context import Board, Context
from disagg_connector.deadlines import Deadlines
from disagg_connector.hashes import blocks_for
from disagg_connector.ports import FinishKind, RequestView, Token
from disagg_connector.protocol import Accepted, Cancel, Load, PrefillLeg, Refused, Released, leg_key, turn_of
from disagg_connector.sending import Sent

logger = logging.getLogger(__name__)


@dataclass
class _Computing:
    """A prompt that is being computed, and the epoch in which that began."""

    key: str
    epoch: int


@dataclass
class _Prompt:
    """A computed prompt that waits for decode."""

    key: str
    digest: bytes
    num_tokens: int
    blocks: tuple[int, ...]


@dataclass(frozen=True)
class _Waiting:
    """A load whose prompt is not computed yet."""

    load: Load
    expires: float


class PrefillSide:
    """Pushes prompts. Engine thread only; `board` is read by the control thread too."""

    def __init__(self, context: Context, board: Board) -> None:
        self._context = context
        self._board = board
        self._computing: dict[str, _Computing] = {}
        self._prompts: dict[str, _Prompt] = {}
        self._prompts_end: Deadlines[str] = Deadlines()
        self._waiting: dict[str, list[_Waiting]] = {}
        self._waiting_end: Deadlines[str] = Deadlines()
        self._pushing: dict[str, tuple[str, int]] = {}

    # --- Hooks of the engine ----------------------------------------------------------------------

    def arrived(self, view: RequestView, leg: PrefillLeg) -> None:
        key = leg_key(view.id)
        self._computing[view.id] = _Computing(key, self._context.epochs.epoch)
        if "gone" in (self._board.get(key), self._board.get(turn_of(key))):
            self._board.set(key, "gone")
        else:
            self._board.set(key, "computing")

    def dismissed(self, turn: str) -> None:
        """The router knows that decode will not come for a turn, whose legs may not even have arrived yet."""
        self._board.set(turn, "gone")
        for key in {*self._prompts, *(computing.key for computing in self._computing.values())}:
            if turn_of(key) == turn:
                self._unwanted(key, "")

    def allocated(self, view: RequestView) -> None:
        """The engine begins to compute the prompt, for the first time or, after a preemption, anew."""
        computing = self._computing.get(view.id)
        if computing is not None:
            computing.epoch = self._context.epochs.epoch

    def finished(self, view: RequestView, blocks: Sequence[int], kind: FinishKind) -> None:
        """The leg is over: its blocks may be freed by the engine after this call."""
        computing = self._computing.pop(view.id, None)
        if computing is None or self._board.get(computing.key) == "gone":
            return
        key = computing.key
        is_whole = kind == "complete" and view.num_valid_tokens >= view.num_prompt_tokens
        epochs = self._context.epochs
        if not is_whole or computing.epoch != epochs.epoch or not epochs.is_open:
            self._abort(key)
            return
        held = tuple(blocks[: blocks_for(view.num_prompt_tokens, self._context.block_size)])
        self._context.pool.pin(held)
        prompt = _Prompt(key, view.prompt_digest(), view.num_prompt_tokens, held)
        replaced, self._prompts[key] = self._prompts.get(key), prompt
        if replaced is not None:
            # Several samples of one request are legs of one turn.
            self._context.pool.unpin(replaced.blocks)
        self._prompts_end.set(key, self._context.clock() + self._context.config.kv_lease_duration)
        self._board.set(key, "ready")
        for waiting in self._take_waiting(key):
            self._push(prompt, waiting.load)

    # --- Messages of decode -----------------------------------------------------------------------

    def on_load(self, load: Load, token: Token) -> None:
        context = self._context
        reason = self._objection(load)
        if reason:
            context.channel.answer(token, Refused(reason, context.me().engine_id))
            return
        prompt = self._prompts.get(load.request)
        if prompt is None:
            expires = context.clock() + context.config.kv_lease_duration
            self._waiting.setdefault(load.request, []).append(_Waiting(load, expires))
            self._waiting_end.set(load.request, self._waiting[load.request][0].expires)
        elif not self._push(prompt, load):
            context.channel.answer(token, Refused(protocol.BAD_PROMPT, context.me().engine_id))
            return
        context.channel.answer(token, Accepted())

    def on_cancel(self, cancel: Cancel, token: Token) -> None:
        """Decode takes its blocks back, and will not load the request."""
        if cancel.request:
            self._unwanted(cancel.request, cancel.xid)
        kept = [w for w in self._waiting.get(cancel.request, []) if w.load.xid != cancel.xid]
        self._keep_waiting(cancel.request, kept)
        if cancel.xid:
            self._context.sender.cancel(cancel.xid, token)
        else:
            self._context.channel.answer(token, Released(wrote=False))

    # --- Time -------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Let go of what nobody came for."""
        now = self._context.clock()
        lease = self._context.config.kv_lease_duration
        for key in self._prompts_end.take(now):
            renewed = self._board.renewed(key) + lease
            if now < renewed:
                self._prompts_end.set(key, renewed)
            else:
                logger.warning("Nobody loaded the prompt of %s within its lease", key)
                self._drop(key)
        for key in self._waiting_end.take(now):
            renewed = self._board.renewed(key) + lease
            if now < renewed:
                self._waiting_end.set(key, renewed)
                continue
            waiting = self._waiting[key]
            for gone in (w for w in waiting if w.expires <= now):
                self._board.set(gone.load.xid, "gone")
            self._keep_waiting(key, [w for w in waiting if now < w.expires])

    def next_deadline(self) -> float | None:
        times = (self._prompts_end.next(), self._waiting_end.next())
        return min((when for when in times if when is not None), default=None)

    def reset(self) -> None:
        """The prefix cache is being reset: what is pinned, or was asked for before, is out of date."""
        for key in list(self._prompts):
            self._drop(key)
        for key in list(self._waiting):
            for waiting in self._take_waiting(key):
                self._board.set(waiting.load.xid, "gone")

    # --- Inside -----------------------------------------------------------------------------------

    def _objection(self, load: Load) -> str:
        """Why a load is refused, or empty."""
        state = self._board.get(load.request)
        checks = (
            (self._context.sender.is_cancelled(load.xid), protocol.GONE),
            (state == "gone", protocol.GONE),
            (state == "aborted", protocol.ABORTED),
            (not load.blocks, protocol.BAD_PROMPT),
        )
        return next((reason for holds, reason in checks if holds), "")

    def _push(self, prompt: _Prompt, load: Load) -> bool:
        """Start writing a prompt's blocks; False if the load is not for this prompt."""
        local = prompt.blocks[load.start : load.start + len(load.blocks)]
        same_prompt = load.prompt == prompt.digest and load.num_tokens == prompt.num_tokens
        if not same_prompt or len(local) != len(load.blocks):
            logger.error(
                "The two legs of %s were given different prompts (%d and %d tokens); nothing is pushed",
                prompt.key, prompt.num_tokens, load.num_tokens,
            )  # fmt: skip
            self._board.set(load.xid, "failed")
            return False
        tokens = prompt.num_tokens - load.start * self._context.block_size
        self._context.pool.pin(local)
        self._pushing[load.xid] = (prompt.key, tokens)
        self._board.set(load.xid, "writing")
        lease = self._context.config.kv_lease_duration
        self._context.sender.start(load.xid, load.sender, local, load.blocks, lease, self._pushed)
        return True

    def _pushed(self, sent: Sent) -> None:
        key, tokens = self._pushing.pop(sent.xid)
        self._board.set(sent.xid, "done" if sent.ok else "failed")
        if sent.ok:
            counts = self._context.counters
            counts.add(counters.PUSH_TOKENS, tokens, protocol.PREFILL_TO_DECODE)
            counts.add(counters.PUSH_BLOCKS, sent.blocks, protocol.PREFILL_TO_DECODE)
            counts.add(counters.PUSH_BYTES, sent.size, protocol.PREFILL_TO_DECODE)
            counts.observe(counters.WRITE_SECONDS, sent.seconds, protocol.PREFILL_TO_DECODE)
        if key not in {other for other, _ in self._pushing.values()}:
            self._drop(key)

    def _unwanted(self, key: str, xid: str) -> None:
        others = [x for x, (k, _) in self._pushing.items() if k == key and x != xid]
        others += [w.load.xid for w in self._waiting.get(key, []) if w.load.xid != xid]
        if not others:
            self._board.set(key, "gone")
            self._drop(key)

    def _abort(self, key: str) -> None:
        self._board.set(key, "aborted")
        for waiting in self._take_waiting(key):
            self._board.set(waiting.load.xid, "aborted")

    def _take_waiting(self, key: str) -> list[_Waiting]:
        """The loads that wait for a prompt, in the order in which they came; they wait no more."""
        self._waiting_end.drop(key)
        return self._waiting.pop(key, [])

    def _keep_waiting(self, key: str, kept: list[_Waiting]) -> None:
        """Of the loads that wait for a prompt, only `kept` still do."""
        if kept:
            self._waiting[key] = kept
            self._waiting_end.set(key, kept[0].expires)
        else:
            self._take_waiting(key)

    def _drop(self, key: str) -> None:
        prompt = self._prompts.pop(key, None)
        self._prompts_end.drop(key)
        if prompt is not None:
            self._board.set(key, "gone")
            self._board.forget_renewal(key)
            self._context.pool.unpin(prompt.blocks)
