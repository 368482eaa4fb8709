"""What other programs answer to HTTP requests, read within bounds; and in few words why there is nothing to be read."""

import aiohttp


class UnusableError(ValueError):
    """There is an answer, and nothing in it that was asked for; the message says why."""


async def read_body(answer: aiohttp.ClientResponse, most: int) -> bytes:
    """The whole body. Raises UnusableError if the status is not 200 or there are more than `most` bytes."""
    if answer.status != 200:
        raise UnusableError(f"status {answer.status}")
    body = bytearray()
    async for chunk in answer.content.iter_any():
        body += chunk
        if len(body) > most:
            raise UnusableError(f"more than {most} bytes")
    return bytes(body)


def why_nothing(error: Exception, seconds: float, otherwise: str) -> str:
    """Why a request brought nothing that may take `seconds`: the same words for the same reason, so that they can be compared."""
    if isinstance(error, UnusableError):
        return str(error)
    if isinstance(error, aiohttp.ConnectionTimeoutError | aiohttp.ClientConnectorError):
        return "no connection"
    if isinstance(error, TimeoutError):
        return f"no answer within {seconds:g} s"
    if isinstance(
        error, aiohttp.ClientPayloadError | aiohttp.ServerDisconnectedError | aiohttp.ClientOSError
    ):
        return "its answer is cut off"
    return otherwise
