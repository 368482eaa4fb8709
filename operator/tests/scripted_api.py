"""An API server of which a test says what it knows, and the operator as a process in front of it. The real one is in tests/live."""

import asyncio
import contextlib
import json
import os
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import yaml
from aiohttp import web
from aiohttp.test_utils import TestServer

from disagg_operator.api.base import GROUP, VERSION
from disagg_operator.naming import KIND, PLURAL
from e2e.ports import free_port

LIMIT = 60.0


class ScriptedApi:
    """Collections are empty, no object is there, and watches say nothing until `add` is called."""

    def __init__(self) -> None:
        self.lists_our_group = True
        self.watched: Counter[str] = Counter()
        """Watches that are open, by the last part of their path."""
        self.read: set[str] = set()
        """Paths of single objects that were asked for."""
        self._added: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()

    def add(self, namespace: str, name: str) -> None:
        """Tell of a new DisaggInference."""
        meta = {"namespace": namespace, "name": name, "uid": name, "resourceVersion": "2", "generation": 1}
        self._added.set_result({"apiVersion": f"{GROUP}/{VERSION}", "kind": KIND, "metadata": meta})

    async def answer(self, request: web.Request) -> web.StreamResponse:
        parts = request.path.strip("/").split("/")
        if len(parts) <= 3 and "watch" not in request.query and (found := self._discovery(parts)):
            return web.json_response(found)
        if "watch" in request.query:
            return await self._watch(request, parts)
        if parts[-3] == "namespaces" or parts[-2] in (VERSION, "v1"):
            return web.json_response({"metadata": {"resourceVersion": "1"}, "items": []})
        self.read.add(request.path)
        return web.json_response({"kind": "Status", "code": 404, "message": "not found"}, status=404)

    def _discovery(self, parts: list[str]) -> dict[str, Any]:
        ours, crds = f"{GROUP}/{VERSION}", "apiextensions.k8s.io/v1"
        known = {
            "api": {"versions": ["v1"]},
            "api/v1": {"resources": [_resource("namespaces", "Namespace")]},
            "apis": {"groups": [_group(crds), *([_group(ours)] if self.lists_our_group else [])]},
            f"apis/{crds}": {
                "resources": [_resource("customresourcedefinitions", "CustomResourceDefinition")]
            },
            f"apis/{ours}": {"resources": [_resource(PLURAL, KIND)]},
        }
        return known.get("/".join(parts), {})

    async def _watch(self, request: web.Request, parts: list[str]) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        self.watched[parts[-1]] += 1
        if parts[-1] == PLURAL:
            added = await asyncio.shield(self._added)
            if added["metadata"]["namespace"] == parts[-2]:
                await response.write(json.dumps({"type": "ADDED", "object": added}).encode() + b"\n")
        await asyncio.sleep(3600)
        return response


def _resource(plural: str, kind: str) -> dict[str, Any]:
    verbs = ["get", "list", "watch", "patch"]
    return {"name": plural, "singularName": kind.lower(), "kind": kind, "namespaced": True, "verbs": verbs}


def _group(group_version: str) -> dict[str, Any]:
    name, version = group_version.split("/")
    found = {"groupVersion": group_version, "version": version}
    return {"name": name, "versions": [found], "preferredVersion": found}


@contextlib.asynccontextmanager
async def scripted_api() -> AsyncIterator[tuple[ScriptedApi, str]]:
    """It, and its URL."""
    api, app = ScriptedApi(), web.Application()
    app.router.add_route("*", "/{path:.*}", api.answer)
    server = TestServer(app)
    await server.start_server(shutdown_timeout=0.1)
    try:
        yield api, str(server.make_url("")).rstrip("/")
    finally:
        await server.close()


@contextlib.asynccontextmanager
async def operator_at(
    url: str, folder: Path, **environment: str
) -> AsyncIterator[tuple[asyncio.subprocess.Process, Path]]:
    """The operator as a process, and its log; killed in the end."""
    kubeconfig, log = folder / "kubeconfig", folder / "operator.log"
    names = {"cluster": "it", "user": "it"}
    kubeconfig.write_text(
        yaml.safe_dump(
            {
                "clusters": [{"name": "it", "cluster": {"server": url}}],
                "users": [{"name": "it", "user": {}}],
                "contexts": [{"name": "it", "context": names}],
                "current-context": "it",
            }
        )
    )
    variables = {
        "KUBECONFIG": str(kubeconfig),
        "ROUTER_IMAGE": "router:1",
        "CONNECTOR_IMAGE": "connector:1",
        "HTTP_PORT": str(free_port()),
        **environment,
    }
    with log.open("wb") as out:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "disagg_operator",
            stdin=asyncio.subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env={**os.environ, **variables},
        )
        try:
            yield process, log
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()


async def until(holds: Callable[[], bool], what: str) -> None:
    loop = asyncio.get_running_loop()
    end = loop.time() + LIMIT
    while not holds():
        assert loop.time() < end, f"not within {LIMIT:g} s: {what}"
        await asyncio.sleep(0.05)
