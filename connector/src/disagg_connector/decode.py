"""Decode's duties while a turn begins: get the prompt's KV pushed by prefill, or do without in time.

Pure. A request waits for its KV only as long as there is reason to: prefill answers, knows the turn and
has not failed, and `load_timeout_seconds` has not passed. After that the request is computed here, at
once, in other blocks; the ones that prefill was told to write into are held until that cannot happen
any more.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from msgspec.structs import replace

from disagg_connector import counters, protocol
from disagg_connector.context import Context, new_xid
from disagg_connector.deadlines import Deadlines
from disagg_connector.hashes import blocks_for
from disagg_connector.ports import Incoming, RequestView
from disagg_connector.protocol import (
    Accepted,
    Address,
    Cancel,
    DecodeLeg,
    Load,
    Peer,
    Refused,
    Reply,
    Status,
    StatusItem,
    StatusReply,
    leg_key,
)

logger = logging.getLogger(__name__)

STATUS_INTERVAL = 1.0
STATUS_TIMEOUT = 3.0
# How soon to look again where there is nobody to ask yet, because the address is being resolved.
UNRESOLVED_INTERVAL = 0.1
# Unanswered questions in a row after which prefill is taken for lost. A machine with too much to do may keep
# even the control thread from answering for seconds; a process that is gone shows at once by a refused connection.
STATUS_MISSES = 3
# How long a request waits for an address to be resolved.
PEER_WAIT = 2.0
# How long prefill may not know of a turn: its leg is in a queue of its front end, perhaps.
UNKNOWN_GRACE = 10.0
# How long NIXL's announcement may come after prefill says that it has written.
ANNOUNCEMENT_WAIT = 3.0
# Requests and messages that tell prefill not to wait for us; nothing depends on the reply.
DISMISS_TIMEOUT = 5.0

# Why a turn is computed locally although KV was to come: the label of the counter.
Reason = Literal[
    "params", "peer", "fingerprint", "prompt", "refused", "unknown", "aborted", "gone", "write",
    "notification", "timeout", "lost", "epoch", "closed",
]  # fmt: skip

# What a turn waits for: to be allocated, for its KV, for blocks that it gives up; or how it came by its KV.
TurnState = Literal["queued", "loading", "failing", "loaded", "local"]

_REFUSALS: dict[str, Reason] = {
    protocol.FINGERPRINT: "fingerprint",
    protocol.BAD_PROMPT: "prompt",
    protocol.ABORTED: "aborted",
    protocol.GONE: "gone",
    protocol.RESTARTED: "lost",
    protocol.CLOSED: "closed",
}
_STATES: dict[str, Reason] = {"aborted": "aborted", "failed": "write", "gone": "gone"}


@dataclass
class Turn:
    """A request that was to get its KV from prefill."""

    id: str
    key: str
    address: Address
    arrived: float
    state: TurnState = "queued"
    peer: Peer | None = None
    epoch: int = 0
    """Of this engine, when the request's KV was begun."""
    xid: str = ""
    blocks: tuple[int, ...] = ()
    started: float = 0.0
    done_since: float | None = None
    reason: Reason = "timeout"


@dataclass
class _Open:
    """The turns that wait for one prefill engine, queued or loading."""

    turns: dict[str, Turn] = field(default_factory=dict)
    misses: int = 0
    """Unanswered questions in a row."""


class LoadSide:
    """Loads of a decode engine. Engine thread only.

    A turn that runs costs nothing here: only open ones are looked at, and only when a deadline has come.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._turns: dict[str, Turn] = {}
        self._open: dict[Address, _Open] = {}
        self._ask_at: Deadlines[Address] = Deadlines()
        self._give_up_at: Deadlines[str] = Deadlines()
        self._asking: set[str] = set()
        self._refused: dict[str, Load] = {}
        """To be sent again when prefill has told its epoch; nothing is registered there meanwhile."""
        self._dismissals: list[tuple[Address, str]] = []

    # --- Hooks of the engine ----------------------------------------------------------------------

    def arrived(self, view: RequestView, leg: DecodeLeg) -> None:
        now = self._context.clock()
        turn = self._turns[view.id] = Turn(view.id, leg_key(view.id), leg.prefill, now)
        if leg.prefill not in self._open:
            self._open[leg.prefill] = _Open()
            self._ask_at.set(leg.prefill, now)
        self._open[leg.prefill].turns[turn.id] = turn
        self._context.peers.resolve(leg.prefill)

    def loadable_tokens(self, view: RequestView, local_tokens: int) -> int | None:
        """Prompt tokens beyond the local ones that prefill will bring; None: ask again next step."""
        turn = self._turns.get(view.id)
        if turn is None or turn.state != "queued" or view.num_tokens > view.num_prompt_tokens:
            return 0
        if not self._context.epochs.is_open:
            return self._go_local(turn, "closed")
        resolution = self._context.peers.resolve(turn.address)
        if resolution.verdict == "asking":
            if self._context.clock() - turn.arrived < PEER_WAIT:
                return None
            return self._go_local(turn, "peer")
        if resolution.peer is None:
            return self._go_local(turn, "fingerprint" if resolution.verdict == "incompatible" else "peer")
        turn.peer = resolution.peer
        return max(0, view.num_prompt_tokens - local_tokens)

    def allocated(self, view: RequestView, blocks: Sequence[int], external_tokens: int) -> None:
        """The engine has allocated blocks for the tokens that are to come: have them written."""
        turn = self._turns.get(view.id)
        if turn is None:
            return
        if view.num_valid_tokens == 0:
            # Else what was loaded has come, and the request only now begins to run.
            turn.epoch = self._context.epochs.epoch
        if turn.state != "queued":
            return
        if external_tokens <= 0 or turn.peer is None:
            self._close(turn, "local")
            self._dismiss(turn)
            return
        context = self._context
        start = (view.num_prompt_tokens - external_tokens) // context.block_size
        turn.blocks = tuple(blocks[start : blocks_for(view.num_prompt_tokens, context.block_size)])
        turn.xid, turn.state, turn.started = new_xid(), "loading", context.clock()
        context.orders.expect.append(Incoming(turn.xid, turn.peer.tensor_parallel, turn.id))
        load = Load(
            turn.peer.engine_id,
            turn.peer.epoch,
            turn.xid,
            turn.key,
            context.me(),
            view.prompt_digest(),
            view.num_prompt_tokens,
            start,
            list(turn.blocks),
        )
        self._give_up_at.set(turn.id, turn.started + context.config.load_timeout_seconds)
        self._send_load(turn, load)

    def received(self, request_id: str, *, failed: bool) -> None:
        """Every rank is through with a request's load."""
        turn = self._turns.get(request_id)
        if turn is None or turn.state not in ("loading", "failing"):
            return
        self._close(turn, "local" if failed else "loaded")
        if failed:
            self._context.counters.add(counters.RECOMPUTED, 1, turn.reason)

    def state(self, request_id: str) -> TurnState | None:
        """How a turn under way came by its prompt's KV, if it has."""
        turn = self._turns.get(request_id)
        return None if turn is None else turn.state

    def finished(self, request_id: str) -> Turn | None:
        """The request is over. Returns its turn if its KV is whole, so that it may be written back."""
        turn = self._turns.pop(request_id, None)
        if turn is None:
            return None
        if turn.state == "queued":
            self._close(turn, "local")
            self._dismiss(turn)
            return None
        if turn.state == "loading":
            self._fail(turn, "aborted")
        is_whole = turn.state in ("loaded", "local") and turn.epoch == self._context.epochs.epoch
        return turn if is_whole else None

    def reset(self) -> None:
        """The prefix cache is being reset: what is being brought is out of date."""
        for waiting in list(self._open.values()):
            for turn in list(waiting.turns.values()):
                if turn.state == "loading":
                    self._fail(turn, "epoch")

    # --- Time -------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Ask prefill how the open loads are doing; give up those that have waited too long."""
        now = self._context.clock()
        if self._dismissals:
            self._send_dismissals()
        for turn_id, load in list(self._refused.items()):
            self._send_again(self._turns[turn_id], load)
        for turn_id in self._give_up_at.take(now):
            self._fail(self._turns[turn_id], "timeout")
        for address in self._ask_at.take(now):
            turns = self._askable(address)
            if turns:
                self._ask(address, turns)
            self._ask_at.set(address, now + (STATUS_INTERVAL if turns else UNRESOLVED_INTERVAL))

    # --- Inside -----------------------------------------------------------------------------------

    def _close(self, turn: Turn, state: Literal["failing", "loaded", "local"]) -> None:
        """The turn does not wait for prefill any more."""
        turn.state = state
        self._give_up_at.drop(turn.id)
        self._refused.pop(turn.id, None)
        waiting = self._open.get(turn.address)
        if waiting is None:
            return
        waiting.turns.pop(turn.id, None)
        if not waiting.turns:
            del self._open[turn.address]
            self._ask_at.drop(turn.address)

    def _askable(self, address: Address) -> list[Turn]:
        """The open turns of an address of which it is known who answers there."""
        turns = list(self._open[address].turns.values())
        for turn in turns:
            if turn.peer is None:
                turn.peer = self._context.peers.resolve(address).peer
        return [turn for turn in turns if turn.peer is not None]

    def _ask(self, address: Address, turns: list[Turn]) -> None:
        peers = {turn.peer.engine_id: turn.peer for turn in turns if turn.peer is not None}
        for engine_id in peers.keys() - self._asking:
            self._asking.add(engine_id)
            mine = [turn for turn in turns if turn.peer is not None and turn.peer.engine_id == engine_id]
            message = Status(engine_id, [StatusItem(turn.key, turn.xid) for turn in mine])
            told = partial(self._told, address, engine_id, mine)
            self._context.channel.request(address, message, STATUS_TIMEOUT, told)

    def _told(self, address: Address, engine_id: str, turns: list[Turn], reply: Reply | None) -> None:
        self._asking.discard(engine_id)
        waiting = self._open.get(address) or _Open()
        match reply:
            case StatusReply(states=states) if len(states) == len(turns):
                waiting.misses = 0
                for turn, state in zip(turns, states, strict=True):
                    self._judge(turn, state)
            case Refused(reason=protocol.RESTARTED):
                self._lost(address, turns)
            case _:
                waiting.misses += 1
                if waiting.misses >= STATUS_MISSES:
                    self._lost(address, turns)
                else:
                    self._context.channel.probe(address, partial(self._lost, address, turns))

    def _judge(self, turn: Turn, state: str) -> None:
        if turn.state == "queued" and state in ("aborted", "gone"):
            # Nothing was registered, so nothing can be written: simply do not load.
            turn.reason = _STATES[state]
            self._go_local(turn, turn.reason)
        if turn.state != "loading":
            return
        waited = self._context.clock() - turn.started
        if state in _STATES:
            self._fail(turn, _STATES[state])
        elif state == "unknown":
            grace = min(UNKNOWN_GRACE, self._context.config.load_timeout_seconds / 2)
            if waited >= grace:
                self._fail(turn, "unknown")
        elif state == "done":
            if turn.done_since is None:
                turn.done_since = self._context.clock()
            elif self._context.clock() - turn.done_since >= ANNOUNCEMENT_WAIT:
                self._fail(turn, "notification")

    def _lost(self, address: Address, turns: list[Turn]) -> None:
        """The engine that these turns wait for is gone, or cannot be reached."""
        self._context.peers.doubt(address)
        for turn in turns:
            if turn.state == "loading":
                self._fail(turn, "lost")
            elif turn.state == "queued":
                turn.peer = None

    def _send_load(self, turn: Turn, load: Load) -> None:
        timeout = self._context.config.load_timeout_seconds
        self._context.channel.request(
            turn.address, load, timeout, lambda reply: self._registered(turn, load, reply)
        )

    def _send_again(self, turn: Turn, load: Load) -> None:
        """Prefill was in another epoch than known here: ask it once more when it has told which."""
        resolution = self._context.peers.resolve(turn.address)
        if resolution.verdict == "asking":
            return
        del self._refused[turn.id]
        if resolution.peer is None:
            self._fail(turn, "fingerprint" if resolution.verdict == "incompatible" else "peer", hold=False)
            return
        turn.peer = resolution.peer
        self._send_load(turn, replace(load, to=turn.peer.engine_id, epoch=turn.peer.epoch))

    def _registered(self, turn: Turn, load: Load, reply: Reply | None) -> None:
        if turn.state != "loading" or isinstance(reply, Accepted):
            return
        if isinstance(reply, Refused):
            if reply.reason in (protocol.RESTARTED, protocol.EPOCH):
                self._context.peers.doubt(turn.address)
            if reply.reason == protocol.EPOCH:
                self._refused[turn.id] = load
                return
            # Prefill has refused: it never writes, so there is nothing to hold.
            self._fail(turn, _REFUSALS.get(reply.reason, "refused"), hold=False)
        # No reply at all: the deadline decides, as for an accepted load.

    def _fail(self, turn: Turn, reason: Reason, *, hold: bool = True) -> None:
        """Give a load up: the request goes on without, its blocks wait for prefill's word."""
        logger.warning("KV of %s does not come from %s (%s)", turn.id, turn.address, reason)
        turn.reason = reason
        self._close(turn, "failing")
        self._context.orders.failed.append(turn.id)
        if hold and turn.peer is not None:
            self._context.pool.pin(turn.blocks)
            self._context.held.hold(turn.xid, turn.blocks, turn.peer, turn.key)

    def _go_local(self, turn: Turn, reason: Reason) -> int:
        self._close(turn, "local")
        logger.warning("%s is computed here, no KV comes from %s (%s)", turn.id, turn.address, reason)
        self._context.counters.add(counters.RECOMPUTED, 1, reason)
        self._dismiss(turn)
        return 0

    def _dismiss(self, turn: Turn) -> None:
        """Tell prefill that nobody will load this turn, so that it need not keep it until the lease ends."""
        self._dismissals.append((turn.address, turn.key))
        self._send_dismissals()

    def _send_dismissals(self) -> None:
        waiting, self._dismissals = self._dismissals, []
        for address, key in waiting:
            resolution = self._context.peers.resolve(address)
            if resolution.verdict == "asking":
                self._dismissals.append((address, key))
            elif resolution.peer is not None:
                message = Cancel(resolution.peer.engine_id, "", key)
                self._context.channel.request(address, message, DISMISS_TIMEOUT, lambda reply: None)
