"""A network between simulated engines that carries messages when it is told to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from connector.tests.unit.sim_contents import Clock, ViolationError
from disagg_connector.ports import Event, Inbound, Outcome, Token
from disagg_connector.protocol import Address, Commit, Committed, Load, Offer, Reply, Request, decode, encode


@dataclass
class Message:
    """On its way; `deliver` is called once, or never."""

    source: str
    target: str
    text: str
    deliver: Callable[[], None]

    def deliver_once(self, network: Network) -> None:
        network.messages.remove(self)
        self.deliver()


class Network:
    """Holds messages until the test lets them through."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.channels: dict[Address, FakeChannel] = {}
        self.messages: list[Message] = []
        self.begun: dict[str, tuple[int, int]] = {}
        """Transfers, with the epochs in which they began of who asked and, as that one knew it, of who was asked."""
        self.refusing: set[Address] = set()

    def deliver_all(self, limit: int = 1000) -> None:
        while self.messages and limit:
            self.messages.pop(0).deliver()
            limit -= 1


class FakeChannel:
    """`ports.Channel` with an inbox, over `Network`. Messages are encoded as they really would be."""

    def __init__(self, name: str, network: Network) -> None:
        self.name = name
        self.network = network
        self.events: list[Event] = []
        self.waiting: dict[int, tuple[float, Callable[[Reply | None], None]]] = {}
        self.at_once: dict[int, Callable[[Reply], None]] = {}
        self.fast: Callable[[Request], Reply | None] = lambda message: None
        self.alarm: float | None = None
        self.probing: set[Address] = set()
        self.epoch: Callable[[], int] = lambda: 0
        self.senders: dict[Token, FakeChannel] = {}
        self.heard: dict[Token, Request] = {}
        self._seq = 0

    def request(
        self,
        to: Address,
        message: Request,
        timeout: float,
        on_reply: Callable[[Reply | None], None],
        at_once: Callable[[Reply], None] | None = None,
    ) -> None:
        self._seq += 1
        seq = self._seq
        self.waiting[seq] = (self.network.clock() + timeout, on_reply)
        if at_once is not None:
            self.at_once[seq] = at_once
        payload = encode(seq, message)
        self._check_epochs(message)

        def deliver() -> None:
            channel = self.network.channels.get(to)
            if channel is not None:
                channel.receive(Token(self.name.encode(), seq), payload, self)

        self.network.messages.append(Message(self.name, str(to), type(message).__name__, deliver))

    def receive(self, token: Token, payload: bytes, sender: FakeChannel) -> None:
        message = decode(payload).body
        assert isinstance(message, Request)
        self.senders[token] = sender
        self.heard[token] = message
        reply = self.fast(message)
        if reply is not None:
            self.answer(token, reply)
        else:
            self.events.append(Inbound(token, message))

    def answer(self, token: Token, reply: Reply) -> None:
        sender, payload = self.senders[token], encode(token[1], reply)
        message = self.heard[token]
        if isinstance(message, Commit) and isinstance(reply, Committed) and reply.inserted:
            self.check_epoch(message.xid, 1)

        def deliver() -> None:
            frame = decode(payload)
            pending = sender.waiting.pop(frame.seq, None)
            if pending is not None:
                body = frame.body
                assert isinstance(body, Reply)
                at_once = sender.at_once.pop(frame.seq, None)
                if at_once is not None:
                    at_once(body)
                sender.events.append(Outcome(lambda: pending[1](body)))

        self.network.messages.append(Message(self.name, sender.name, type(reply).__name__, deliver))

    def _check_epochs(self, message: Request) -> None:
        if isinstance(message, Load | Offer):
            self.network.begun[message.xid] = (self.epoch(), message.epoch)
        if isinstance(message, Commit) and message.ok:
            self.check_epoch(message.xid, 0)

    def check_epoch(self, xid: str, end: int) -> None:
        """A transfer is being taken up: this engine must be in the epoch in which it was when that began."""
        if xid in self.network.begun and self.network.begun[xid][end] != self.epoch():
            raise ViolationError(f"{self.name}: {xid} began in epoch {self.network.begun[xid][end]}")

    def probe(self, address: Address, on_refused: Callable[[], None]) -> None:
        """One look at an address at a time, as `ControlChannel` takes it."""
        if address in self.network.refusing and address not in self.probing:
            self.probing.add(address)
            self.events.append(Outcome(on_refused))

    def drain(self) -> list[Event]:
        now = self.network.clock()
        for seq, (expires, on_reply) in list(self.waiting.items()):
            if now >= expires:
                del self.waiting[seq]
                self.events.append(Outcome(lambda on_reply=on_reply: on_reply(None)))  # type: ignore[misc]
        events, self.events = self.events, []
        self.probing.clear()
        return events

    @property
    def has_events(self) -> bool:
        now = self.network.clock()
        return bool(self.events) or any(now >= expires for expires, _ in self.waiting.values())

    def wake_at(self, when: float | None) -> None:
        self.alarm = when
