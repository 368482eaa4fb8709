"""The client-facing side: one `ServerConnection` a socket.

Rules, in the order in which a request meets them:

- Heads are parsed strictly (llhttp without leniencies): a request with both Content-Length and Transfer-Encoding,
  with two Content-Lengths, or with a body framing that does not add up is a 400 and the end of the connection.
- A request is refused as early as its head allows (`admit`, size limits), before its body is read and before
  `100 Continue` is sent.
- One request at a time: bytes that arrive while a request is being answered (pipelining) are discarded, and the
  connection closes after the answer, so that nothing is ever answered out of order or on behalf of another.
- The end of the client's stream counts as the client being gone, also when only its sending half is closed: the
  handler is cancelled at once, so that engines do not work for nobody.
- A client that stops reading pauses the engine's socket; after `stall_seconds` its turn is given up.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import struct
from collections.abc import Callable, Coroutine
from fcntl import ioctl
from socket import IPPROTO_TCP, SO_LINGER, SOL_SOCKET, TCP_INFO
from termios import TIOCOUTQ
from typing import Any, cast

import httptools

from disagg_router.http1.exchange import Exchange
from disagg_router.http1.message import Headers, HttpLimits, Request, RequestHead, Response, response_head

_log = logging.getLogger(__name__)

# Their bodies mean nothing (RFC 9110 section 9.3): they are read, within the same limits, and dropped.
_BODILESS = frozenset({"GET", "HEAD", "OPTIONS"})

# Where `tcpi_bytes_acked` is in Linux's `struct tcp_info` (linux/tcp.h).
_BYTES_ACKED = 120


class _State(enum.Enum):
    IDLE = "between requests"
    HEAD = "reading a head"
    BODY = "reading a body"
    BUSY = "answering"
    LINGER = "refused; discarding what still comes"
    CLOSED = "closed"


# What is written then is an answer, which a client has to read.
_ANSWERS = (_State.BUSY, _State.IDLE)


class _RefusedError(Exception):
    """Ends parsing: the request is answered with `response` and the connection closed."""

    def __init__(self, response: Response) -> None:
        super().__init__(response.status)
        self.response = response


class Connections:
    """The open connections of a server."""

    def __init__(self) -> None:
        self._open: set[ServerConnection] = set()
        self._none_open = asyncio.Event()
        self._none_open.set()
        # While set, every answer closes its connection, so that clients move elsewhere.
        self.retiring = False
        # While set, nobody listens any more, and whoever comes late, from a handshake, is not waited for.
        self.draining = False

    def __len__(self) -> int:
        return len(self._open)

    def add(self, connection: ServerConnection) -> None:
        self._open.add(connection)
        self._none_open.clear()

    def discard(self, connection: ServerConnection) -> None:
        self._open.discard(connection)
        if not self._open:
            self._none_open.set()

    async def drain(self, seconds: float) -> None:
        """Close idle connections now and the others after their answer; wait for that, `seconds` at most."""
        self.retiring = self.draining = True
        for connection in list(self._open):
            connection.drain()
        try:
            async with asyncio.timeout(seconds):
                await self._none_open.wait()
        except TimeoutError:
            pass

    def kill(self) -> int:
        """Cut whatever is open; returns how many that were."""
        open_now = list(self._open)
        for connection in open_now:
            connection.kill()
        return len(open_now)


Handler = Callable[[Exchange], Coroutine[Any, Any, None]]
Admit = Callable[[RequestHead], Response | None]


class ServerConnection(asyncio.Protocol):
    """One client socket.

    `admit` sees every request's head and may refuse it; `handler` answers the whole request and is cancelled when
    the client goes. `error` renders the core's own refusals as (status, message, headers of the request so far) -> Response.
    """

    def __init__(
        self,
        handler: Handler,
        admit: Admit,
        error: Callable[[int, str, Headers], Response],
        limits: HttpLimits,
        open_connections: Connections,
    ) -> None:
        self._handler = handler
        self._admit = admit
        self._error = error
        self._limits = limits
        self._open = open_connections
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport
        self._parser = httptools.HttpRequestParser(self)
        self._state = _State.IDLE
        self._task: asyncio.Task[None] | None = None
        self._exchange: Exchange | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.write_paused = False
        self._closes_after_answer = False
        self._reset()

    def _reset(self) -> None:
        self._fed = 0
        self._head_size = 0
        self._url = b""
        self._upgrade_offered = False
        self._headers = Headers()
        self._head: RequestHead | None = None
        self._body: list[bytes] = []
        self._body_size = 0

    @property
    def closes_after_answer(self) -> bool:
        return self._closes_after_answer or self._open.retiring

    # -- the socket ------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is one by duck typing only
        self._open.add(self)
        self._arm(self._limits.keep_alive_seconds, self._close)
        if self._open.draining:
            self._close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._state = _State.CLOSED
        self._open.discard(self)
        self._disarm()
        if self._task is not None:
            self._task.cancel("the client is gone")

    def eof_received(self) -> bool:
        if self._task is not None:
            self._task.cancel("the client is gone")
        return False

    def data_received(self, data: bytes) -> None:
        if self._state is _State.BUSY:
            # Stray line ends after a body are harmless (RFC 9112 section 2.2); anything else is pipelining.
            if data.strip(b"\r\n"):
                self._closes_after_answer = True
            return
        if self._state in (_State.LINGER, _State.CLOSED):
            return
        if self._state is _State.IDLE:
            if self.write_paused:
                # It cannot have read the answer before: pipelining, too. Who does that and never reads would fill the memory.
                if data.strip(b"\r\n"):
                    self._close()
                return
            self._state = _State.HEAD
            self._arm(self._limits.request_seconds, self._too_slow)
        self._fed += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as exc:
            self._ignore_upgrade(data[exc.args[0] :])
        except httptools.HttpParserError as exc:
            if self._state is _State.BUSY:
                self._closes_after_answer = True
            elif isinstance(exc.__context__, _RefusedError):
                self._refuse(exc.__context__.response)
            else:
                self._refuse(self._refusal(400, f"the request is not valid HTTP/1.1: {exc}"))
        else:
            if self._state is _State.HEAD and self._fed > self._limits.head_bytes:
                self._refuse(self._too_large_head())

    def pause_writing(self) -> None:
        self.write_paused = True
        if self._exchange is not None:
            self._exchange.pause_source()
        if self._state in _ANSWERS:
            self._arm(self._limits.stall_seconds, self._stalled)

    def resume_writing(self) -> None:
        self.write_paused = False
        if self._state in _ANSWERS:  # else what is armed bounds the end of the connection
            self._disarm()
        if self._exchange is not None:
            self._exchange.resume_source()
        elif self._state is _State.IDLE:
            self._arm(self._limits.keep_alive_seconds, self._close)

    # -- parser callbacks ------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._state is _State.BUSY:
            raise _RefusedError(self._refusal(400, "pipelining is not supported"))

    def on_url(self, url: bytes) -> None:
        self._url += url
        self._count_head(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_head(len(name) + len(value) + 4)
        if self._head is None:  # else a trailer: bounded like the head, and dropped
            self._headers.add(name, value)
            if len(self._headers.items) > self._limits.header_fields:
                raise _RefusedError(self._too_large_head())

    def on_headers_complete(self) -> None:
        if self._parser.get_method() == b"CONNECT":
            raise _RefusedError(self._refusal(400, "this is not a proxy for CONNECT"))
        self._upgrade_offered = self._parser.should_upgrade()
        if self._upgrade_offered:
            return
        self._head = head = self._checked_head()
        self._state = _State.BODY
        refusal = self._admit(head)
        if refusal is not None:
            raise _RefusedError(refusal)
        length = head.headers.get(b"content-length")
        if length is not None and int(length) > self._limits.body_bytes:
            raise _RefusedError(self._too_large_body())
        expect = head.headers.get(b"expect")
        if expect is not None:
            if expect.lower() != b"100-continue":
                raise _RefusedError(
                    self._refusal(417, "the only expectation that is understood is 100-continue")
                )
            if head.headers.get(b"transfer-encoding") is not None or (length is not None and int(length) > 0):
                self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        self._body_size += len(body)
        if self._body_size > self._limits.body_bytes:
            raise _RefusedError(self._too_large_body())
        if self._head is not None and self._head.method not in _BODILESS:
            self._body.append(body)

    def on_message_complete(self) -> None:
        if self._upgrade_offered:
            return
        assert self._head is not None
        request = Request(self._head, b"".join(self._body))
        self._reset()
        self._disarm()
        if self.write_paused:
            self._arm(self._limits.stall_seconds, self._stalled)
        self._state = _State.BUSY
        self._exchange = exchange = Exchange(self, request, self._transport.write)
        self._task = self._loop.create_task(self._answer(exchange))

    def _ignore_upgrade(self, rest: bytes) -> None:
        """Serve a request that offers another protocol (RFC 9110 section 7.8 lets a server ignore the offer).

        The parser takes the offer for accepted and leaves the body alone, so the head is parsed again without it.
        Java's HTTP client offers h2c with every first request on a connection.
        """
        method, url = self._parser.get_method(), self._url
        version = self._parser.get_http_version().encode()
        fields = [item for item in self._headers.items if item[0] not in (b"upgrade", b"http2-settings")]
        self._parser = httptools.HttpRequestParser(self)
        self._reset()
        lines = [method + b" " + url + b" HTTP/" + version]
        for name, value in fields:
            if name == b"connection":
                value = b"close" if b"close" in value.lower() else b"keep-alive"
            lines.append(name + b": " + value)
        self.data_received(b"\r\n".join(lines) + b"\r\n\r\n" + rest)

    # -- what the head must hold -----------------------------------------------------------------------------

    def _count_head(self, size: int) -> None:
        self._head_size += size
        if self._head_size > self._limits.head_bytes:
            raise _RefusedError(self._too_large_head())

    def _checked_head(self) -> RequestHead:
        version = self._parser.get_http_version()
        if version not in ("1.0", "1.1"):
            raise _RefusedError(self._refusal(505, f"HTTP/{version} is not supported on this port"))
        http10 = version == "1.0"
        if self._headers.count(b"host") != 1 and not (http10 and self._headers.count(b"host") == 0):
            raise _RefusedError(self._refusal(400, "the request must carry exactly one Host field"))
        if http10 and self._headers.count(b"transfer-encoding"):
            raise _RefusedError(self._refusal(400, "HTTP/1.0 has no Transfer-Encoding"))
        target, _, _ = self._url.partition(b"?")
        if not target.startswith(b"/"):
            # Absolute form is legal towards any server; every other form is for proxies and CONNECT.
            try:
                target = httptools.parse_url(self._url).path or b"/"
            except httptools.HttpParserInvalidURLError:
                raise _RefusedError(self._refusal(400, "the request target is not a path")) from None
        return RequestHead(
            method=self._parser.get_method().decode("latin-1"),
            path=target.decode("latin-1"),
            headers=self._headers,
            http10=http10,
            # An HTTP/1.0 answer ends with its connection: such clients get one request a connection.
            keep_alive=not http10 and self._parser.should_keep_alive(),
        )

    def _too_large_head(self) -> Response:
        return self._refusal(431, f"the request's head exceeds {self._limits.head_bytes} bytes")

    def _too_large_body(self) -> Response:
        return self._refusal(413, f"the request's body exceeds {self._limits.body_bytes} bytes")

    def _refusal(self, status: int, message: str) -> Response:
        return self._error(status, message, self._headers)

    # -- answering -------------------------------------------------------------------------------------------

    async def _answer(self, exchange: Exchange) -> None:
        try:
            await self._handler(exchange)
        except Exception:
            _log.exception("answering %s failed", exchange.request.head.path)
            if not exchange.started:
                headers = exchange.request.head.headers
                message = "internal error of the router; its log has the details"
                exchange.respond(self._error(500, message, headers))
        finally:
            if not exchange.finished:
                exchange.abort()

    def answer_complete(self, exchange: Exchange) -> None:
        """Called by the exchange: make the connection ready for the next request, or close it."""
        if self._exchange is not exchange or self._state is _State.CLOSED:
            return
        self._task = self._exchange = None
        if not exchange.keep_alive or self.closes_after_answer:
            self._close()
            return
        self._state = _State.IDLE
        if not self.write_paused:
            self._arm(self._limits.keep_alive_seconds, self._close)

    def break_off(self, exchange: Exchange) -> None:
        """Called by the exchange: the client must not take what it got for a whole answer."""
        if self._exchange is not exchange or self._state is _State.CLOSED:
            return
        self._task = self._exchange = None
        if exchange.request.head.http10:
            # Its body ends with the connection: only a reset tells a broken end from a clean one.
            socket = self._transport.get_extra_info("socket")
            socket.setsockopt(SOL_SOCKET, SO_LINGER, struct.pack("ii", 1, 0))
            self._transport.abort()
        else:
            self._close()

    def drain(self) -> None:
        """Close now if no request is under way."""
        if self._state is _State.IDLE:
            self._close()

    def kill(self) -> None:
        """Close at once, whatever is under way."""
        self._transport.abort()

    # -- refusing and closing --------------------------------------------------------------------------------

    def _refuse(self, response: Response) -> None:
        """Answer without having read the whole request, then give the client time to read the answer.

        Closing a socket with unread input makes the kernel send a reset, which may destroy the answer on its way.
        """
        self._state = _State.LINGER
        bodiless = self._head is not None and self._head.method == "HEAD"
        self._transport.write(
            response_head(response, keep_alive=False) + (b"" if bodiless else response.body)
        )
        if self._transport.can_write_eof():
            self._transport.write_eof()
        self._arm(self._limits.linger_seconds, self._transport.abort)

    def _too_slow(self) -> None:
        self._refuse(
            self._refusal(408, f"the request was not complete within {self._limits.request_seconds:g} s")
        )

    def _stalled(self) -> None:
        _log.info("a client did not read for %g s; giving it up", self._limits.stall_seconds)
        self._transport.abort()

    def _close(self) -> None:
        self._state = _State.CLOSED
        self._transport.close()
        self._await_close(self._loop.time() + self._limits.stall_seconds)

    def _await_close(self, until: float, taken: int = -1) -> None:
        """Bound what a close waits for: that the client reads what is still buffered and, over TLS, its goodbye.

        A pooled client answers a goodbye when it next looks at its connection, so that wait is not worth as much. `taken`: what
        the client had taken at the last look. If that is no more now and the kernel holds nothing, nobody does: the event loop
        writes as soon as the kernel has room.
        """

        def look() -> None:
            left, taken_now = self._left_and_taken()
            if self._loop.time() >= until or (not left and taken_now == taken):
                self._transport.abort()
            else:
                self._await_close(until, taken_now)

        self._arm(min(self._limits.goodbye_seconds / 2, self._limits.stall_seconds), look)

    def _left_and_taken(self) -> tuple[int, int]:
        """Bytes that the kernel holds for the client, and bytes that the client has acknowledged."""
        socket = self._transport.get_extra_info("socket")
        (left,) = struct.unpack("i", ioctl(socket.fileno(), TIOCOUTQ, b"\0" * 4))
        (taken,) = struct.unpack_from("Q", socket.getsockopt(IPPROTO_TCP, TCP_INFO, 128), _BYTES_ACKED)
        return left, taken

    def _arm(self, seconds: float, action: Callable[[], None]) -> None:
        self._disarm()
        self._timer = self._loop.call_later(seconds, action)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
