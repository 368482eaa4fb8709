"""Routers and fake engines on loopback, on the event loop that production uses."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
import uvloop

from disagg_router.backends import Backend
from disagg_router.config import Config, Deadlines, Limits, Model, Ports
from disagg_router.discovery import FixedSource
from disagg_router.http1 import Address
from disagg_router.server import Router
from router.tests.fake_engine import FakeEngine

MODEL = "test/model"
# For what has to pass in a test; what must not pass in an answer that comes, however busy the machine is.
SHORT = Deadlines(connect_seconds=60, first_byte_seconds=3, idle_seconds=3, answer_seconds=3)
LONG = Deadlines(connect_seconds=60, first_byte_seconds=60, idle_seconds=60, answer_seconds=60)


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"uvloop": uvloop.new_event_loop}


_TEST_SECONDS = 300.0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Bound every test of this folder: a timer signal does not reach a test that waits inside uvloop."""
    for item in items:
        ours = isinstance(item, pytest.Function) and Path(__file__).parent in item.path.parents
        if ours and inspect.iscoroutinefunction(item.obj):
            item.obj = _bounded(item.obj)


def _bounded(test: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    @functools.wraps(test)
    async def run(*args: Any, **kwargs: Any) -> None:
        async with asyncio.timeout(_TEST_SECONDS):
            await test(*args, **kwargs)

    return run


async def until(holds: Callable[[], bool], what: str, seconds: float = 60.0) -> None:
    """Wait until `holds()`; fail with `what` otherwise."""
    for _ in range(int(seconds / 0.005)):
        if holds():
            return
        await asyncio.sleep(0.005)
    pytest.fail(f"not within {seconds} s: {what}")


def make_config(**changes: Any) -> Config:
    config = Config(
        version=1,
        namespace="default",
        name="test",
        model=Model(name=MODEL),
        ports=Ports(http=0, admin=0),
        deadlines=LONG,
        limits=Limits(body_bytes=4 * 1024 * 1024, head_bytes=16384),
    )
    return msgspec.structs.replace(config, **changes)


@dataclass
class Stack:
    """A router in front of fake engines, and a client for it."""

    router: Router
    client: aiohttp.ClientSession
    prefills: list[FakeEngine]
    decodes: list[FakeEngine]
    backends: tuple[Backend, ...] = ()
    extra: dict[str, Any] = field(default_factory=dict)
    ahead: float = 0.0  # what the router takes for the time, in seconds

    @property
    def prefill(self) -> FakeEngine:
        return self.prefills[0]

    @property
    def decode(self) -> FakeEngine:
        return self.decodes[0]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.router.port}"

    def chat(self, text: str = "hello", **fields: Any) -> dict[str, Any]:
        return {"model": MODEL, "messages": [{"role": "user", "content": text}], **fields}

    async def post(self, body: Any, path: str = "/v1/chat/completions", **kwargs: Any) -> tuple[int, Any]:
        """Send a request; return the status and the decoded JSON (or the text, for a stream)."""
        async with self.client.post(self.url + path, json=body, **kwargs) as response:
            if response.content_type == "application/json":
                return response.status, await response.json()
            return response.status, await response.text()

    def metric(self, name: str, **labels: str) -> float:
        value = self.router.metrics.registry.get_sample_value(name, labels)
        return 0.0 if value is None else value

    def idle(self) -> bool:
        """No leg counted and none active on any engine."""
        return not self.router.loads.inflight and not any(e.active for e in self.prefills + self.decodes)

    def publish(self, *backends: Backend) -> None:
        self.router.fleet.publish(backends)


def backend(role: Any, index: int, port: int, **fields: Any) -> Backend:
    return Backend(
        name=f"{role}-{index}",
        role=role,
        revision=fields.pop("revision", "rev1"),
        address=Address("127.0.0.1", port),
        control_port=5700 + index,
        **fields,
    )


MakeStack = Callable[..., Awaitable[Stack]]


@pytest.fixture
async def make_stack() -> AsyncIterator[MakeStack]:
    """Makes stacks of `prefills` and `decodes` engines; keywords change the configuration."""
    stacks: list[Stack] = []

    async def make(prefills: int = 1, decodes: int = 1, **changes: Any) -> Stack:
        prefill = [await FakeEngine().start() for _ in range(prefills)]
        decode = [await FakeEngine().start() for _ in range(decodes)]
        backends = tuple(
            [backend("prefill", i, engine.port) for i, engine in enumerate(prefill)]
            + [backend("decode", i, engine.port) for i, engine in enumerate(decode)]
        )
        # Stands still but for what a test moves it, however long that takes.
        router = Router(make_config(**changes), host="127.0.0.1", clock=lambda: stack.ahead)
        client = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=120), connector=aiohttp.TCPConnector(limit=0)
        )
        stack = Stack(router, client, prefill, decode, backends)
        await router.start(FixedSource(backends))
        stacks.append(stack)
        await until(lambda: router.fleet.synced, "the router has its engines")
        return stack

    yield make
    for stack in stacks:
        await stack.client.close()
        await stack.router.stop()
        for engine in stack.prefills + stack.decodes:
            await engine.stop()


@pytest.fixture
async def stack(make_stack: MakeStack) -> Stack:
    """One router, one prefill, one decode."""
    return await make_stack()
