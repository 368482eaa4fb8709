"""The control channel: small messages between the schedulers of two engines, over ZeroMQ.

One thread owns every socket. The engine thread hands it messages through a queue and takes what arrived
from another; it never touches the network and never waits for it. What comes from outside must be sealed by a
holder of the secret (`auth`) and fit `protocol`, or it is dropped: nothing that anybody sends can block or end
the engine, and what is kept of it is bounded.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import zmq

from disagg_connector.auth import Codec
from disagg_connector.deadlines import Deadlines
from disagg_connector.ports import Clock, Dropped, Event, Inbound, Outcome, Token
from disagg_connector.protocol import MAX_MESSAGE_BYTES, Address, ProtocolError, Reply, Request

logger = logging.getLogger(__name__)

# Requests that the engine thread has not taken yet; more are dropped, which a peer sees as no reply.
INBOX_LIMIT = 20_000
INBOX_BYTES = 64 * 1024 * 1024
# Events that the engine thread takes at once: a step must not wait for a flood.
DRAIN_LIMIT = 500
HIGH_WATER_MARK = 2_000
# Messages that ZeroMQ keeps for us per connection, before anybody knows who sent them. The rest waits with the sender.
STRANGERS_MARK = 32
# This thread shares the interpreter with the engine's. After so many messages in a row that were dropped it pauses.
DROPS_BEFORE_PAUSE = 64
PAUSE = 0.005
MAX_PEERS = 1_024
IDLE_PEER_SECONDS = 300.0
LONGEST_POLL = 1.0
TELL_EVERY = 1.0
COMPLAIN_EVERY = 10.0
PROBE_TIMEOUT = 2.0


@dataclass
class _PeerSocket:
    socket: Any
    used_at: float


@dataclass
class _Pending:
    on_reply: Callable[[Reply | None], None]
    at_once: Callable[[Reply], None] | None
    peer: _PeerSocket | None = None


class ControlChannel:
    """Serve one address and talk to others. See `ports.Channel` for the engine thread's part.

    `fast` is asked first, on the channel's own thread: a reply it returns is sent at once, None leaves
    the request to the engine thread. `wake` is called from the channel's thread when there is something
    for the engine thread.
    """

    def __init__(
        self,
        address: Address,
        fast: Callable[[Request], Reply | None],
        wake: Callable[[], None],
        codec: Codec,
        clock: Clock = time.monotonic,
    ) -> None:
        self._fast = fast
        self._wake = wake
        self._codec = codec
        self._clock = clock
        self._zmq: Any = zmq.Context()
        self._server = self._listen(address)
        self._peers: dict[Address, _PeerSocket] = {}
        self._pending: dict[int, _Pending] = {}
        self._pending_end: Deadlines[int] = Deadlines()
        self._look_for_idle_at = 0.0
        self._seq = 0
        self._outbox: deque[Callable[[], None]] = deque()
        self._inbox: deque[tuple[Event, int]] = deque()
        # Of requests, in bytes: one is written by this thread alone, the other by the engine's.
        self._received, self._taken = 0, 0
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._woken = False
        self._alarm: float | None = None
        self._probing: set[Address] = set()
        self._watched: dict[int, Callable[[], None]] = {}
        self._dropped: Counter[str] = Counter()
        self._drops = 0
        self._told_at = self._complained_at = float("-inf")
        self._stop = False
        self._thread = threading.Thread(target=self._run, name="disagg-control", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def watch(self, fd: int, on_readable: Callable[[], None] | None) -> None:
        """Call this on the channel's thread when there is something to read from `fd`; None: do not any more.
        Before `start`, or on the channel's thread."""
        if on_readable is None:
            self._watched.pop(fd, None)
        else:
            self._watched[fd] = on_readable

    def close(self) -> None:
        """Stop the thread and close all sockets, dropping what was not sent."""
        self._stop = True
        self._ring()
        if self._thread.is_alive():
            self._thread.join(timeout=5)

    # --- The engine thread's part -----------------------------------------------------------------

    def request(
        self,
        to: Address,
        message: Request,
        timeout: float,
        on_reply: Callable[[Reply | None], None],
        at_once: Callable[[Reply], None] | None = None,
    ) -> None:
        self._post(lambda: self._send(to, message, timeout, _Pending(on_reply, at_once)))

    def answer(self, token: Token, reply: Reply) -> None:
        self._post(lambda: self._reply(token, reply))

    def probe(self, address: Address, on_refused: Callable[[], None]) -> None:
        if address in self._probing or len(self._probing) >= 16:
            return
        self._probing.add(address)
        try:
            threading.Thread(target=self._probe, args=(address, on_refused), daemon=True).start()
        except RuntimeError as error:  # out of threads: whoever asks again may have one
            self._probing.discard(address)
            logger.warning("Control channel: %s is not looked at: %s", address, error)

    def drain(self) -> list[Event]:
        """What has arrived since the last call, as far as one step should bear; see `has_events`."""
        self._woken = False
        events: list[Event] = []
        while self._inbox and len(events) < DRAIN_LIMIT:
            event, size = self._inbox.popleft()
            self._taken += size
            events.append(event)
        return events

    @property
    def has_events(self) -> bool:
        return bool(self._inbox)

    def wake_at(self, when: float | None) -> None:
        """Wake the engine thread at this time, in place of an earlier wish."""
        before, self._alarm = self._alarm, when
        if when is not None and (before is None or when < before) and when - self._clock() < LONGEST_POLL:
            # Any other alarm is seen in time by itself: the thread looks that often.
            self._ring()

    # --- The channel's thread ---------------------------------------------------------------------

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._server, zmq.POLLIN)
        poller.register(self._wake_fd, zmq.POLLIN)
        known: set[Any] = set()
        while not self._stop:
            try:
                current = {*(peer.socket for peer in self._peers.values()), *self._watched}
                for gone in known - current:
                    poller.unregister(gone)
                for new in current - known:
                    poller.register(new, zmq.POLLIN)
                known = current
                ready = dict(poller.poll(self._poll_milliseconds()))
                self._turn(ready)
            except Exception:
                logger.exception("Control channel: an error was survived")
                time.sleep(0.05)
        for peer in self._peers.values():
            peer.socket.close(0)
        self._server.close(0)
        self._zmq.destroy(linger=0)
        os.close(self._wake_fd)

    def _turn(self, ready: dict[Any, int]) -> None:
        if self._wake_fd in ready:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake_fd)
        for fd in ready.keys() & self._watched.keys():
            if fd in self._watched:
                _survive(self._watched[fd])
        drops = self._drops
        if self._server in ready:
            self._receive(self._server, self._take_request)
        for peer in list(self._peers.values()):
            if peer.socket in ready:
                self._receive(peer.socket, partial(self._take_reply, peer))
        if self._drops - drops >= DROPS_BEFORE_PAUSE:
            time.sleep(PAUSE)
        while self._outbox:
            self._outbox.popleft()()
        self._expire()

    def _poll_milliseconds(self) -> int:
        times = (self._pending_end.next(), self._alarm)
        wait = min((when for when in times if when is not None), default=float("inf")) - self._clock()
        return max(0, int(min(wait, LONGEST_POLL) * 1000) + 1)

    def _receive(self, source: Any, take: Callable[[list[bytes]], None]) -> None:
        drops = self._drops
        for _ in range(256):
            if self._drops - drops >= DROPS_BEFORE_PAUSE:
                return
            try:
                parts = source.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                take(parts)
            except ProtocolError as error:
                self._drop(error.reason, str(error))

    def _take_request(self, parts: list[bytes]) -> None:
        if len(parts) != 2:
            raise ProtocolError(f"{len(parts)} parts in place of two")
        source, data = parts
        number, message, seal = self._codec.read_request(data)
        token = Token(source, number, seal)
        try:
            reply = self._fast(message)
        except Exception:
            logger.exception("Control channel: %s was not answered", type(message).__name__)
            return
        if reply is not None:
            self._reply(token, reply)
        elif len(self._inbox) >= INBOX_LIMIT or self._received - self._taken >= INBOX_BYTES:
            self._drop("overload", "the engine does not keep up")
        else:
            self._received += len(data)
            self._deliver(Inbound(token, message), len(data))

    def _take_reply(self, peer: _PeerSocket, parts: list[bytes]) -> None:
        number, reply = self._codec.read_reply(parts[-1])
        pending = self._pending.get(number)
        # Else it comes after its time, again, or from somebody who was not asked.
        if pending is not None and pending.peer is peer:
            del self._pending[number]
            self._pending_end.drop(number)
            if pending.at_once is not None:
                _survive(partial(pending.at_once, reply))
            self._finish(pending.on_reply, reply)

    def _send(self, to: Address, message: Request, timeout: float, pending: _Pending) -> None:
        now = self._clock()
        self._seq += 1
        self._pending[self._seq] = pending
        self._pending_end.set(self._seq, now + timeout)
        try:
            peer = pending.peer = self._peer(to)
            peer.used_at = max(peer.used_at, now + timeout)
            peer.socket.send(self._codec.write_request(self._seq, message), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            # Not sent is the same as not answered, and seen at once.
            logger.debug("Control channel: %s to %s: %s", type(message).__name__, to, error)
            self._pending_end.set(self._seq, now)

    def _reply(self, token: Token, reply: Reply) -> None:
        try:
            data = self._codec.write_reply(token.seal, token.number, reply)
            self._server.send_multipart([token.source, data], zmq.NOBLOCK)
        except (zmq.ZMQError, ProtocolError) as error:
            logger.debug("Control channel: a reply could not be sent: %s", error)

    def _expire(self) -> None:
        now = self._clock()
        for seq in self._pending_end.take(now):
            self._finish(self._pending.pop(seq).on_reply, None)
        if self._alarm is not None and now >= self._alarm:
            self._alarm = None
            self._deliver(Outcome(lambda: None))
        if self._dropped and now - self._told_at >= TELL_EVERY and len(self._inbox) < INBOX_LIMIT:
            self._told_at = now
            self._deliver(Dropped(self._dropped))
            self._dropped = Counter()
        if now >= self._look_for_idle_at:
            self._look_for_idle_at = now + LONGEST_POLL
            self._close_idle(now)

    def _close_idle(self, now: float) -> None:
        for address, peer in list(self._peers.items()):
            if now - peer.used_at > IDLE_PEER_SECONDS:
                del self._peers[address]
                peer.socket.close(0)

    # --- Helpers ----------------------------------------------------------------------------------

    def _post(self, action: Callable[[], None]) -> None:
        self._outbox.append(action)
        self._ring()

    def _ring(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):
            os.eventfd_write(self._wake_fd, 1)

    def _finish(self, on_reply: Callable[[Reply | None], None], reply: Reply | None) -> None:
        self._deliver(Outcome(lambda: on_reply(reply)))

    def _deliver(self, event: Event, size: int = 0) -> None:
        self._inbox.append((event, size))
        if not self._woken:
            self._woken = True
            self._wake()

    def _drop(self, reason: str, why: str) -> None:
        self._drops += 1
        self._dropped[reason] += 1
        now = self._clock()
        if now - self._complained_at >= COMPLAIN_EVERY:
            self._complained_at = now
            logger.warning("Control channel: %d messages dropped so far, the last: %s", self._drops, why)

    def _probe(self, address: Address, on_refused: Callable[[], None]) -> None:
        try:
            socket.create_connection((address.host, address.control_port), PROBE_TIMEOUT).close()
        except ConnectionRefusedError:
            self._deliver(Outcome(on_refused))
        except OSError:
            pass
        finally:
            self._probing.discard(address)

    def _peer(self, address: Address) -> _PeerSocket:
        peer = self._peers.get(address)
        if peer is None:
            if len(self._peers) >= MAX_PEERS:
                oldest = min(self._peers, key=lambda a: self._peers[a].used_at)
                self._peers.pop(oldest).socket.close(0)
            client = self._socket(zmq.DEALER)
            client.setsockopt(zmq.RECONNECT_IVL, 100)
            client.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
            client.setsockopt(zmq.CONNECT_TIMEOUT, 2000)
            client.connect(_endpoint(address))
            peer = self._peers[address] = _PeerSocket(client, self._clock())
        return peer

    def _listen(self, address: Address) -> Any:
        server = self._socket(zmq.ROUTER)
        server.setsockopt(zmq.RCVHWM, STRANGERS_MARK)
        try:
            server.bind(_endpoint(address))
        except zmq.ZMQError as error:
            server.close(0)
            raise OSError(
                f"The connector's control channel cannot listen on {address}: {error}. Is the port taken, or "
                "VLLM_NIXL_SIDE_CHANNEL_HOST not an address of this host?"
            ) from error
        return server

    def _socket(self, kind: int) -> Any:
        made = self._zmq.socket(kind)
        made.setsockopt(zmq.LINGER, 0)
        made.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
        made.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
        made.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        # A peer that vanished without a word is noticed, so that a new connection is made.
        made.setsockopt(zmq.HEARTBEAT_IVL, 5000)
        made.setsockopt(zmq.HEARTBEAT_TIMEOUT, 15000)
        return made


def _survive(call: Callable[[], None]) -> None:
    """What others do on this thread must not keep it from its own work."""
    try:
        call()
    except Exception:
        logger.exception("Control channel: an error was survived")


def _endpoint(address: Address) -> str:
    host = f"[{address.host}]" if ":" in address.host else address.host
    return f"tcp://{host}:{address.control_port}"
