"""Pages of metrics, read from pods. Nothing is decided here, and nothing here fails a pass.

All pods are asked at once, with one limit of time for each: one that is slow or away delays nobody for longer. A page
is read as a whole or not at all.
"""

import asyncio
import logging
from collections.abc import Collection, Mapping

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from .naming import HTTP_PORT
from .observe import Page, Sample

_log = logging.getLogger(__name__)
_CONNECT_SECONDS = 1.0
_PAGE_SECONDS = 2.0
"""vLLM writes a page within milliseconds; one that does not has other worries."""
_MAX_BYTES = 4 * 2**20
"""A page of vLLM with the connector has about 100 KiB an engine."""
_AT_ONCE = 64


async def read_pages(
    addresses: Mapping[str, str], names: Collection[str], port: int = HTTP_PORT
) -> dict[str, Page | None]:
    """The samples called one of `names` on /metrics of each pod, by the pod's name; None if there is no such page."""
    limit = aiohttp.ClientTimeout(total=_PAGE_SECONDS, sock_connect=_CONNECT_SECONDS)
    connector = aiohttp.TCPConnector(limit=_AT_ONCE, force_close=True)
    async with aiohttp.ClientSession(
        connector=connector, timeout=limit, auto_decompress=False, headers={"Accept-Encoding": "identity"}
    ) as session:
        pages = await asyncio.gather(
            *(_read(session, pod, address, port, names) for pod, address in addresses.items())
        )
    return dict(zip(addresses, pages, strict=True))


async def _read(
    session: aiohttp.ClientSession, pod: str, address: str, port: int, names: Collection[str]
) -> Page | None:
    try:
        host = f"[{address}]" if ":" in address else address
        return samples(await _body(session, f"http://{host}:{port}/metrics"), names)
    except Exception as error:  # whatever answers there, it is no reason to fail
        _log.debug("no metrics of %s: %s: %s", pod, type(error).__name__, error)
        return None


async def _body(session: aiohttp.ClientSession, url: str) -> str:
    async with session.get(url, allow_redirects=False) as answer:
        if answer.status != 200:
            raise ValueError(f"status {answer.status}")
        body = bytearray()
        async for chunk in answer.content.iter_any():
            body += chunk
            if len(body) > _MAX_BYTES:
                raise ValueError(f"more than {_MAX_BYTES} bytes")
    return body.decode()


def samples(text: str, names: Collection[str]) -> Page:
    """The samples called one of `names`; the other lines are not parsed. Raises ValueError if the page is cut off or a line
    of these cannot be read."""
    if not text.endswith("\n"):
        raise ValueError("the page ends in the middle of a line")
    wanted = tuple(names)
    lines = [line for line in text.split("\n") if line.startswith(wanted)]
    found = text_string_to_metric_families("".join(f"{line}\n" for line in lines))
    return tuple(
        Sample(sample.name, sample.labels, sample.value)
        for family in found
        for sample in family.samples
        if sample.name in names
    )
