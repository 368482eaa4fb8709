"""What is still to be said or heard of a prefill leg when its turn is over; nobody waits for it.

A prompt that prefill has computed waits there for decode's engine. If decode refused the turn at its front end, or could
not be reached, or the client left too early, that engine never hears of the turn, and only the router knows: it tells
prefill, where the mode has a word for that. In other modes decode waits for prefill, and the leg is left to finish.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from disagg_router import legs
from disagg_router.backends import Backend
from disagg_router.http1 import EnginePool, UpstreamError
from disagg_router.http1.message import request_head

_SECONDS = 10.0
_ANSWER_BYTES = 64 * 1024
# More at once are not sent: the lease does what they would have done.
_AT_ONCE = 64


class Dismissals:
    """Works in the background. `new_id` makes the ids of the requests that are sent."""

    def __init__(self, pool: EnginePool, new_id: Callable[[], str]) -> None:
        self._pool = pool
        self._new_id = new_id
        self._words: set[asyncio.Task[Any]] = set()
        self._legs: set[asyncio.Task[Any]] = set()

    def send(self, prefill: Backend, word: bytes) -> None:
        """Send a completion that dismisses a prompt."""
        if len(self._words) < _AT_ONCE:
            _keep(asyncio.create_task(self._send(prefill, word)), self._words)

    def let_finish(self, leg: asyncio.Task[Any]) -> None:
        """Keep a prefill leg that has a deadline of its own, until it ends."""
        _keep(leg, self._legs)

    async def close(self) -> None:
        """Give up what is under way."""
        tasks = self._words | self._legs
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _send(self, prefill: Backend, word: bytes) -> None:
        fields = {"content-type": "application/json", "x-request-id": self._new_id()}
        path = legs.PATHS["completions"]
        head = request_head("POST", path, str(prefill.address), fields, len(word))
        try:
            async with asyncio.timeout(_SECONDS):
                answer = await self._pool.ask(prefill.address, head, word, "decoded")
                try:
                    await answer.read(_ANSWER_BYTES)
                except BaseException:
                    answer.close()
                    raise
                self._pool.release(answer)
        except (TimeoutError, UpstreamError):
            pass  # the lease ends it


def _keep(task: asyncio.Task[Any], among: set[asyncio.Task[Any]]) -> None:
    among.add(task)
    task.add_done_callback(among.discard)
