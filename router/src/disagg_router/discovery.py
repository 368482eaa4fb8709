"""Where the engines are: a watch on EndpointSlices, or a fixed list. Both publish to a `Fleet`."""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

import msgspec

from disagg_router.backends import LABEL_NAME, Backend, Role, from_slices
from disagg_router.http1.message import Address

_log = logging.getLogger(__name__)

Publish = Callable[[tuple[Backend, ...]], None]

# The server ends a watch after this long; the list that follows repairs whatever a watch may have missed.
_WATCH_SECONDS = 120
_BACKOFF_SECONDS = (0.5, 30.0)


class Source(Protocol):
    """Publishes all engines whenever they change, until it is cancelled."""

    async def run(self, publish: Publish) -> None: ...


# -- a fixed list --------------------------------------------------------------------------------------------


class SourceError(Exception):
    """The list of engines cannot be used. The message names the entry."""


class _FileEngine(msgspec.Struct, forbid_unknown_fields=True, rename="camel"):
    role: Role
    url: str
    name: str = ""
    revision: str = "static"
    zone: str = ""
    control_port: int = 0


class FixedSource:
    """Engines that do not change: for tests and outside of Kubernetes."""

    def __init__(self, backends: tuple[Backend, ...]) -> None:
        self.backends = backends

    async def run(self, publish: Publish) -> None:
        publish(self.backends)
        await asyncio.Event().wait()


def parse_engines(text: str, control_port: int) -> FixedSource:
    """Read `--engines`: either a JSON file, or `prefill=http://HOST:PORT,decode=http://HOST:PORT,...`.

    The file holds a list of `{"role", "url"}` with optional `name`, `revision`, `zone` and `controlPort`. In the short
    form a control port that differs from the configured one follows the URL: `prefill=http://HOST:PORT/#5701`.
    Raises SourceError.
    """
    if "=" in text:
        entries = []
        for item in text.split(","):
            role, _, url = item.strip().partition("=")
            if role not in ("prefill", "decode"):
                raise SourceError(f"--engines: {item!r}: the role must be prefill or decode")
            entries.append(_FileEngine(role=role, url=url))  # type: ignore[arg-type]
    else:
        try:
            entries = msgspec.json.decode(Path(text).read_bytes(), type=list[_FileEngine])
        except OSError as exc:
            raise SourceError(f"--engines: {text}: cannot be read: {exc.strerror}") from exc
        except msgspec.DecodeError as exc:
            raise SourceError(f"--engines: {text}: {exc}") from exc
    return FixedSource(tuple(_backend(entry, control_port) for entry in entries))


def _backend(entry: _FileEngine, control_port: int) -> Backend:
    url = urlsplit(entry.url)
    try:
        port = url.port or 80
        own_control = int(url.fragment) if url.fragment else 0
    except ValueError as exc:
        raise SourceError(f"--engines: {entry.url!r}: {exc}") from exc
    if url.scheme != "http" or not url.hostname or url.path not in ("", "/"):
        raise SourceError(f"--engines: {entry.url!r}: expected http://HOST:PORT")
    return Backend(
        name=entry.name or f"{entry.role}-{url.hostname}-{port}",
        role=entry.role,
        revision=entry.revision,
        address=Address(url.hostname, port),
        control_port=entry.control_port or own_control or control_port,
        zone=entry.zone,
    )


# -- Kubernetes ----------------------------------------------------------------------------------------------


class SliceApi(Protocol):
    """The two calls that discovery needs of an API server. Objects are plain JSON."""

    async def list(self) -> tuple[list[dict[str, Any]], str]:
        """All slices of the DisaggInference, and the version of that list."""

    def watch(self, version: str) -> AsyncIterator[dict[str, Any]]:
        """Watch events after `version`. Ends when the server ends it; raises if it breaks."""


class ExpiredError(Exception):
    """The version to watch from is too old (410): list again."""


class SliceSource:
    """Lists, then watches, and lists again when a watch ends, expires or breaks.

    While the API server cannot be reached the engines stay as last seen: a turn to a pod that is gone fails over, whereas
    an empty list would refuse every turn.
    """

    def __init__(
        self,
        api: SliceApi,
        engine_port: int,
        control_port: int,
        on_error: Callable[[str], None],
        on_slices: Callable[[Iterable[Mapping[str, Any]]], None] = lambda slices: None,
    ) -> None:
        """`on_slices` gets all slices before the engines in them are published: those of the router itself are among them."""
        self._api = api
        self._ports = (engine_port, control_port)
        self._on_error = on_error
        self._on_slices = on_slices
        self._failures = 0

    async def run(self, publish: Publish) -> None:
        while True:
            try:
                await self._list_and_watch(publish)
            except ExpiredError:
                self._on_error("expired")
            except Exception as exc:
                self._on_error(type(exc).__name__)
                pause = self.pause()
                _log.warning("watching the engines failed; again in %.1f s: %s", pause, exc)
                await asyncio.sleep(pause)

    async def _list_and_watch(self, publish: Publish) -> None:
        items, version = await self._api.list()
        slices = {item["metadata"]["name"]: item for item in items}
        self._tell(slices.values(), publish)
        async for event in self._api.watch(version):
            self._failures = 0
            item = event["object"]
            if event["type"] == "BOOKMARK":
                continue
            if event["type"] == "DELETED":
                slices.pop(item["metadata"]["name"], None)
            else:
                slices[item["metadata"]["name"]] = item
            self._tell(slices.values(), publish)
        self._failures = 0

    def _tell(self, slices: Collection[Mapping[str, Any]], publish: Publish) -> None:
        self._on_slices(slices)
        publish(from_slices(slices, *self._ports))

    def pause(self) -> float:
        """Seconds to wait after a failure: growing, bounded, and scattered so that routers do not come back as one."""
        least, most = _BACKOFF_SECONDS
        pause = min(most, least * 2.0**self._failures)
        self._failures = min(self._failures + 1, 10)
        return pause * random.uniform(0.5, 1.0)


class KubernetesSlices:
    """`SliceApi` on a cluster, by the pod's service account or a kubeconfig."""

    def __init__(self, namespace: str, name: str) -> None:
        # Imported here: outside of a cluster the router runs without loading the client, which is large.
        from kubernetes.aio import client

        self._namespace = namespace
        self._selector = f"{LABEL_NAME}={name}"
        self._client = client.ApiClient()
        self._discovery = client.DiscoveryV1Api(self._client)

    @classmethod
    async def connect(cls, namespace: str, name: str) -> KubernetesSlices:
        """By the pod's service account, else by a kubeconfig. Raises SourceError if there is neither."""
        from kubernetes.aio import config

        try:
            config.load_incluster_config()  # type: ignore[no-untyped-call]
        except config.ConfigException:
            try:
                await config.load_kube_config()  # type: ignore[no-untyped-call]
            except config.ConfigException as exc:
                raise SourceError(
                    f"neither a service account nor a kubeconfig to find engines with ({exc}); "
                    "outside of Kubernetes give the engines with --engines"
                ) from exc
        return cls(namespace, name)

    async def list(self) -> tuple[list[dict[str, Any]], str]:
        response = await self._discovery.list_namespaced_endpoint_slice_without_preload_content(
            self._namespace, label_selector=self._selector, _request_timeout=30.0
        )
        async with response:
            body = json.loads(await response.read())
            if response.status != 200:
                raise OSError(f"listing EndpointSlices: {response.status} {body.get('message', '')}")
        return body.get("items") or [], body["metadata"]["resourceVersion"]

    async def watch(self, version: str) -> AsyncIterator[dict[str, Any]]:
        response = await self._discovery.list_namespaced_endpoint_slice_without_preload_content(
            self._namespace,
            label_selector=self._selector,
            watch=True,
            resource_version=version,
            allow_watch_bookmarks=True,
            timeout_seconds=_WATCH_SECONDS,
            _request_timeout=float(_WATCH_SECONDS + 15),
        )
        async with response:
            if response.status == 410:
                raise ExpiredError
            if response.status != 200:
                raise OSError(f"watching EndpointSlices: HTTP {response.status}")
            pending = b""
            async for piece in response.content.iter_any():
                *lines, pending = (pending + piece).split(b"\n")
                for line in lines:
                    if line.strip():
                        yield _checked(json.loads(line))

    async def close(self) -> None:
        await self._client.close()  # type: ignore[no-untyped-call]


def _checked(event: dict[str, Any]) -> dict[str, Any]:
    if event.get("type") != "ERROR":
        return event
    status = event.get("object") or {}
    if status.get("code") == 410:
        raise ExpiredError
    raise OSError(f"watching EndpointSlices: {status.get('code')} {status.get('message')}")
