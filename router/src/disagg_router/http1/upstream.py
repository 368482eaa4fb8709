"""The engine-facing side: connections to engines, kept alive in a pool, and the answers that they carry.

An answer's body is relayed as the bytes that arrived, chunk framing included: a chunk costs one `feed_data` of the
parser, which watches for the end of the body and for broken framing, and one `write` to the client. A connection
goes back to the pool only after an answer that ended where its framing says, with nothing behind it.
"""

from __future__ import annotations

import asyncio
import re
from typing import Literal, cast

import httptools

from disagg_router.http1.exchange import Exchange
from disagg_router.http1.message import Address, Headers

_MAX_HEAD = 65536
# What an answer may hold in memory before somebody relays or reads it on.
_MAX_UNREAD = 256 * 1024
Framing = Literal["raw", "decoded"]


class UpstreamError(Exception):
    """An engine could not be asked, or its answer broke off. The message says which and why."""


class ConnectError(UpstreamError):
    """No connection could be made."""


class StaleConnectionError(UpstreamError):
    """A kept-alive connection turned out to be dead before the engine answered anything on it."""


class BrokenAnswerError(UpstreamError):
    """The engine's answer is not HTTP/1.1, or ended before its own end."""


class Prelude:
    """What a stream of server-sent events may begin with before it is an answer.

    Comments (`: keep-alive`) say that the engine lives, and events of these names that it has taken the request; neither
    says that it has begun to answer.
    """

    def __init__(self, *events: bytes) -> None:
        self._starts = (b":", *(b"event: " + name + b"\n" for name in events))
        named = b"|".join(re.escape(start) for start in self._starts[1:])
        event = rb":[^\n]*\n+" + (rb"|(?:%s)(?:[^\n]+\n)*\n" % named if named else b"")
        self._whole = re.compile(rb"(?:%s)*" % event)

    def covers(self, body: bytes) -> bool:
        """Whether nothing else has come so far, the last event whole or not."""
        whole = self._whole.match(body)
        rest = body[whole.end() :] if whole else body
        return not rest or any(start.startswith(rest) or rest.startswith(start) for start in self._starts)


COMMENTS = Prelude()


def _payload(chunked: bytes) -> bytes:
    """What the chunks of a body hold, as far as it has come. The parser has seen that they are chunks."""
    at, parts = 0, []
    while (end := chunked.find(b"\r\n", at)) >= 0:
        size = int(chunked[at:end].partition(b";")[0], 16)
        parts.append(chunked[end + 2 : end + 2 + size])
        at = end + 2 + size + 2
    return b"".join(parts)


class EngineConnection(asyncio.Protocol):
    """One socket to an engine. It carries one `EngineAnswer` at a time."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self.answers = 0
        self.idle_since = 0.0
        self._transport: asyncio.Transport
        self._answer: EngineAnswer | None = None
        self._lost = False
        self._paused = False
        self._write_paused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is one by duck typing only

    def start(self, head: bytes, body: bytes, framing: Framing, prelude: Prelude = COMMENTS) -> EngineAnswer:
        """Send a request; the answer takes the bytes that come back."""
        self._answer = answer = EngineAnswer(self, framing, prelude)
        if self._lost:
            answer.connection_lost(None)
        else:
            self._transport.writelines((head, body))  # one system call, and one segment if both fit
        return answer

    def data_received(self, data: bytes) -> None:
        if self._answer is None:
            self._transport.abort()  # nothing was asked: whatever this is, it belongs to no answer
            self._lost = True
        else:
            self._answer.feed(data)

    def pause_writing(self) -> None:
        self._write_paused = True

    def resume_writing(self) -> None:
        self._write_paused = False

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True
        if self._answer is not None:
            self._answer.connection_lost(exc)

    def detach(self) -> None:
        """The answer is over; later bytes belong to nobody."""
        self._answer = None
        self.answers += 1
        self.resume()

    @property
    def usable(self) -> bool:
        """Open, and with the last request fully handed to the kernel."""
        return not self._lost and not self._write_paused and not self._transport.get_write_buffer_size()

    def pause(self) -> None:
        if not self._lost and not self._paused:
            self._paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        if not self._lost and self._paused:
            self._paused = False
            self._transport.resume_reading()

    def abort(self) -> None:
        """Close at once with a reset, so that the engine stops working on the request."""
        if not self._lost:
            self._transport.abort()
            self._lost = True


class EngineAnswer:
    """An engine's answer, from its head to its end.

    `begun` is done when the head and the first piece of the body behind its `prelude` (or the end) are here, or failed with
    an `UpstreamError`. `ended` is done when the body is complete, or failed with `BrokenAnswerError`. Until `relay` or `read`
    is called the body is kept, and the socket paused once too much of it is.
    """

    def __init__(self, connection: EngineConnection, framing: Framing, prelude: Prelude) -> None:
        loop = asyncio.get_running_loop()
        self.begun: asyncio.Future[None] = loop.create_future()
        self.ended: asyncio.Future[None] = loop.create_future()
        self.status = 0
        self.headers = Headers()
        # How often bytes came and how many: an idle check compares `reads` instead of arming a timer a chunk.
        self.reads = 0
        self.body_bytes = 0
        self.paused = False
        # Whether it ever was: its pieces then came as fast as the client read.
        self.stalled = False
        self.reusable = False
        self._taken = False
        self._connection = connection
        self._framing = framing
        self._prelude = prelude
        self._head: bytearray | None = bytearray()
        self._kept: list[bytes] = []
        self._kept_bytes = 0
        self._read_limit: int | None = None
        self._pieces: list[bytes] = []
        self._complete = False
        self._overrun = False
        self._client: Exchange | None = None
        self._parser = self._new_parser()

    def _new_parser(self) -> httptools.HttpResponseParser:
        # Callbacks that are not there cost nothing: raw framing needs none for the body.
        return httptools.HttpResponseParser(
            _DecodedEvents(self) if self._framing == "decoded" else _Events(self)
        )

    # -- bytes from the engine -------------------------------------------------------------------------------

    def feed(self, data: bytes) -> None:
        self.reads += 1
        try:
            if self._head is not None:
                data = self._feed_head(data)
                if self._head is not None:
                    return
            if data:
                self._parser.feed_data(data)
        except httptools.HttpParserError as exc:
            cause = exc.__context__
            if not isinstance(cause, BrokenAnswerError):
                cause = BrokenAnswerError(
                    f"{self._connection.address} sent an answer that is not HTTP/1.1: {exc}"
                )
            self._break(cause)
            return
        except BrokenAnswerError as exc:
            self._break(exc)
            return
        if self._overrun:
            self._break(
                BrokenAnswerError(f"{self._connection.address} sent bytes after the end of its answer")
            )
            return
        if self._framing == "decoded":
            data = b"".join(self._pieces)
            self._pieces.clear()
        if data:
            self.body_bytes += len(data)
            if self._client is not None:
                self._client.write(data)
            else:
                self._keep(data)
        if self._complete:
            self._finish()
        elif not self.begun.done() and not self._is_prelude():
            self.begun.set_result(None)

    def _feed_head(self, data: bytes) -> bytes:
        """Collect the head; return what follows it once it is whole. Interim (1xx) answers are skipped."""
        assert self._head is not None
        self._head += data
        while True:
            end = self._head.find(b"\r\n\r\n")
            if end < 0:
                if len(self._head) > _MAX_HEAD:
                    raise BrokenAnswerError(
                        f"{self._connection.address} sent a head of more than {_MAX_HEAD} bytes"
                    )
                return b""
            head, rest = bytes(self._head[: end + 4]), bytes(self._head[end + 4 :])
            self._parser.feed_data(head)
            if not 100 <= self.status < 200:
                self._head = None
                return rest
            if self.status == 101:
                raise BrokenAnswerError(
                    f"{self._connection.address} switched protocols, which nobody asked for"
                )
            self.headers = Headers()
            self._complete = self._overrun = False
            self._parser = self._new_parser()
            self._head = bytearray(rest)

    def add_header(self, name: bytes, value: bytes) -> None:
        if self._head is not None:  # else a trailer, which raw framing passes on by itself
            self.headers.add(name, value)

    def head_complete(self) -> None:
        self.status = status = self._parser.get_status_code()
        if 100 <= status < 200 or status in (204, 304):
            return
        framed = (
            self.headers.get(b"content-length") is not None
            or self.headers.get(b"transfer-encoding") is not None
        )
        if not framed:
            # A body that ends with its connection cannot be told from one that was cut.
            raise BrokenAnswerError(f"{self._connection.address} sent an answer without a length")

    def body_complete(self) -> None:
        self._complete = True
        self.reusable = self._parser.should_keep_alive()

    def overrun(self) -> None:
        self._overrun = True

    def add_piece(self, piece: bytes) -> None:
        self._pieces.append(piece)

    def _keep(self, data: bytes) -> None:
        self._kept.append(data)
        self._kept_bytes += len(data)
        if self._read_limit is None:
            if self._kept_bytes > _MAX_UNREAD:
                self.pause()
        elif self._kept_bytes > self._read_limit:
            self._break(
                BrokenAnswerError(
                    f"{self._connection.address} sent a body of more than {self._read_limit} bytes"
                )
            )

    def _is_prelude(self) -> bool:
        """Whether nothing that is an answer has come so far. What is too much to keep is taken for one."""
        if not self._kept:
            return True
        if self._kept_bytes > _MAX_UNREAD:
            return False
        if not (self.headers.get(b"content-type") or b"").startswith(b"text/event-stream"):
            return False
        body = b"".join(self._kept)
        if self._framing == "raw" and self.headers.get(b"transfer-encoding") is not None:
            body = _payload(body)
        return self._prelude.covers(body)

    def _finish(self) -> None:
        self.reusable = self.reusable and self._connection.usable
        self._connection.detach()
        if not self.begun.done():
            self.begun.set_result(None)
        if not self.ended.done():
            self.ended.set_result(None)
        if self._client is not None:
            self._client.end()

    def _break(self, error: UpstreamError) -> None:
        self._connection.abort()
        self._fail(error)

    def _fail(self, error: UpstreamError) -> None:
        self._connection.detach()
        for future in (self.begun, self.ended):
            if not future.done():
                future.set_exception(error)
                future.exception()  # whoever waits still gets it; nobody has to

    def connection_lost(self, exc: Exception | None) -> None:
        why = f": {exc}" if exc else ""
        address = self._connection.address
        if self.reads == 0 and self._connection.answers > 0:
            self._fail(StaleConnectionError(f"{address} had closed a kept-alive connection{why}"))
        else:
            got = f"after {self.body_bytes} bytes of its body" if self.status else "before it answered"
            self._fail(BrokenAnswerError(f"{address} closed the connection {got}{why}"))

    # -- towards the client ----------------------------------------------------------------------------------

    def relay(self, client: Exchange, head: bytes) -> None:
        """Send `head` and the body, what is here and what will come, to the client, and end the exchange.

        The exchange ends with the last write, not when somebody has noticed it: a quick client may send its next
        request in between. A body that breaks off does not end it; that is left to whoever awaits `ended`.
        """
        client.begin(b"".join((head, *self._kept)), self)
        self._kept.clear()
        self._client = client
        if self._complete:
            client.end()
        elif not client.paused:
            self.resume()

    async def read(self, limit: int) -> bytes:
        """The whole body. Raises BrokenAnswerError if it breaks off or exceeds `limit` bytes."""
        self._read_limit = limit
        self.resume()
        await self.ended
        return b"".join(self._kept)

    def first_bytes(self) -> bytes:
        """What has come of the body so far, as it came."""
        return b"".join(self._kept)

    def pause(self) -> None:
        self.paused = self.stalled = True
        self._connection.pause()

    def resume(self) -> None:
        self.paused = False
        self._connection.resume()

    def close(self) -> None:
        """Give the answer up and close its connection, unless that was taken: the engine sees its client go and stops."""
        if not self.ended.done():
            self._break(BrokenAnswerError(f"the request to {self._connection.address} was given up"))
        elif not self._taken:
            self._connection.abort()

    def take_connection(self) -> EngineConnection | None:
        """The connection, once, if another request may follow on it; None after an unclean end."""
        if not self.reusable or self._taken:
            return None
        self._taken = True
        return self._connection


class _Events:
    """Parser callbacks for a body that is passed on as it comes."""

    def __init__(self, answer: EngineAnswer) -> None:
        self._answer = answer
        self._ended = False

    def on_message_begin(self) -> None:
        if self._ended:
            self._answer.overrun()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._answer.add_header(name, value)

    def on_headers_complete(self) -> None:
        self._answer.head_complete()

    def on_message_complete(self) -> None:
        self._ended = True
        self._answer.body_complete()


class _DecodedEvents(_Events):
    """The same, for a body whose framing is taken off."""

    def on_body(self, body: bytes) -> None:
        self._answer.add_piece(body)
