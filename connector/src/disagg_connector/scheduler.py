"""The scheduler's part: wires one engine's sides to its hooks, its control channel and its workers.

Everything here runs on the engine thread, except `FastAnswers`. `pump` is called from every hook that is
called often enough; it takes what the control channel has brought, lets time pass and sets the next alarm.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace as dataclass_replace

from msgspec.structs import replace

from disagg_connector import counters, protocol
from disagg_connector.config import ConnectorConfig
from disagg_connector.context import Board, Context
from disagg_connector.counters import Counters, Counts
from disagg_connector.decode import LoadSide
from disagg_connector.direct import Direct, Link, NoLink
from disagg_connector.epochs import Epochs, Standing
from disagg_connector.hashes import Fingerprint, blocks_for, full_blocks
from disagg_connector.landing import HeldBlocks
from disagg_connector.lifecycle import Lifecycle
from disagg_connector.offers import OfferSide
from disagg_connector.peers import Peers
from disagg_connector.ports import (
    Clock,
    Dropped,
    FinishKind,
    Inbound,
    Inbox,
    Orders,
    Outcome,
    Pool,
    RequestView,
    Steps,
    WorkerReport,
)
from disagg_connector.prefill import PrefillSide
from disagg_connector.protocol import (
    LONGEST_ID,
    WIRE_VERSION,
    Cancel,
    Commit,
    DecodeLeg,
    Dismissal,
    Hello,
    Load,
    Malformed,
    Offer,
    Peer,
    PrefillLeg,
    Refused,
    Reply,
    Request,
    Status,
    StatusReply,
    Want,
    Welcome,
    leg_key,
    parse_params,
)
from disagg_connector.ranks import Sharding
from disagg_connector.remembered import Remembered
from disagg_connector.sending import Sender
from disagg_connector.streams import Streams
from disagg_connector.writeback import WriteBackSide

logger = logging.getLogger(__name__)


class Identity:
    """Who this engine is. The fingerprint is there only after vLLM has initialised its hash seed."""

    def __init__(self, fingerprint: Callable[[], Fingerprint | None], peer: Callable[[str], Peer]) -> None:
        self.epochs = Epochs()
        self._compute = fingerprint
        self._make_peer = peer
        self._fingerprint: Fingerprint | None = None
        self._shown: tuple[Standing, Peer, dict[str, str]] | None = None

    @property
    def ready(self) -> bool:
        if self._fingerprint is None:
            self._fingerprint = self._compute()
        return self._fingerprint is not None

    def peer(self) -> Peer:
        """This engine, as told to others."""
        return self._show()[1]

    def parts(self) -> dict[str, str]:
        """What its fingerprint is made of."""
        return self._show()[2] if self.ready else {}

    def _show(self) -> tuple[Standing, Peer, dict[str, str]]:
        """Any thread: the peer and its parts as of the epochs' standing."""
        shown, now = self._shown, self.epochs.now
        if shown is None or shown[0] is not now:
            if not self.ready or self._fingerprint is None:
                raise RuntimeError("the engine has not finished starting")
            fingerprint = replace(self._fingerprint, generation=now.generation)
            peer = replace(self._make_peer(fingerprint.digest()), epoch=now.epoch)
            if shown is None or shown[1].fingerprint != peer.fingerprint:
                logger.info("KV fingerprint %s: %s", peer.fingerprint, fingerprint.parts())
            self._shown = shown = (now, peer, fingerprint.parts())
        return shown


class FastAnswers:
    """What the control thread answers itself, so that a busy engine thread is not taken for a dead one."""

    def __init__(self, config: ConnectorConfig, engine_id: str, identity: Identity, board: Board) -> None:
        self._config = config
        self._engine_id = engine_id
        self._identity = identity
        self._board = board
        self.peek: Callable[[Want], bool] = lambda want: False

    def __call__(self, message: Request) -> Reply | None:
        """A reply, or None for the engine thread to answer."""
        if not isinstance(message, Hello) and message.to != self._engine_id:
            return Refused(protocol.RESTARTED, self._engine_id)
        if not self._identity.ready:
            return Refused(protocol.STARTING, self._engine_id)
        if isinstance(message, Hello):
            return Welcome(WIRE_VERSION, self._config.role, self._identity.peer(), self._identity.parts())
        if not self._is_my_job(message):
            return Refused(protocol.WRONG_ROLE, self._engine_id)
        if isinstance(message, Load | Offer | Want) and not self._identity.epochs.is_open:
            # The engine thread may be busy with new weights for long, or asleep.
            self._board.refused(protocol.CLOSED)
            return Refused(protocol.CLOSED, self._engine_id)
        if isinstance(message, Status):
            return StatusReply([self._board.ask(item.request, item.xid) for item in message.items])
        if isinstance(message, Want) and not self.peek(message):
            return protocol.Held(0)
        return None

    def _is_my_job(self, message: Request) -> bool:
        if isinstance(message, Cancel):
            return True
        return isinstance(message, Want) == (self._config.role == "decode")


class Scheduler:
    """One engine's connector, on its engine thread. Made when vLLM binds its block pool, before any request."""

    def __init__(
        self,
        config: ConnectorConfig,
        block_size: int,
        sharding: Sharding,
        identity: Identity,
        channel: Inbox,
        board: Board,
        pool: Pool,
        clock: Clock = time.monotonic,
        link: Link | None = None,
    ) -> None:
        """Without a `link` writes are ordered with engine steps only."""
        self._config = config
        self._channel = channel
        self._clock = clock
        steps = Steps()
        direct = Direct(link or NoLink(), channel, identity.epochs, clock, sharding.ranks)
        self.context = Context(
            me=identity.peer,
            epochs=identity.epochs,
            config=config,
            block_size=block_size,
            sharding=sharding,
            pool=pool,
            channel=channel,
            clock=clock,
            steps=steps,
            counters=Counters(),
            direct=direct,
            sender=Sender(pool, channel, direct, clock, steps, sharding.ranks),
            held=HeldBlocks(pool, channel, clock),
            peers=Peers(
                channel,
                clock,
                identity.parts,
                lambda peer: self.context.objection(peer),
                self._peer_gone,
                self._peer_ready,
            ),
        )
        self._board = board
        self._heard = Remembered()
        self.prefill = PrefillSide(self.context, board)
        self.writeback = WriteBackSide(self.context)
        self.loads = LoadSide(self.context)
        self.offers = OfferSide(self.context)
        self.streams = Streams(self.context, self.offers, self.loads.state)
        self.lifecycle = Lifecycle(self.context, self._void)
        watch = self.context.counters.watch
        watch(counters.QUARANTINED, lambda: self.context.held.count)
        if config.role == "decode":
            watch(counters.PINNED_BLOCKS, lambda: self.context.sender.pinned)

    # --- Hooks of a request ------------------------------------------------------------------------

    def arrived(self, view: RequestView, params: object, exchangeable: bool) -> None:
        """A request has reached the engine, before its first look into the prefix cache."""
        leg = parse_params(params, self._config.role) if exchangeable else None
        if leg is not None and not 0 < len(leg_key(view.id)) <= LONGEST_ID:
            # No peer would read a message that names it, nor what else is in that message.
            leg = Malformed("no id that messages can name")
        match leg:
            case PrefillLeg():
                self.prefill.arrived(view, leg)
                self.writeback.arrived(view, leg)
            case DecodeLeg():
                self.loads.arrived(view, leg)
                self.streams.arrived(view, leg.prefill)
            case Dismissal(turn=turn):
                self.prefill.dismissed(turn)
            case Malformed(reason=reason):
                logger.warning("kv_transfer_params of %s are ignored: %s", view.id, reason)
                self.context.counters.add(counters.RECOMPUTED, 1, "params")
            case None:
                pass
        self.pump()

    def matched_tokens(self, view: RequestView, local_tokens: int) -> tuple[int | None, bool]:
        """What vLLM's `get_num_new_matched_tokens` is to return."""
        if self._config.role == "prefill":
            return (0, False) if self.writeback.may_schedule(view, local_tokens) else (None, False)
        # All of its blocks: those that it finds in the cache are taken from the free ones as well.
        self.context.sender.make_room(blocks_for(view.num_tokens, self.context.block_size))
        count = self.loads.loadable_tokens(view, local_tokens)
        return count, bool(count)

    def allocated(self, view: RequestView, blocks: Sequence[int], external_tokens: int) -> None:
        self.prefill.allocated(view)
        self.loads.allocated(view, blocks, external_tokens)

    def finished(self, view: RequestView, blocks: Sequence[int], kind: FinishKind) -> None:
        """A request is over; the engine frees its blocks after this call."""
        if self._config.role == "prefill":
            self.context.pool.used(blocks)
            self.writeback.finished(view.id)
            self.prefill.finished(view, blocks, kind)
            self._set_alarm()
            return
        stream = self.streams.finished(view.id)
        turn = self.loads.finished(view.id)
        if turn is not None:
            was_pushed = turn.state == "loaded"
            there = full_blocks(view.num_prompt_tokens, self.context.block_size) if was_pushed else 0
            end = self.offers.turn_end(view, blocks, kind, turn.address, there)
            if end is None:
                return
            if stream is None:
                self.offers.close(end)
            else:
                # Prefill would take the rest for a second copy of a batch that is still on its way.
                stream.at_rest(lambda: self.offers.close(dataclass_replace(end, there=stream.sent or there)))

    # --- Hooks of a step ----------------------------------------------------------------------------

    def orders(self) -> Orders:
        """The workers' orders for the step that is being built."""
        self.context.steps.scheduled += 1
        self.pump()
        self.streams.step()
        return self.context.take_orders()

    def reported(self, report: WorkerReport | None, received: set[str], failed: set[str]) -> None:
        """What the workers told after a step."""
        for request_id in received:
            self.loads.received(request_id, failed=request_id in failed)
        if report is not None:
            for xid, tally in report.sent.items():
                self.context.sender.report(xid, tally)
            for xid, count in report.landed.items():
                self.writeback.landed(xid, count)
        self.pump()

    def step_is_over(self) -> Counts:
        """A step's output has been processed. Returns what was counted since the last one."""
        self.context.steps.processed += 1
        self.writeback.step_is_over()
        for reason, count in self._board.take_refused().items():
            self.context.counters.add(counters.REFUSED, count, reason)
        return self.context.counters.drain()

    @property
    def needs_steps(self) -> bool:
        """Whether the engine must go on stepping although no request wants it to."""
        context = self.context
        return (
            self._channel.has_events
            or context.has_orders
            or context.sender.busy
            or self.writeback.busy
            or self.lifecycle.is_draining
            or context.counters.has_news
        )

    # --- Inside -----------------------------------------------------------------------------------

    def _void(self) -> None:
        """What was agreed on with peers is void: call it all off."""
        self.prefill.reset()
        self.writeback.reset()
        self.loads.reset()
        self.offers.reset()
        self.streams.reset()
        self.context.sender.give_up_all()

    def pump(self) -> None:
        """Take what has arrived and let time pass."""
        for event in self._channel.drain():
            try:
                match event:
                    case Inbound():
                        self._dispatch(event)
                    case Outcome():
                        event.run()
                    case Dropped():
                        for reason, count in event.counts.items():
                            self.context.counters.add(counters.CONTROL_DROPPED, count, reason)
            except Exception:
                logger.exception("The connector survived an error in %s", event)
        self.prefill.tick()
        self.writeback.tick()
        self.loads.tick()
        self.offers.tick()
        self.context.held.tick()
        self._set_alarm()

    def _set_alarm(self) -> None:
        """An idle engine is woken when the first deadline has come."""
        deadlines = (
            self.prefill.next_deadline(),
            self.writeback.next_deadline(),
            self.offers.next_deadline(),
            self.context.sender.next_deadline(),
            self.context.held.next_deadline(),
        )
        self._channel.wake_at(min((time for time in deadlines if time is not None), default=None))

    def _dispatch(self, event: Inbound) -> None:
        message, token = event.message, event.token
        reason = self._objection(message)
        if reason:
            self.context.counters.add(counters.REFUSED, 1, reason)
            if isinstance(message, Offer):
                self.writeback.denied(message, reason)
            self.context.channel.answer(token, Refused(reason, self.context.me().engine_id))
            return
        if isinstance(message, Load | Offer | Want) and not self._heard.add(message.xid):
            logger.warning("A %s has arrived twice: %s", type(message).__name__, message.xid)
            return
        match message:
            case Load():
                self.prefill.on_load(message, token)
            case Cancel() if self._config.role == "prefill":
                self.prefill.on_cancel(message, token)
            case Cancel():
                self.context.sender.cancel(message.xid, token)
            case Offer():
                self.writeback.on_offer(message, token)
            case Commit():
                self.writeback.on_commit(message, token)
            case Want():
                self.offers.on_want(message, token)
            case _:
                logger.error("No handler for %s", message)

    def _peer_ready(self, peer: Peer) -> None:
        """NIXL's handshake takes up to a second: it must not begin with the first turn's write."""
        self.context.orders.connect.append(peer)

    def _objection(self, message: Request) -> str:
        """Why a message about KV is refused whatever it says, or empty. `Commit`, `Cancel` and `Status` end
        what was agreed on before, so they are always heard."""
        if not isinstance(message, Load | Offer | Want):
            return ""
        context = self.context
        # Before any check, so that a refused sender is asked and a difference explained in the log.
        if not context.peers.met(message.sender):
            return protocol.GONE
        if not context.epochs.is_open:
            return protocol.CLOSED
        if context.objection(message.sender):
            context.peers.resolve(message.sender.address)
            return protocol.FINGERPRINT
        return protocol.EPOCH if message.epoch != context.epochs.epoch else ""

    def _peer_gone(self, peer: Peer) -> None:
        self.context.orders.forget.append(peer.engine_id)
        self.context.held.peer_is_gone(peer.engine_id)
