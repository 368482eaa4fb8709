"""Connections to engines, kept alive between requests."""

from __future__ import annotations

import asyncio
from collections import deque

from disagg_router.http1.message import Address
from disagg_router.http1.upstream import (
    COMMENTS,
    ConnectError,
    EngineAnswer,
    EngineConnection,
    Framing,
    Prelude,
    StaleConnectionError,
)

# vLLM's server closes a connection that has been silent for 5 s; staying well below it makes the race between our
# request and its close rare. The rest of that race is `StaleConnectionError`.
_IDLE_SECONDS = 2.0
_IDLE_PER_ADDRESS = 64


class EnginePool:
    """Asks engines. One pool serves all engines of a router."""

    def __init__(self, connect_seconds: float, idle_seconds: float = _IDLE_SECONDS) -> None:
        self._connect_seconds = connect_seconds
        self._idle_seconds = idle_seconds
        self._loop = asyncio.get_running_loop()
        self._idle: dict[Address, deque[EngineConnection]] = {}
        self._sweep: asyncio.TimerHandle | None = None

    async def ask(
        self,
        address: Address,
        head: bytes,
        body: bytes,
        framing: Framing = "raw",
        prelude: Prelude = COMMENTS,
        *,
        once: bool = False,
    ) -> EngineAnswer:
        """Send a request and wait until its answer has begun.

        Raises ConnectError or BrokenAnswerError. If the caller is cancelled the connection is closed, which tells the
        engine to stop. A kept-alive connection that dies before a byte has come back is replaced by a fresh one and the
        request sent again, since most often the engine has never seen it. It may have, so for one that must not be
        served twice (`once`) that is a StaleConnectionError.
        """
        kept = self._take(address)
        if kept is not None:
            try:
                return await self._begun(kept.start(head, body, framing, prelude))
            except StaleConnectionError:
                if once:
                    raise
        connection = await self._connect(address)
        return await self._begun(connection.start(head, body, framing, prelude))

    def release(self, answer: EngineAnswer) -> None:
        """Keep the connection of an answer that has ended, if it ended cleanly; else close it."""
        connection = answer.take_connection()
        if connection is None:
            answer.close()
            return
        idle = self._idle.setdefault(connection.address, deque())
        if len(idle) >= _IDLE_PER_ADDRESS:
            idle.popleft().abort()
        connection.idle_since = self._loop.time()
        idle.append(connection)
        if self._sweep is None:
            self._sweep = self._loop.call_later(self._idle_seconds, self._close_idle)

    def close(self) -> None:
        """Close all idle connections."""
        if self._sweep is not None:
            self._sweep.cancel()
            self._sweep = None
        for idle in self._idle.values():
            for connection in idle:
                connection.abort()
        self._idle.clear()

    @staticmethod
    async def _begun(answer: EngineAnswer) -> EngineAnswer:
        try:
            await answer.begun
        except BaseException:
            answer.close()
            raise
        return answer

    def _take(self, address: Address) -> EngineConnection | None:
        idle = self._idle.get(address)
        while idle:
            connection = idle.pop()  # the freshest: the others may grow old and be closed
            if connection.usable and self._loop.time() - connection.idle_since < self._idle_seconds:
                return connection
            connection.abort()
        return None

    async def _connect(self, address: Address) -> EngineConnection:
        try:
            async with asyncio.timeout(self._connect_seconds):
                _, connection = await self._loop.create_connection(
                    lambda: EngineConnection(address), address.host, address.port
                )
        except TimeoutError:
            raise ConnectError(f"no connection to {address} within {self._connect_seconds:g} s") from None
        except OSError as exc:
            raise ConnectError(f"no connection to {address}: {exc}") from exc
        return connection

    def _close_idle(self) -> None:
        oldest = self._loop.time() - self._idle_seconds
        for address, idle in list(self._idle.items()):
            while idle and idle[0].idle_since <= oldest:
                idle.popleft().abort()
            if not idle:
                del self._idle[address]
        self._sweep = self._loop.call_later(self._idle_seconds, self._close_idle) if self._idle else None
