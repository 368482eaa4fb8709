"""Tells prefill that nobody will fetch a prompt, so that it need not keep it until its lease ends.

A prompt that prefill has computed waits there for decode's engine. If decode refused the turn at its front end, or could
not be reached, or the client left too early, that engine never hears of the turn, and only the router knows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from disagg_router import legs
from disagg_router.backends import Backend
from disagg_router.http1 import EnginePool, UpstreamError
from disagg_router.http1.message import request_head

_SECONDS = 10.0
_ANSWER_BYTES = 64 * 1024
# More at once are not sent: the lease does what they would have done.
_AT_ONCE = 64


class Dismissals:
    """Sends in the background; nobody waits for an answer. `new_id` makes the ids of the requests that are sent."""

    def __init__(self, pool: EnginePool, mode: legs.Mode, new_id: Callable[[], str]) -> None:
        self._pool = pool
        self._mode = mode
        self._new_id = new_id
        self._tasks: set[asyncio.Task[None]] = set()

    def send(self, prefill: Backend, turn: str) -> None:
        """Dismiss the prompt of the turn whose legs had this request id."""
        if len(self._tasks) < _AT_ONCE:
            task = asyncio.create_task(self._send(prefill, turn))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Give up what is under way."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _send(self, prefill: Backend, turn: str) -> None:
        body = self._mode.dismissal(turn)
        fields = {"content-type": "application/json", "x-request-id": self._new_id()}
        path = legs.PATHS["completions"]
        head = request_head("POST", path, str(prefill.address), fields, len(body))
        try:
            async with asyncio.timeout(_SECONDS):
                answer = await self._pool.ask(prefill.address, head, body, "decoded")
                try:
                    await answer.read(_ANSWER_BYTES)
                except BaseException:
                    answer.close()
                    raise
                self._pool.release(answer)
        except (TimeoutError, UpstreamError):
            pass  # the lease ends it
