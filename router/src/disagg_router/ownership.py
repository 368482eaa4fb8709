"""What replicas say to each other about handles (`handles`), and how a handle stays in one place. Pure.

A conversation's owner keeps its handle; other replicas send it there (`Put`) and ask for it (`Take`). Two uses of one handle
could be two readers of blocks that decode has reused in between, so:

* A handle is sent once, to one owner, and the sender keeps no copy. One that may have been lost on the way is lost.
* Every message is accepted once (`seal`) and by one process: it names the `boot` of the process it is for.
* The owner gives it out by removing it. An answer that does not arrive takes the handle with it.
* It ends by the owner's clock, and all replicas' clocks may differ: an answer says what the owner's clock shows, and since it
  was read before the answer came, what a sender makes of it is never late. So a message that was held up ends no later.

Replicas that see different replicas at a time look for a handle where it is not, which costs the time to compute.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import msgspec

from disagg_router.handles import Handle, Handles
from disagg_router.seal import Channel, Refusal, SealError

MESSAGE_BYTES = 1024 * 1024
"""More are neither sent nor read. A handle has a few bytes for every block: this is enough for a million tokens in most models."""

# What a replica has heard of another's clock counts for so long: clocks drift.
_HEARD_SECONDS = 60.0


class Hello(msgspec.Struct, tag="hello", tag_field="kind"):
    """Asks for `boot` and `now`."""


class Put(msgspec.Struct, tag="put", tag_field="kind"):
    """Keep this for the conversation, instead of what is older, until the receiver's clock shows `until`."""

    boot: bytes
    key: bytes
    until: float
    handle: Handle


class Take(msgspec.Struct, tag="take", tag_field="kind"):
    """Give out the conversation's handle."""

    boot: bytes
    key: bytes


Ask = Hello | Put | Take


class Answer(msgspec.Struct):
    """`boot` names the process that answers, `now` is its clock in seconds, `done` is false if it was meant for another process
    or came too late."""

    boot: bytes
    now: float
    done: bool = True
    handle: Handle | None = None


_ask = msgspec.json.Decoder(Ask)
_answer = msgspec.json.Decoder(Answer)

Dropped = Refusal | Literal["not_for_us", "late"]


class Owner:
    """Answers other replicas, for what this one keeps."""

    def __init__(
        self,
        store: Handles,
        channel: Channel,
        boot: bytes,
        clock: Callable[[], float],
        count_dropped: Callable[[Dropped], None],
    ) -> None:
        """`boot` must be new for every process."""
        self._store = store
        self._channel = channel
        self._boot = boot
        self._clock = clock
        self._count_dropped = count_dropped

    def answer(self, message: bytes) -> bytes | None:
        """What to say; None to whom is not to be talked to."""
        try:
            question = self._channel.asked(message)
            ask = _ask.decode(question.payload)
            answer = msgspec.json.encode(self._served(ask))
            return self._channel.answer(question, answer)
        except SealError as exc:
            self._count_dropped(exc.reason)
        except (msgspec.DecodeError, RecursionError):
            self._count_dropped("malformed")  # by a replica of another version
        return None

    def _served(self, ask: Ask) -> Answer:
        now = self._clock()
        answer = Answer(self._boot, now)
        if isinstance(ask, Hello):
            return answer
        if ask.boot != self._boot:
            self._count_dropped("not_for_us")
            answer.done = False
        elif isinstance(ask, Take):
            answer.handle = self._store.take(ask.key)
        elif now < ask.until:
            self._store.put(ask.key, ask.handle, min(ask.until, now + self._store.seconds))
        else:
            self._count_dropped("late")
            answer.done = False
        return answer


@dataclass(frozen=True, slots=True)
class Peer:
    """Another replica's process, as of its last answer. `ahead`: its clock shows so much more than ours, or still more."""

    boot: bytes
    ahead: float
    heard: float


class Peers:
    """What is known of other replicas, by their names."""

    def __init__(self, channel: Channel, clock: Callable[[], float]) -> None:
        self._channel = channel
        self._clock = clock
        self._peers: dict[str, Peer] = {}

    def find(self, name: str) -> Peer | None:
        """None if it has to be greeted first."""
        peer = self._peers.get(name)
        return peer if peer is not None and self._clock() - peer.heard < _HEARD_SECONDS else None

    def ask(self, what: Ask) -> tuple[int, bytes]:
        """The number of a question, and the message."""
        return self._channel.ask(msgspec.json.encode(what))

    def heard(self, name: str, number: int, message: bytes) -> Answer | None:
        """The replica's answer to that question; None if it is none or says no."""
        now = self._clock()
        try:
            answer = _answer.decode(self._channel.answered(number, message))
        except (SealError, msgspec.DecodeError, RecursionError):
            self.forget(name)
            return None
        self._peers[name] = Peer(answer.boot, answer.now - now, now)
        return answer if answer.done else None

    def forget(self, name: str) -> None:
        self._peers.pop(name, None)
