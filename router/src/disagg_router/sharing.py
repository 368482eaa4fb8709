"""Keeps handles where all replicas find them: each at its conversation's owner, which other replicas ask on its admin port."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from disagg_router.handles import Handle, Handles
from disagg_router.http1 import EnginePool, UpstreamError
from disagg_router.http1.message import request_head
from disagg_router.ownership import MESSAGE_BYTES, Answer, Ask, Hello, Peer, Peers, Put, Take
from disagg_router.replicas import Replica, Replicas

PATH = "/internal/handles"

# A put holds up nobody: it may take so many times as long as a take.
_PUT_PATIENCE = 20
# More at once are not sent: what they are for can be computed.
_AT_ONCE = 256


class SharedHandles:
    """`count` is told what becomes of handles: `kept`, `not_kept` (its owner could not be told) and `no_answer` (its owner could
    not be asked, or not in `ask_seconds`)."""

    def __init__(
        self,
        store: Handles,
        replicas: Replicas,
        peers: Peers | None,
        pool: EnginePool,
        ask_seconds: float,
        clock: Callable[[], float],
        count: Callable[[str], None],
    ) -> None:
        """`peers` is None if this replica keeps all that it makes, whatever others there are."""
        self._store = store
        self._replicas = replicas
        self._peers = peers
        self._pool = pool
        self._ask_seconds = ask_seconds
        self._clock = clock
        self._count = count
        self._puts: set[asyncio.Task[None]] = set()

    def put(self, key: bytes, handle: Handle, since: float) -> None:
        """Keep a handle for the conversation; never fails, and waits for nobody. `since`: its turn was sent to decode then."""
        owner, until = self._replicas.owner(key), since + self._store.seconds
        if until <= self._clock():
            self._count("not_kept")
        elif owner is None or self._peers is None:
            self._store.put(key, handle, until)
            self._count("kept")
        elif len(self._puts) >= _AT_ONCE:
            self._count("not_kept")
        else:
            task = asyncio.create_task(self._send(self._peers, owner, key, handle, until))
            self._puts.add(task)
            task.add_done_callback(self._puts.discard)

    async def take(self, key: bytes) -> Handle | None:
        """The conversation's handle, if its owner has one and says so in time. It is nowhere else then."""
        owner = self._replicas.owner(key)
        if owner is None or self._peers is None:
            return self._store.take(key)
        answer = await self._asked(self._peers, owner, lambda peer: Take(peer.boot, key), self._ask_seconds)
        if answer is None:
            self._count("no_answer")
        return answer.handle if answer is not None else None

    async def close(self) -> None:
        """Give up what is under way."""
        for task in self._puts:
            task.cancel()
        await asyncio.gather(*self._puts, return_exceptions=True)

    async def _send(self, peers: Peers, owner: Replica, key: bytes, handle: Handle, until: float) -> None:
        answer = await self._asked(
            peers,
            owner,
            lambda peer: Put(peer.boot, key, until + peer.ahead, handle),
            self._ask_seconds * _PUT_PATIENCE,
        )
        self._count("kept" if answer is not None else "not_kept")

    async def _asked(
        self, peers: Peers, owner: Replica, ask: Callable[[Peer], Ask], seconds: float
    ) -> Answer | None:
        """What the owner says; None if it says no, or nothing in time. Nothing is said twice."""
        try:
            async with asyncio.timeout(seconds):
                if peers.find(owner.name) is None:
                    await self._exchange(peers, owner, Hello())
                peer = peers.find(owner.name)
                return await self._exchange(peers, owner, ask(peer)) if peer is not None else None
        except (TimeoutError, UpstreamError):
            peers.forget(owner.name)
            return None

    async def _exchange(self, peers: Peers, owner: Replica, ask: Ask) -> Answer | None:
        number, message = peers.ask(ask)
        if len(message) > MESSAGE_BYTES:
            return None
        fields = {"content-type": "application/octet-stream"}
        head = request_head("POST", PATH, str(owner.admin), fields, len(message))
        answer = await self._pool.ask(owner.admin, head, message, "decoded", once=True)
        try:
            content = await answer.read(MESSAGE_BYTES)
        except BaseException:
            answer.close()
            raise
        self._pool.release(answer)
        if answer.status != 200:
            peers.forget(owner.name)
            return None
        return peers.heard(owner.name, number, content)
