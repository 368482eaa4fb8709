"""The client, against an HTTP server that says what we tell it to. The real one is in tests/live."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from kubernetes.aio.client import ApiClient, Configuration

from disagg_operator.errors import GoneError, KubeError, RefusedError, UnavailableError
from disagg_operator.kube import Kube

Handler = Callable[[web.Request], Any]


@contextlib.asynccontextmanager
async def served_by(handler: Handler) -> AsyncIterator[Kube]:
    async def answer(request: web.Request) -> web.StreamResponse:
        response: web.StreamResponse = await handler(request)
        return response

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    async with TestServer(app) as server:
        configuration = Configuration(host=str(server.make_url("")).rstrip("/"))
        kube = Kube(ApiClient(configuration))
        try:
            yield kube
        finally:
            await kube.close()


def status(code: int, message: str) -> web.Response:
    return web.json_response({"kind": "Status", "code": code, "message": message}, status=code)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (400, RefusedError),
        (403, RefusedError),
        (404, GoneError),
        (409, UnavailableError),
        (410, UnavailableError),
        (422, RefusedError),
        (429, UnavailableError),
        (500, UnavailableError),
        (503, UnavailableError),
    ],
)
async def test_a_failure_says_what_was_done_and_what_was_answered(code: int, kind: type[KubeError]) -> None:
    async def handler(_: web.Request) -> web.Response:
        return status(code, "the server's words")

    manifest = {"kind": "Service", "metadata": {"namespace": "a", "name": "x"}}
    async with served_by(handler) as kube:
        with pytest.raises(KubeError, match=r"^apply Service a/x: the server's words$") as caught:
            await kube.apply(manifest)
    assert type(caught.value) is kind


async def test_no_answer_is_unavailable() -> None:
    kube = Kube(ApiClient(Configuration(host="http://127.0.0.1:1")))
    with pytest.raises(UnavailableError, match="read Pod a/x"):
        await kube.get("Pod", "a", "x")
    await kube.close()


async def test_an_answer_that_is_no_json_is_unavailable() -> None:
    async def handler(_: web.Request) -> web.Response:
        return web.Response(text="<html>", content_type="text/html")

    async with served_by(handler) as kube:
        with pytest.raises(UnavailableError, match="read Pod a/x"):
            await kube.get("Pod", "a", "x")


async def test_apply_is_server_side_by_our_manager_with_force() -> None:
    seen: list[web.Request] = []
    bodies: list[Any] = []

    async def handler(request: web.Request) -> web.Response:
        seen.append(request)
        bodies.append(await request.json())
        return web.json_response(bodies[-1])

    manifest = {"kind": "StatefulSet", "metadata": {"namespace": "a", "name": "x"}, "spec": {"replicas": 0}}
    async with served_by(handler) as kube:
        await kube.apply(manifest)
        await kube.apply({**manifest, "kind": "DisaggInference"}, status=True)
    assert [request.method for request in seen] == ["PATCH", "PATCH"]
    assert [request.path for request in seen] == [
        "/apis/apps/v1/namespaces/a/statefulsets/x",
        "/apis/inference.disagg.dev/v1alpha1/namespaces/a/disagginferences/x/status",
    ]
    for request in seen:
        assert request.content_type == "application/apply-patch+yaml"
        assert dict(request.query) == {
            "fieldManager": "disagg-operator",
            "force": "true",
            "fieldValidation": "Strict",
        }
    assert bodies[0] == manifest


async def test_a_delete_names_the_uid_and_does_not_mind_that_it_is_gone() -> None:
    bodies: list[Any] = []

    async def handler(request: web.Request) -> web.Response:
        bodies.append(await request.json())
        return status(404, "not found")

    async with served_by(handler) as kube:
        await kube.delete("Service", "a", "x", "uid-1")
    assert bodies[0]["preconditions"] == {"uid": "uid-1"}
    assert bodies[0]["propagationPolicy"] == "Background"


class Watched:
    """A collection that is listed and watched by a script: each watch plays one list of lines and ends."""

    def __init__(self, *watches: list[Any]) -> None:
        self._watches = list(watches)
        self.lists = 0
        self.versions: list[str] = []
        self.accepted: set[str] = set()

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        self.accepted.add(request.headers["Accept"])
        if "watch" not in request.query:
            self.lists += 1
            page = {"metadata": {"name": f"listed-{self.lists}", "namespace": "a"}}
            return web.json_response({"metadata": {"resourceVersion": f"{self.lists}00"}, "items": [page]})
        self.versions.append(request.query["resourceVersion"])
        response = web.StreamResponse()
        await response.prepare(request)
        if not self._watches:
            await asyncio.sleep(3600)
        for line in self._watches.pop(0):
            if line == "cut":
                assert request.transport is not None
                request.transport.abort()
                return response
            await response.write(json.dumps(line).encode() + b"\n")
        return response


def change(name: str, version: str) -> Any:
    metadata = {"name": name, "namespace": "a", "resourceVersion": version}
    return {"type": "MODIFIED", "object": {"metadata": metadata}}


async def names(kube: Kube, count: int) -> list[str]:
    found: list[str] = []
    async with asyncio.timeout(120):
        async with contextlib.aclosing(kube.watch("Pod", "a")) as changes:  # type: ignore[type-var]
            async for meta in changes:
                found.append(meta["name"])
                if len(found) == count:
                    break
    return found


async def test_a_watch_lists_first_and_goes_on_where_it_was_when_the_server_ends_it() -> None:
    bookmark = {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "150"}}}
    watched = Watched([change("x", "101"), bookmark], [change("y", "151")])
    async with served_by(watched) as kube:
        assert await names(kube, 3) == ["listed-1", "x", "y"]
    assert watched.versions == ["100", "150"]
    assert all("PartialObjectMetadata" in accept for accept in watched.accepted), "only metadata travels"


async def test_a_watch_lists_again_when_its_version_is_too_old() -> None:
    gone = {"type": "ERROR", "object": {"kind": "Status", "code": 410, "message": "too old resource version"}}
    watched = Watched([change("x", "101"), gone], [change("y", "201")])
    async with served_by(watched) as kube:
        assert await names(kube, 4) == ["listed-1", "x", "listed-2", "y"]
    assert watched.versions == ["100", "200"]


async def test_a_watch_survives_a_connection_that_is_cut() -> None:
    watched = Watched([change("x", "101"), "cut"], [change("y", "102")])
    async with served_by(watched) as kube:
        assert await names(kube, 3) == ["listed-1", "x", "y"]
    assert watched.versions == ["100", "101"]
    assert watched.lists == 1
