"""What the deciding parts need from the engine around them, and what they order from its workers.

Pure. The real implementations are in `compat` (vLLM's block pool and requests) and `control` (ZeroMQ);
tests put in their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

from disagg_connector.protocol import Address, Peer, Reply, Request

Clock = Callable[[], float]
"""Monotonic seconds."""

FinishKind = Literal["complete", "aborted", "other"]


class Token(NamedTuple):
    """Whom a request came from, its number there and its seal: what an answer needs."""

    source: bytes
    number: int
    seal: bytes = b""


class Pool(Protocol):
    """The engine's KV blocks, by id. Engine thread only, except `find`."""

    @property
    def total(self) -> int:
        """All blocks that requests can use."""

    def free(self) -> int:
        """Blocks that nobody uses now, cached ones included."""

    @property
    def pristine(self) -> bool:
        """Whether no block is used and none is cached."""

    def find(self, block_hash: bytes) -> int | None:
        """The cached block with this hash. Safe on any thread; only a hint off the engine's."""

    def held(self, hashes: Sequence[bytes]) -> tuple[list[int], list[object | None]]:
        """The cached blocks of a chain from its beginning to the first that is missing, and their stamps."""

    def stamps(self, blocks: Sequence[int]) -> list[object | None]:
        """For each block what stands for its content: the same object (`is`) for as long as the block stays cached
        without a break, None if it is not cached."""

    def pin(self, blocks: Sequence[int]) -> None:
        """Keep blocks from being freed or evicted, until `unpin`."""

    def unpin(self, blocks: Sequence[int]) -> None:
        """Undo one `pin` or `take`. Blocks are in the prefix's order: the last is evicted first."""

    def take(self, count: int, spare: int) -> list[int]:
        """Own this many blocks for peers to write into: such as hold nothing first, then of the prefix cache
        the cold end, but never its `spare` hottest blocks that requests have used. Not more than `free` less
        `spare` may be asked for."""

    def used(self, blocks: Sequence[int]) -> None:
        """A request has used these: where peers wrote them, they are worth as much now as any other."""

    def insert(self, block_hash: bytes, block: int, num_tokens: int) -> None:
        """Publish a block that is owned in the prefix cache; `num_tokens` is the prefix's length."""

    @property
    def tells(self) -> bool:
        """Whether anybody follows what is cached, by the engine's KV events."""

    def tell_stored(self, parent: bytes | None, hashes: Sequence[bytes], tokens: Sequence[int]) -> None:
        """Tell of consecutive blocks that were inserted, as the engine does of those that it caches itself. What
        `hashes` do not prove of `tokens` and of the `parent` block's hash is left out."""


class Channel(Protocol):
    """Control messages to and from peers."""

    def request(
        self,
        to: Address,
        message: Request,
        timeout: float,
        on_reply: Callable[[Reply | None], None],
        at_once: Callable[[Reply], None] | None = None,
    ) -> None:
        """Send; `on_reply` runs on the engine thread with the reply, or None after `timeout` seconds. Before that
        `at_once` runs with a reply on the channel's own thread, when it arrives."""

    def answer(self, token: Token, reply: Reply) -> None:
        """Reply to a request that arrived."""

    def probe(self, address: Address, on_refused: Callable[[], None]) -> None:
        """See whether anything listens there; `on_refused` runs on the engine thread if certainly not."""


@dataclass(frozen=True)
class Inbound:
    """A request from a peer, for the engine thread."""

    token: Token
    message: Request


@dataclass(frozen=True)
class Outcome:
    """Something that the engine thread asked for has an answer; call `run`."""

    run: Callable[[], None]


@dataclass(frozen=True)
class Dropped:
    """Messages that nobody will see, since the last of these events, by reason."""

    counts: Mapping[str, int]


Event = Inbound | Outcome | Dropped


class Inbox(Channel, Protocol):
    """A channel whose events are taken on the engine thread."""

    def drain(self) -> list[Event]:
        """What has arrived since the last call."""

    @property
    def has_events(self) -> bool: ...

    def wake_at(self, when: float | None) -> None:
        """Wake the engine thread at this time, in place of an earlier wish."""


class RequestView(Protocol):
    """A vLLM request, as far as the connector looks at it."""

    @property
    def id(self) -> str: ...

    @property
    def num_prompt_tokens(self) -> int: ...

    @property
    def num_tokens(self) -> int:
        """Prompt and generated tokens."""

    @property
    def num_valid_tokens(self) -> int:
        """Tokens whose KV was computed by a step that is over."""

    @property
    def hashes(self) -> Sequence[bytes]:
        """Of all full blocks."""

    def token_ids(self, start: int, end: int) -> Sequence[int]:
        """Of tokens `start` to `end`, prompt and generated ones."""

    def prompt_digest(self) -> bytes:
        """32 bytes that stand for the whole prompt, its partial block and extra keys included."""


@dataclass(frozen=True)
class WriteJob:
    """One transfer for every worker to write, each its own shard: local[i] into remote[i]."""

    xid: str
    peer: Peer
    local: tuple[int, ...]
    remote: tuple[int, ...]
    start_within: float
    """Seconds from now after which the write must not be started any more."""


@dataclass
class Posted:
    """What was started of a job: a write for each rank of the peer that gets something from this one."""

    handles: list[Any] = field(default_factory=list)
    """What to poll."""
    size: int = 0
    """Bytes."""
    whole: bool = True
    """False if a part of it was refused."""


@dataclass(frozen=True)
class Incoming:
    """A transfer that ranks of a peer write into this engine."""

    xid: str
    writers: int
    """The peer's tensor parallel size."""
    request: str = ""
    """The request that waits for it, if one does."""


@dataclass
class Orders:
    """What the workers are to do, one envelope a step."""

    writes: list[WriteJob] = field(default_factory=list)
    cancels: list[str] = field(default_factory=list)
    """Transfers not to be started."""
    expect: list[Incoming] = field(default_factory=list)
    ignore: list[str] = field(default_factory=list)
    """Incoming transfers that matter no more."""
    failed: list[str] = field(default_factory=list)
    """Requests to report as not loaded."""
    connect: list[Peer] = field(default_factory=list)
    """Peers to get to know in the background, so that the first write to them does not wait for that."""
    forget: list[str] = field(default_factory=list)
    """Engine ids of peers that are gone."""
    link: str = ""
    """Where a rank gets orders between steps (`direct`); it goes there once."""

    @property
    def empty(self) -> bool:
        return not (self.writes or self.cancels or self.expect or self.ignore or self.failed or self.forget)


@dataclass
class Tally:
    """What the ranks report of one outgoing transfer, summed."""

    done: int = 0
    """Ranks that are through with it, well or not."""
    failed: int = 0
    posted: int = 0
    """Ranks that started a write. Fewer than all where several ranks hold the same KV."""
    size: int = 0
    """Bytes written."""
    seconds: float = 0.0
    """From the start of the write to its completion, on the slowest rank."""

    def add(self, other: Tally) -> None:
        self.done += other.done
        self.failed += other.failed
        self.posted += other.posted
        self.size += other.size
        self.seconds = max(self.seconds, other.seconds)


@dataclass
class WorkerReport:
    """What the workers tell after a step."""

    sent: dict[str, Tally] = field(default_factory=dict)
    landed: dict[str, int] = field(default_factory=dict)
    """Incoming transfers, and on how many ranks NIXL has announced them, each by all who write there."""

    def merge(self, other: WorkerReport) -> None:
        """Add another rank's report."""
        for xid, tally in other.sent.items():
            self.sent.setdefault(xid, Tally()).add(tally)
        for xid, ranks in other.landed.items():
            self.landed[xid] = self.landed.get(xid, 0) + ranks

    @property
    def empty(self) -> bool:
        return not self.sent and not self.landed


@dataclass
class Steps:
    """Counts engine steps. A block hash is published before its KV is computed, so what was found in
    the prefix cache during step n may be read only when step n is over."""

    scheduled: int = 0
    processed: int = 0
