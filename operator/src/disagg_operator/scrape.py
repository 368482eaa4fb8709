"""Pages of metrics, read from pods. Nothing is decided here, and nothing here fails a pass.

All pods are asked at once, each with its own limit of time: one that is slow or away delays nobody for longer. A page is
read as a whole or not at all.
"""

import asyncio
import logging
import re
from collections.abc import Collection, Mapping

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from .pages import Answer, NoPage, Page, Sample, Target

_log = logging.getLogger(__name__)
_CONNECT_SECONDS = 1.0
_PAGE_SECONDS = 2.0
"""vLLM writes a page within milliseconds; one that does not has other worries."""
_ALL_SECONDS = 8.0
"""For all pods, however many do not answer: less than there is between two looks."""
_MAX_BYTES = 4 * 2**20
"""A page of vLLM with the connector has about 100 KiB an engine."""
_AT_ONCE = 64
_NOT_METRICS = re.compile(r"^[ \t]*[^#A-Za-z_:\s]", re.MULTILINE)
"""How a line begins that is on no page of metrics."""


async def read_pages(targets: Mapping[str, Target]) -> dict[str, Answer]:
    """What each pod's /metrics has of the wanted samples, by the pod's name."""
    limit = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS)
    turns = asyncio.Semaphore(_AT_ONCE)
    loop = asyncio.get_running_loop()
    until = loop.time() + _ALL_SECONDS
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
        timeout=limit,
        auto_decompress=False,
        headers={"Accept-Encoding": "identity"},
    ) as session:
        answers = await asyncio.gather(*(_asked(session, turns, until, *item) for item in targets.items()))
    return dict(zip(targets, answers, strict=True))


async def _asked(
    session: aiohttp.ClientSession, turns: asyncio.Semaphore, until: float, pod: str, target: Target
) -> Answer:
    try:
        async with asyncio.timeout_at(until), turns:
            async with asyncio.timeout(_PAGE_SECONDS):
                return await _read(session, target)
    except Exception as error:  # whatever answers there, it is no reason to fail
        why = _why(error)
        _log.debug("no metrics of %s: %s (%s: %s)", pod, why, type(error).__name__, error)
        return NoPage(why)


async def _read(session: aiohttp.ClientSession, target: Target) -> Page:
    host = f"[{target.address}]" if ":" in target.address else target.address
    return samples(await _body(session, f"http://{host}:{target.port}/metrics"), target.names)


def _why(error: Exception) -> str:
    if isinstance(error, aiohttp.ConnectionTimeoutError | aiohttp.ClientConnectorError):
        return "no connection"
    if isinstance(error, TimeoutError):
        return f"no answer within {_PAGE_SECONDS:g} s"
    if isinstance(error, aiohttp.ClientPayloadError | aiohttp.ServerDisconnectedError):
        return "its page is cut off"
    if isinstance(error, _UnusableError):
        return str(error)
    return "not a page of metrics"


class _UnusableError(ValueError):
    """There is an answer and no page in it; the message says why."""


async def _body(session: aiohttp.ClientSession, url: str) -> str:
    async with session.get(url, allow_redirects=False) as answer:
        if answer.status != 200:
            raise _UnusableError(f"status {answer.status}")
        body = bytearray()
        async for chunk in answer.content.iter_any():
            body += chunk
            if len(body) > _MAX_BYTES:
                raise _UnusableError(f"its page has more than {_MAX_BYTES} bytes")
    return body.decode()


def samples(text: str, names: Collection[str]) -> Page:
    """The samples called one of `names`; the other lines are not parsed. Raises ValueError if it is no page of metrics, if it is
    cut off, or if a line of these cannot be read."""
    if not text.strip():
        raise _UnusableError("its page is empty")
    if _NOT_METRICS.search(text):
        raise _UnusableError("not a page of metrics")
    if not text.endswith("\n"):
        raise _UnusableError("its page is cut off")
    wanted = tuple(names)
    lines = [line for line in text.split("\n") if line.startswith(wanted)]
    found = text_string_to_metric_families("".join(f"{line}\n" for line in lines))
    return tuple(
        Sample(sample.name, sample.labels, sample.value)
        for family in found
        for sample in family.samples
        if sample.name in names
    )
