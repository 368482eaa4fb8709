"""The real router, in a thread, in front of real engines."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from disagg_router.backends import Backend
from disagg_router.config import Config, Model, Ports
from disagg_router.discovery import FixedSource
from disagg_router.http1 import Address
from disagg_router.server import Router
from e2e.engines import Engine
from e2e.ports import HOST

_START_SECONDS = 120.0


@contextmanager
def routed(prefill: Engine, decode: Engine) -> Iterator[int]:
    """The port of a router that sends its turns to these two engines."""
    engines = (("prefill", prefill), ("decode", decode))
    backends = tuple(
        Backend(role, role, "rev1", Address(HOST, engine.ports.http), engine.ports.control)  # type: ignore[arg-type]
        for role, engine in engines
    )
    config = Config(
        version=1,
        namespace="default",
        name="test",
        model=Model(name=prefill.spec.served_name),
        ports=Ports(http=0, admin=0),
    )
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()
    ready: threading.Event = threading.Event()
    router = Router(config, host=HOST)

    async def serve() -> None:
        await router.start(FixedSource(backends))
        ready.set()
        await stop.wait()
        await router.stop()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),), daemon=True)
    thread.start()
    try:
        assert ready.wait(_START_SECONDS), f"the router has started within {_START_SECONDS:.0f} s"
        yield router.port
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(_START_SECONDS)
        loop.close()
