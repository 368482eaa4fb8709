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
from .web import UnusableError, read_body, why_nothing

_log = logging.getLogger(__name__)
_CONNECT_SECONDS = 1.0
_PAGE_SECONDS = 2.0
"""vLLM writes a page within milliseconds; one that does not has other worries."""
_ALL_SECONDS = 8.0
"""For all pods, however many do not answer: less than there is between two looks."""
_MAX_BYTES = 4 * 2**20
"""A page of vLLM with the connector has about 100 KiB an engine."""
_MOST_SAMPLES = 5_000
"""Of the wanted ones on a page, where an engine has about a hundred. Nothing else goes on while they are parsed, 20 us each."""
_MOST_CHARACTERS = 4_096
"""Of a wanted line. Parsing takes by the square of its labels: minutes for one as long as a page may be."""
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
        why = why_nothing(error, _PAGE_SECONDS, "not a page of metrics")
        _log.debug("no metrics of %s: %s (%s: %s)", pod, why, type(error).__name__, error)
        return NoPage(why)


async def _read(session: aiohttp.ClientSession, target: Target) -> Page:
    host = f"[{target.address}]" if ":" in target.address else target.address
    async with session.get(f"http://{host}:{target.port}/metrics", allow_redirects=False) as answer:
        body = await read_body(answer, _MAX_BYTES)
    return samples(body.decode(), target.names)


def samples(text: str, names: Collection[str]) -> Page:
    """The samples called one of `names`; the other lines are not parsed. Raises ValueError if it is no page of metrics, if it is
    cut off, or if a line of these cannot be read."""
    if not text.strip():
        raise UnusableError("an empty page")
    if _NOT_METRICS.search(text):
        raise UnusableError("not a page of metrics")
    if not text.endswith("\n"):
        raise UnusableError("its answer is cut off")
    wanted = tuple(names)
    lines = [line for line in text.split("\n") if line.startswith(wanted)]
    if len(lines) > _MOST_SAMPLES:
        raise UnusableError(f"more than {_MOST_SAMPLES} samples")
    if any(len(line) > _MOST_CHARACTERS for line in lines):
        raise UnusableError(f"a line of more than {_MOST_CHARACTERS} characters")
    found = text_string_to_metric_families("".join(f"{line}\n" for line in lines))
    return tuple(
        Sample(sample.name, sample.labels, sample.value)
        for family in found
        for sample in family.samples
        if sample.name in names
    )
