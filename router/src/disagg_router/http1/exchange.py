"""One request and its answer, between the connection it came on, its handler, and the source of its body."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from disagg_router.http1.message import Request, Response, response_head


class Source(Protocol):
    """Where relayed bytes come from; it is paused while the client does not read."""

    def pause(self) -> None: ...

    def resume(self) -> None: ...


class Connection(Protocol):
    """What an exchange needs of the client's connection."""

    @property
    def write_paused(self) -> bool:
        """Whether the client does not read as fast as it is sent to."""

    @property
    def closes_after_answer(self) -> bool:
        """Whether no other request will be served on it."""

    def answer_complete(self, exchange: Exchange) -> None:
        """Get ready for the next request, or close."""

    def break_off(self, exchange: Exchange) -> None:
        """Close so that the client cannot take what it got for a whole answer."""


class Exchange:
    """One request and its answer. The handler calls `respond`, or `begin`, `write`... and `end` or `abort`."""

    __slots__ = ("_connection", "_source", "finished", "keep_alive", "request", "started", "write")

    def __init__(self, connection: Connection, request: Request, write: Callable[[bytes], None]) -> None:
        self._connection = connection
        self._source: Source | None = None
        self.request = request
        self.keep_alive = request.head.keep_alive
        self.started = False
        self.finished = False
        # The transport's own method, without a wrapper: it is called once for every chunk of every stream.
        self.write = write

    def respond(self, response: Response) -> None:
        """Send a whole answer."""
        keep_alive = self.may_keep_alive()
        head = response_head(response, keep_alive)
        self.started = True
        self.keep_alive = keep_alive
        self.write(head if self.request.head.method == "HEAD" else head + response.body)
        self.end()

    def may_keep_alive(self) -> bool:
        """Whether the connection can serve another request: decides the `Connection` field of the answer."""
        return self.keep_alive and not self._connection.closes_after_answer

    def begin(self, head: bytes, source: Source) -> None:
        """Send the head of an answer whose body `source` will write, and pause `source` while the client stalls."""
        self.started = True
        self._source = source
        self.write(head)

    @property
    def paused(self) -> bool:
        """Whether the client is not reading as fast as it is sent to."""
        return self._connection.write_paused

    def end(self) -> None:
        """The answer is complete."""
        self.finished = True
        self._source = None
        self._connection.answer_complete(self)

    def abort(self) -> None:
        """Break the answer off so that the client sees it broken."""
        self.finished = True
        self._source = None
        self._connection.break_off(self)

    def pause_source(self) -> None:
        if self._source is not None:
            self._source.pause()

    def resume_source(self) -> None:
        if self._source is not None:
            self._source.resume()
