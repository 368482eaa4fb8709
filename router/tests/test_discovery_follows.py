"""Discovery: a scripted API server for the loop, a real HTTP server for the client, and the fixed list."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from kubernetes.aio import client

from disagg_router.backends import Backend
from disagg_router.discovery import (
    ExpiredError,
    KubernetesSlices,
    SliceSource,
    SourceError,
    parse_engines,
)
from disagg_router.replicas import replicas_in
from router.tests.conftest import until
from router.tests.test_backends_reads_slices import endpoint, piece

P = piece("p", "prefill", endpoint("p-0", "10.0.0.1"))
D = piece("d", "decode", endpoint("d-0", "10.0.0.2"))


class ScriptedApi:
    """Each call takes the next step of its script; a step that is an exception is raised."""

    def __init__(self, lists: list[Any], watches: list[list[Any]]) -> None:
        self.lists = lists
        self.watches = watches
        self.versions: list[str] = []
        self.listed = 0

    async def list(self) -> tuple[list[dict[str, Any]], str]:
        step = self.lists[min(self.listed, len(self.lists) - 1)]
        self.listed += 1
        if isinstance(step, Exception):
            raise step
        return step, str(self.listed)

    async def watch(self, version: str) -> AsyncIterator[dict[str, Any]]:
        self.versions.append(version)
        if not self.watches:
            await asyncio.Event().wait()
        for step in self.watches.pop(0):
            if isinstance(step, Exception):
                raise step
            yield step


class Published:
    def __init__(self) -> None:
        self.sets: list[list[str]] = []

    def __call__(self, backends: tuple[Backend, ...]) -> None:
        self.sets.append([b.name for b in backends])


async def follow(api: ScriptedApi, done: int) -> tuple[list[list[str]], list[str]]:
    """Run a source until it has published `done` times; return what it published and the errors it counted."""
    published, errors = Published(), []
    source = SliceSource(api, 8000, 5700, errors.append)
    source.pause = lambda: 0.0  # type: ignore[method-assign]
    task = asyncio.create_task(source.run(published))
    try:
        await until(lambda: len(published.sets) >= done or task.done(), f"{done} sets are published")
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    return published.sets, errors


def event(kind: str, item: dict[str, Any]) -> dict[str, Any]:
    return {"type": kind, "object": item}


async def test_events_change_the_set() -> None:
    more = piece("d", "decode", endpoint("d-0", "10.0.0.2"), endpoint("d-1", "10.0.0.3"))
    api = ScriptedApi([[P]], [[event("ADDED", D), event("MODIFIED", more), event("DELETED", P)]])
    sets, errors = await follow(api, 4)
    assert sets[:4] == [["p-0"], ["d-0", "p-0"], ["d-0", "d-1", "p-0"], ["d-0", "d-1"]]
    assert errors == []


async def test_the_routers_own_slices_are_told_with_those_of_engines_and_are_no_engines() -> None:
    one = piece("r", "router", endpoint("r-0", "10.0.0.8"))
    two = piece("r", "router", endpoint("r-0", "10.0.0.8"), endpoint("r-1", "10.0.0.9"))
    api = ScriptedApi([[P, one]], [[event("MODIFIED", two)]])
    published, told = Published(), []
    source = SliceSource(api, 8000, 5700, pytest.fail, lambda slices: told.append(replicas_in(slices, 8001)))
    task = asyncio.create_task(source.run(published))
    await until(lambda: len(published.sets) >= 2, "both are told")
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert [[replica.name for replica in replicas] for replicas in told[:2]] == [["r-0"], ["r-0", "r-1"]]
    assert published.sets[:2] == [["p-0"], ["p-0"]]


async def test_an_expired_version_is_listed_again_at_once() -> None:
    api = ScriptedApi([[P], [P, D]], [[ExpiredError()]])
    sets, errors = await follow(api, 2)
    assert sets == [["p-0"], ["d-0", "p-0"]]
    assert errors == ["expired"]
    assert api.versions[:2] == ["1", "2"]


async def test_what_went_away_between_two_watches_is_dropped() -> None:
    api = ScriptedApi([[P, D], [P]], [[]])
    sets, _ = await follow(api, 2)
    assert sets == [["d-0", "p-0"], ["p-0"]]


async def test_an_unreachable_server_leaves_the_engines_as_last_seen() -> None:
    api = ScriptedApi([[P, D], OSError("refused"), OSError("refused"), [P]], [[ConnectionResetError("gone")]])
    sets, errors = await follow(api, 2)
    assert sets == [["d-0", "p-0"], ["p-0"]]
    assert errors == ["ConnectionResetError", "OSError", "OSError"]


async def test_bookmarks_change_nothing() -> None:
    bookmark = event("BOOKMARK", {"metadata": {"resourceVersion": "9"}})
    api = ScriptedApi([[P]], [[bookmark, event("ADDED", D)]])
    sets, _ = await follow(api, 2)
    assert sets[:2] == [["p-0"], ["d-0", "p-0"]]


def test_pauses_grow_and_are_bounded() -> None:
    source = SliceSource(ScriptedApi([[]], []), 8000, 5700, lambda error: None)
    pauses = [source.pause() for _ in range(20)]
    assert pauses[0] <= 0.5
    assert max(pauses) <= 30
    assert pauses[-1] >= 15


class ApiServer:
    """Speaks the list and watch calls of discovery.k8s.io/v1 over real HTTP."""

    def __init__(self) -> None:
        self.queries: list[dict[str, str]] = []
        self.watch_lines: list[bytes] = []
        self.watch_status = 200

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.queries.append(dict(request.query))
        if request.query.get("watch") not in ("true", "True"):
            return web.json_response(
                {"kind": "EndpointSliceList", "metadata": {"resourceVersion": "41"}, "items": [P]}
            )
        response = web.StreamResponse(status=self.watch_status)
        await response.prepare(request)
        for line in self.watch_lines:
            await response.write(line)
        await response.write_eof()
        return response


@pytest.fixture
async def api_server() -> AsyncIterator[tuple[ApiServer, KubernetesSlices]]:
    server = ApiServer()
    app = web.Application()
    app.router.add_get("/apis/discovery.k8s.io/v1/namespaces/prod/endpointslices", server.handle)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    configuration = client.Configuration(host=f"http://127.0.0.1:{runner.addresses[0][1]}")
    client.Configuration.set_default(configuration)
    slices = KubernetesSlices("prod", "demo")
    yield server, slices
    await slices.close()
    client.Configuration.set_default(None)
    await runner.cleanup()


async def test_the_client_lists_and_watches_by_label(api_server: tuple[ApiServer, KubernetesSlices]) -> None:
    server, slices = api_server
    big = piece("d", "decode", *(endpoint(f"d-{n}", f"10.0.1.{n % 250}") for n in range(1000)))
    lines = b"".join(json.dumps(event("ADDED", item)).encode() + b"\n" for item in (D, big))
    # However the bytes are cut, and however long a line is.
    server.watch_lines = [lines[:10], lines[10:5000], lines[5000:]]
    items, version = await slices.list()
    assert [item["metadata"]["name"] for item in items] == ["p"]
    events = [e async for e in slices.watch(version)]
    assert [(e["type"], len(e["object"]["endpoints"])) for e in events] == [("ADDED", 1), ("ADDED", 1000)]
    listed, watched = server.queries
    assert listed["labelSelector"] == watched["labelSelector"] == "inference.disagg.dev/name=demo"
    assert watched["resourceVersion"] == "41"


@pytest.mark.parametrize("in_stream", [True, False])
async def test_a_410_is_told_from_other_errors(
    api_server: tuple[ApiServer, KubernetesSlices], in_stream: bool
) -> None:
    server, slices = api_server
    if in_stream:
        server.watch_lines = [
            json.dumps(event("ERROR", {"code": 410, "message": "too old"})).encode() + b"\n"
        ]
    else:
        server.watch_status = 410
    with pytest.raises(ExpiredError):
        [e async for e in slices.watch("1")]
    server.watch_status, server.watch_lines = 403, []
    if in_stream:
        server.watch_status = 200
        server.watch_lines = [json.dumps(event("ERROR", {"code": 500, "message": "etcd"})).encode() + b"\n"]
    with pytest.raises(OSError, match=r"403|500 etcd"):
        [e async for e in slices.watch("1")]


def test_a_short_list_of_engines_is_read() -> None:
    source = parse_engines("prefill=http://10.0.0.1:8000/#5701, decode=http://[::1]:8001", 5700)
    prefill, decode = source.backends
    assert (prefill.role, str(prefill.address), prefill.control_port) == ("prefill", "10.0.0.1:8000", 5701)
    assert (decode.role, str(decode.address), decode.control_port) == ("decode", "[::1]:8001", 5700)
    assert prefill.revision == decode.revision


def test_a_file_of_engines_is_read(tmp_path: Path) -> None:
    file = tmp_path / "engines.json"
    entry = {"role": "decode", "url": "http://10.0.0.2:8000", "name": "d-0", "zone": "a", "controlPort": 5709}
    file.write_text(json.dumps([entry]))
    [got] = parse_engines(str(file), 5700).backends
    assert (got.name, got.zone, got.control_port) == ("d-0", "a", 5709)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("prefil=http://a:1", "prefil"),
        ("prefill=https://a:1", "http://HOST:PORT"),
        ("prefill=a:1", "http://HOST:PORT"),
        ("prefill=http://a:99999", "99999|port"),
        ("prefill=http://a:1/v1", "http://HOST:PORT"),
        ("prefill=http://a:1/#x", "x"),
        ("/nowhere/engines.json", "cannot be read"),
    ],
)
def test_a_bad_list_of_engines_says_what_is_wrong(text: str, words: str) -> None:
    with pytest.raises(SourceError, match=words):
        parse_engines(text, 5700)
