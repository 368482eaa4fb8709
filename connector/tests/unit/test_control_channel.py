"""The control channel over real sockets on loopback."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from typing import Any

import pytest
import zmq

from disagg_connector.auth import Codec, KeyRing, PlainCodec, SealingCodec
from disagg_connector.config import ConnectorConfig
from disagg_connector.context import Board
from disagg_connector.control import INBOX_LIMIT, ControlChannel
from disagg_connector.ports import Dropped, Event, Inbound, Outcome
from disagg_connector.protocol import (
    MAX_MESSAGE_BYTES,
    RESTARTED,
    Accepted,
    Address,
    Cancel,
    Hello,
    Offer,
    Peer,
    Refused,
    Released,
    Reply,
    Request,
    decode,
    encode,
)
from disagg_connector.scheduler import FastAnswers, Identity
from e2e.ports import free_port

LIMIT = 120
"""Seconds for what is to come."""

RING = KeyRing(b"c" * 32, b"p" * 32, b"n" * 32)


def sealing(ring: KeyRing = RING) -> SealingCodec:
    return SealingCodec(lambda: ring)


def free_address() -> Address:
    return Address("127.0.0.1", free_port())


class End:
    """A channel, and an engine thread's way of using it."""

    def __init__(
        self, codec: Callable[[], Codec] = sealing, address: Address | None = None, *, start: bool = True
    ) -> None:
        self.address = address or free_address()
        self.codec = codec
        self.woken = threading.Event()
        self.dropped: Counter[str] = Counter()
        self.fast: Callable[[Request], Reply | None] = lambda message: None
        self.channel = ControlChannel(
            self.address, lambda message: self.fast(message), self.woken.set, codec()
        )
        if start:
            self.channel.start()

    def ask(self, to: Address, message: Request | None = None, timeout: float = LIMIT) -> Reply | None:
        """The answer to one request."""
        replies: list[Reply | None] = []
        self.channel.request(to, message or Hello(1), timeout, replies.append)
        self.collect(lambda _: bool(replies), timeout + 5)
        return replies[0]

    def next(self, limit: float = LIMIT) -> Inbound:
        """The next request from a peer; outcomes are run on the way."""
        found = self.collect(lambda inbound: bool(inbound), limit)
        return found[0]

    def collect(self, enough: Callable[[list[Inbound]], bool], limit: float = LIMIT) -> list[Inbound]:
        inbound: list[Inbound] = []
        deadline = time.monotonic() + limit
        while True:
            self.woken.clear()
            for event in self.channel.drain():
                match event:
                    case Outcome():
                        event.run()
                    case Dropped():
                        self.dropped.update(event.counts)
                    case Inbound():
                        inbound.append(event)
            if enough(inbound):
                return inbound
            left = deadline - time.monotonic()
            assert left > 0, "nothing came"
            self.woken.wait(left)

    def close(self) -> None:
        self.channel.close()


@pytest.fixture(params=[PlainCodec, sealing], ids=["plain", "sealed"])
def ends(request: pytest.FixtureRequest) -> Iterator[tuple[End, End]]:
    """Two ends that believe each other."""
    with closing(End(request.param)) as one, closing(End(request.param)) as other:
        yield one, other


@pytest.fixture
def server() -> Iterator[End]:
    """Answers `Hello` itself and leaves the rest to the engine thread."""
    with closing(End()) as end:
        end.fast = lambda message: Accepted() if isinstance(message, Hello) else None
        yield end


def peer(engine_id: str) -> Peer:
    return Peer(engine_id, Address("10.0.0.1", 5700), "10.0.0.1", 5600, 1, "fingerprint")


@contextmanager
def raw(address: Address) -> Iterator[Any]:
    """A socket that says whatever the test wants."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    client = context.socket(zmq.DEALER)
    client.setsockopt(zmq.LINGER, 0)
    client.connect(f"tcp://{address}")
    try:
        yield client
    finally:
        client.close()
        context.term()


def test_a_request_is_answered_by_the_engine_thread(ends: tuple[End, End]) -> None:
    one, other = ends
    replies: list[Reply | None] = []
    one.channel.request(other.address, Cancel("e", "x", ""), LIMIT, replies.append)
    inbound = other.next()
    assert inbound.message == Cancel("e", "x", "")
    other.channel.answer(inbound.token, Released(wrote=True))
    one.collect(lambda _: bool(replies))
    assert replies == [Released(wrote=True)]


def test_fast_answers_do_not_need_the_engine_thread(ends: tuple[End, End]) -> None:
    one, other = ends
    other.fast = lambda message: Accepted()
    replies: list[Reply | None] = []
    one.channel.request(other.address, Hello(1), LIMIT, replies.append)
    one.collect(lambda _: bool(replies))
    assert replies == [Accepted()]
    assert not other.channel.has_events


def test_answers_may_come_in_another_order(ends: tuple[End, End]) -> None:
    one, other = ends
    replies: dict[str, Reply | None] = {}

    def ask(name: str) -> None:
        one.channel.request(other.address, Cancel("e", name, ""), LIMIT, partial(replies.__setitem__, name))

    ask("a")
    ask("b")
    first, second = other.collect(lambda inbound: len(inbound) == 2)
    other.channel.answer(second.token, Refused("second", "e"))
    other.channel.answer(first.token, Refused("first", "e"))
    one.collect(lambda _: len(replies) == 2)
    assert replies == {"a": Refused("first", "e"), "b": Refused("second", "e")}


def test_nobody_there_is_a_timeout(ends: tuple[End, End]) -> None:
    replies: list[Reply | None] = []
    ends[0].channel.request(free_address(), Hello(1), 0.2, replies.append)
    ends[0].collect(lambda _: bool(replies))
    assert replies == [None]


def test_a_peer_that_starts_later_is_reached(ends: tuple[End, End]) -> None:
    one, other = ends
    address = other.address
    other.close()
    lost: list[Reply | None] = []
    one.channel.request(address, Hello(1), 0.2, lost.append)
    one.collect(lambda _: bool(lost))
    later = End(one.codec, address)
    later.fast = lambda message: Accepted()
    try:
        replies: list[Reply | None] = [None]

        def ask() -> None:
            count = len(replies)
            one.channel.request(address, Hello(1), 0.5, replies.append)
            one.collect(lambda _: len(replies) > count)

        while replies[-1] is None and len(replies) < 200:
            ask()
        assert replies[-1] == Accepted()
    finally:
        later.close()


def test_garbage_neither_blocks_nor_ends_the_channel(server: End) -> None:
    key, other = sealing(), sealing(KeyRing(b"x" * 32))
    whole = key.write_request(1, Hello(1))
    junk = {
        "malformed": [whole[:40], whole[:4] + b"\x63" + whole[5:]],
        "unauthenticated": [b"", os.urandom(64), b"\x91" * 9000, encode(1, Hello(1))],
        "unknown_key": [other.write_request(1, Hello(1))],
        "forged": [whole[:-2], whole + b"x", key.write_reply(whole[5:29], 1, Accepted())],
        "replayed": [whole],
    }
    with raw(server.address) as client:
        client.send(whole)
        for messages in junk.values():
            for message in messages:
                client.send(message)
        client.send_multipart([b"one", b"two", b"three"])
        client.send(key.write_request(5, Hello(1)))
        for number in (1, 5):
            assert client.poll(LIMIT * 1000), f"no answer to message {number}"
            assert key.read_reply(client.recv()) == (number, Accepted())
        client.send(b"\x00" * (MAX_MESSAGE_BYTES + 10))
    expected = {reason: len(messages) for reason, messages in junk.items()}
    expected["malformed"] += 1
    server.collect(lambda _: server.dropped == expected)


def test_what_is_not_zeromq_disturbs_nobody(server: End) -> None:
    where = (server.address.host, server.address.control_port)
    with socket.create_connection(where) as silent, socket.create_connection(where) as rude:
        silent.sendall(b"\xff")  # the beginning of a greeting that never goes on
        rude.sendall(os.urandom(2000))
        with closing(End()) as asker:
            assert asker.ask(server.address) == Accepted()


def test_garbage_on_a_channel_without_secrets_is_dropped_too() -> None:
    with closing(End(PlainCodec)) as server, raw(server.address) as client:
        server.fast = lambda message: Accepted()
        sealed = sealing().write_request(1, Hello(1))
        for junk in (
            b"",
            os.urandom(64),
            b"\x91" * 9000,
            encode(1, Hello(1))[:-2],
            encode(1, Accepted()),
            sealed,
        ):
            client.send(junk)
        client.send(encode(5, Hello(1)))
        assert client.poll(LIMIT * 1000)
        assert decode(client.recv()).seq == 5
        server.collect(lambda _: server.dropped == {"malformed": 6})


@pytest.mark.parametrize(
    "stranger",
    [PlainCodec, lambda: sealing(KeyRing(b"x" * 32))],
    ids=["without a secret", "with another secret"],
)
def test_a_stranger_is_not_answered(server: End, stranger: Callable[[], Codec]) -> None:
    with closing(End(stranger)) as other:
        assert other.ask(server.address, timeout=0.5) is None
        assert server.ask(other.address, timeout=0.5) is None
    server.collect(lambda _: bool(server.dropped))
    assert set(server.dropped) <= {"unauthenticated", "unknown_key"}


def test_a_reply_from_whom_was_not_asked_is_not_taken(server: End) -> None:
    """A holder of the key that is not the peer meant, with the number of a request that waits."""
    with closing(End()) as liar:
        liar.channel.answer = lambda token, reply: None  # type: ignore[method-assign]
        replies: list[Reply | None] = []
        server.channel.request(free_address(), Hello(1), LIMIT, lambda reply: replies.append(reply))
        server.channel.request(liar.address, Hello(1), LIMIT, lambda reply: replies.append(reply))
        token = liar.next().token
        ControlChannel.answer(liar.channel, token._replace(number=1), Refused("lie", "liar"))
        ControlChannel.answer(liar.channel, token, Accepted())
        server.collect(lambda _: bool(replies))
    assert replies == [Accepted()]


def test_what_was_recorded_before_a_restart_is_refused() -> None:
    """The guard of the new boot knows no numbers, but all that changes anything names the old boot."""
    sender, address = sealing(), free_address()
    recorded = sender.write_request(7, Cancel("first-boot", "x", ""))

    with closing(End(address=address)) as first, raw(address) as client:
        client.send(recorded)
        assert first.next().message == Cancel("first-boot", "x", "")
    identity = Identity(lambda: None, lambda digest: peer("second-boot"))
    with closing(End(address=address)) as second, raw(address) as client:
        second.fast = FastAnswers(
            ConnectorConfig(role="prefill"), "second-boot", identity, Board(time.monotonic)
        )
        client.send(recorded)
        assert client.poll(LIMIT * 1000)
        assert sender.read_reply(client.recv()) == (7, Refused(RESTARTED, "second-boot"))
        assert not second.channel.has_events


FLOOD = 50_000


def test_a_flood_of_strangers_leaves_peers_their_answers(server: End) -> None:
    junk = [os.urandom(100), encode(1, Hello(1)), sealing().write_request(1, Hello(1))[:-1] + b"x"]
    sent, asked = threading.Event(), threading.Event()

    def flood() -> None:
        with raw(server.address) as client:
            for number in range(FLOOD):
                client.send(junk[number % len(junk)])
                if number == FLOOD // 2:
                    asked.wait(LIMIT)
            client.send(sealing().write_request(1, Hello(1)))
            if client.poll(LIMIT * 1000):
                sent.set()

    flooding = threading.Thread(target=flood)
    flooding.start()
    with closing(End()) as asker:
        while flooding.is_alive():
            assert asker.ask(server.address) == Accepted()
            asked.set()
    flooding.join()
    assert sent.is_set(), "the last message of the flood was not answered"
    # Nothing of it has reached the engine thread but the number of what was dropped, once a second.
    inbound = server.collect(lambda _: server.dropped.total() == FLOOD)
    assert inbound == []


def test_the_engine_thread_takes_a_flood_of_peers_in_parts(server: End) -> None:
    """50,000 authentic requests while the engine thread is busy: bounded, and the rest is dropped and counted."""
    codec = sealing()
    with raw(server.address) as client:
        for number in range(FLOOD):
            client.send(codec.write_request(2 * number + 1, Cancel("e", "x", "")))
        client.send(codec.write_request(2 * FLOOD + 1, Hello(1)))
        assert client.poll(LIMIT * 1000), "the channel has come to the end of the flood"
    most, taken, events = 0, 0, list[Event]()
    while server.channel.has_events:
        events = server.channel.drain()
        most = max(most, len(events))
        taken += sum(isinstance(event, Inbound) for event in events)
        server.dropped.update({k: n for e in events if isinstance(e, Dropped) for k, n in e.counts.items()})
    assert most <= 500
    assert taken == INBOX_LIMIT
    server.collect(lambda _: taken + server.dropped["overload"] == FLOOD)


def test_few_large_requests_are_bounded_by_their_bytes(server: End) -> None:
    codec = sealing()
    large = Offer("e", 0, "x", peer("e"), [b"h" * 32] * 200_000, 0, "")
    with raw(server.address) as client:
        for number in range(1, 21):
            client.send(codec.write_request(number, large))
        client.send(codec.write_request(100, Hello(1)))
        assert client.poll(LIMIT * 1000)
    inbound = server.collect(lambda _: server.dropped["overload"] >= 10)
    # Ten of 6.8 MB are more than 64 MiB.
    assert (len(inbound), server.dropped["overload"]) == (10, 10)


def test_a_peer_that_does_not_read_its_answers_blocks_nobody(server: End) -> None:
    codec = sealing()
    with raw(server.address) as deaf:
        deaf.setsockopt(zmq.RCVHWM, 1)
        for number in range(1, 20_001):
            deaf.send(codec.write_request(number, Hello(1)))
        with closing(End()) as asker:
            assert asker.ask(server.address) == Accepted()


def test_an_error_in_an_answer_leaves_the_channel_working(ends: tuple[End, End]) -> None:
    one, other = ends

    def broken(message: Request) -> Reply:
        raise RuntimeError("a bug")

    other.fast = broken
    replies: list[Reply | None] = []
    one.channel.request(other.address, Hello(1), 0.3, replies.append)
    one.collect(lambda _: bool(replies))
    assert replies == [None]
    other.fast = lambda message: Accepted()
    one.channel.request(other.address, Hello(1), LIMIT, replies.append)
    one.collect(lambda _: len(replies) == 2)
    assert replies[1] == Accepted()


def test_a_reply_is_shown_at_once_on_the_channels_thread(ends: tuple[End, End]) -> None:
    one, other = ends
    other.fast = lambda message: Accepted()
    shown = threading.Event()
    replies: list[Reply | None] = []

    def at_once(reply: Reply) -> None:
        assert reply == Accepted()
        assert threading.current_thread().name == "disagg-control"
        shown.set()

    one.channel.request(other.address, Hello(1), LIMIT, replies.append, at_once)
    assert shown.wait(LIMIT), "the inbox has not been drained"
    assert not replies
    one.collect(lambda _: bool(replies))
    assert replies == [Accepted()]


def test_nothing_is_shown_at_once_where_no_reply_comes(ends: tuple[End, End]) -> None:
    one, _ = ends
    shown: list[Reply] = []
    replies: list[Reply | None] = []
    one.channel.request(free_address(), Hello(1), 0.2, replies.append, shown.append)
    one.collect(lambda _: bool(replies))
    assert replies == [None]
    assert not shown


def test_an_error_of_who_looks_at_once_does_not_swallow_the_reply(ends: tuple[End, End]) -> None:
    one, other = ends
    other.fast = lambda message: Accepted()
    replies: list[Reply | None] = []

    def broken(reply: Reply) -> None:
        raise RuntimeError("no")

    one.channel.request(other.address, Hello(1), LIMIT, replies.append, broken)
    one.collect(lambda _: bool(replies))
    assert replies == [Accepted()]


def test_other_sockets_are_watched_until_that_is_ended() -> None:
    with closing(End(start=False)) as end:
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with mine, theirs:
            read: list[bytes] = []
            enough = threading.Event()

            def take() -> None:
                read.append(mine.recv(100))  # messages stay apart
                if read[-1] == b"bad":
                    raise RuntimeError("no")
                if read[-1] == b"last":
                    end.channel.watch(mine.fileno(), None)
                    enough.set()

            end.channel.watch(mine.fileno(), take)
            end.channel.start()
            for words in (b"first", b"bad", b"last", b"unheard"):
                theirs.send(words)
            assert enough.wait(LIMIT)
            end.fast = lambda message: Accepted()
            assert end.ask(end.address) == Accepted(), "the thread has gone round meanwhile"
            assert read == [b"first", b"bad", b"last"]


def test_the_alarm_wakes_the_engine_thread(ends: tuple[End, End]) -> None:
    channel, woken = ends[0].channel, ends[0].woken
    channel.wake_at(time.monotonic() + 0.05)
    assert woken.wait(LIMIT)
    assert channel.has_events


def test_a_later_alarm_comes_in_its_time_though_nothing_rings_for_it(ends: tuple[End, End]) -> None:
    """The thread looks once a second, so only an alarm that is nearer wakes it to say so."""
    channel, woken = ends[0].channel, ends[0].woken
    start = time.monotonic()
    channel.wake_at(start + 60)
    channel.wake_at(start + 1.2)
    assert woken.wait(LIMIT)
    assert time.monotonic() >= start + 1.2


def test_a_refused_connection_is_told_and_silence_is_not(ends: tuple[End, End]) -> None:
    one, other = ends
    refused: list[str] = []
    one.channel.probe(other.address, lambda: refused.append("listening"))
    one.channel.probe(free_address(), lambda: refused.append("nobody"))
    one.collect(lambda _: bool(refused))
    assert refused == ["nobody"]


def test_an_address_is_probed_again_when_there_are_threads_again(
    ends: tuple[End, End], monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    one, nobody, refused = ends[0], free_address(), []
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        one.channel.probe(nobody, lambda: refused.append("without a thread"))
    one.channel.probe(nobody, lambda: refused.append("with one"))
    one.collect(lambda _: bool(refused))
    assert refused == ["with one"]


def test_a_taken_port_is_explained() -> None:
    with closing(End()) as end, pytest.raises(OSError, match="cannot listen"):
        ControlChannel(end.address, lambda message: None, lambda: None, sealing())
