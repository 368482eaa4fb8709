"""A small HTTP/1.1 proxy core on asyncio protocols and httptools.

`server` speaks to clients, `upstream` and `pool` to engines; `exchange` joins a request with its answer, `message` holds
what all share. The core knows nothing of language models: it parses heads strictly, bounds what it buffers, couples
the flow control of the two sockets, and passes the bytes of an engine's body on as they are.

Failures that an engine connection can raise:

    UpstreamError                 what the caller of an engine has to expect
     ├── ConnectError             no connection: refused, unreachable, or not in time
     ├── StaleConnectionError     a kept-alive connection had died before it was used; nothing was answered
     └── BrokenAnswerError        the answer broke HTTP, or ended before its own end
"""

from disagg_router.http1.exchange import Exchange
from disagg_router.http1.message import Address, Headers, HttpLimits, Request, RequestHead, Response
from disagg_router.http1.pool import EnginePool
from disagg_router.http1.server import Connections, ServerConnection
from disagg_router.http1.upstream import (
    BrokenAnswerError,
    ConnectError,
    EngineAnswer,
    StaleConnectionError,
    UpstreamError,
)

__all__ = [
    "Address",
    "BrokenAnswerError",
    "ConnectError",
    "Connections",
    "EngineAnswer",
    "EnginePool",
    "Exchange",
    "Headers",
    "HttpLimits",
    "Request",
    "RequestHead",
    "Response",
    "ServerConnection",
    "StaleConnectionError",
    "UpstreamError",
]
