"""The API server, as far as the operator needs it; the only module that imports the Kubernetes client.

Objects are plain JSON data: the client's generated models cost memory and add nothing. Every failure leaves here as a
KubeError that says what was being done.
"""

import asyncio
import json
import logging
import os
import random
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
from kubernetes.aio.client import ApiClient, Configuration
from kubernetes.aio.config import load_incluster_config, load_kube_config

from .api.base import GROUP, VERSION
from .errors import GoneError, KubeError, RefusedError, UnavailableError, classify
from .naming import (
    FIELD_MANAGER,
    KIND,
    LABEL_MANAGED_BY,
    LABEL_NAME,
    PLURAL,
    SCALER_KIND,
    SCALER_PLURAL,
    Manifest,
)

_log = logging.getLogger(__name__)
_APPLY = "application/apply-patch+yaml"
_METADATA_ONLY = "application/json;as={kind};g=meta.k8s.io;v=v1,application/json"
_REQUEST_SECONDS = 30.0
_WATCH_SECONDS = 300
_PAGE = 500
_CONNECTIONS = 100
"""At a time, for all but watches."""


@dataclass(frozen=True)
class Resource:
    """Where a kind lives in the API."""

    group_version: str
    plural: str

    def path(self, namespace: str | None, name: str | None = None) -> str:
        """The URL's path of a collection, or of one object."""
        root = f"/apis/{self.group_version}" if "/" in self.group_version else f"/api/{self.group_version}"
        parts = [root]
        if namespace is not None:
            parts.append(f"namespaces/{quote(namespace)}")
        parts.append(self.plural)
        if name is not None:
            parts.append(quote(name))
        return "/".join(parts)


RESOURCES: Mapping[str, Resource] = {
    KIND: Resource(f"{GROUP}/{VERSION}", PLURAL),
    SCALER_KIND: Resource(f"{GROUP}/{VERSION}", SCALER_PLURAL),
    "StatefulSet": Resource("apps/v1", "statefulsets"),
    "Deployment": Resource("apps/v1", "deployments"),
    "Service": Resource("v1", "services"),
    "ServiceAccount": Resource("v1", "serviceaccounts"),
    "ConfigMap": Resource("v1", "configmaps"),
    "Secret": Resource("v1", "secrets"),
    "Role": Resource("rbac.authorization.k8s.io/v1", "roles"),
    "RoleBinding": Resource("rbac.authorization.k8s.io/v1", "rolebindings"),
    "PodDisruptionBudget": Resource("policy/v1", "poddisruptionbudgets"),
    "Pod": Resource("v1", "pods"),
    "Event": Resource("v1", "events"),
    "Lease": Resource("coordination.k8s.io/v1", "leases"),
}
CHILD_KINDS = tuple(kind for kind in RESOURCES if kind not in (KIND, "Event", "Lease", "Secret"))
"""What a DisaggInference's children and their pods are; listed in every pass, watched all the time. Secrets are not: who
may list them may read every password of the namespace. Ours is read by its name."""


async def connect(watched: int = 1) -> "Kube":
    """A client with the credentials of KUBECONFIG if that is set, else of the pod, else of ~/.kube/config.

    `watched` is in how many namespaces children are watched, or 1 for all together.
    """
    configuration = Configuration()
    # A watch never gives its connection back: whatever else is asked would wait for one for ever.
    configuration.connection_pool_maxsize = _CONNECTIONS + watched * len(CHILD_KINDS)
    if not os.environ.get("KUBECONFIG") and os.environ.get("KUBERNETES_SERVICE_HOST"):
        load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
    else:
        await load_kube_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
    return Kube(ApiClient(configuration))


async def connect_as_person(context: str | None) -> tuple["Kube", str]:
    """A client with the credentials of a context of the kubeconfig, by default its current one, and that context's namespace.

    The kubeconfig is where kubectl has it. Raises RefusedError if it cannot be used.
    """
    paths = _kubeconfig()
    configuration = Configuration()
    try:
        loaded = await load_kube_config(  # type: ignore[no-untyped-call]
            paths, context, client_configuration=configuration, persist_config=False
        )
        namespace = loaded.current_context["context"].get("namespace") or "default"
        return Kube(ApiClient(configuration)), str(namespace)
    except Exception as error:  # what it holds is anybody's, and the client does not check it
        raise RefusedError(f"use the kubeconfig {paths}", str(error) or type(error).__name__) from error


def _kubeconfig() -> str:
    """Paths, as KUBECONFIG has them."""
    paths = os.environ.get("KUBECONFIG") or str(Path.home() / ".kube" / "config")
    if not any(Path(path).expanduser().is_file() for path in paths.split(os.pathsep)):
        raise RefusedError(f"use the kubeconfig {paths}", "there is no such file")
    return paths


class Kube:
    """A thin client: get, list, apply, delete, watch."""

    def __init__(self, client: ApiClient) -> None:
        self._client = client
        client.user_agent = FIELD_MANAGER

    async def close(self) -> None:
        """Closes the connections."""
        await self._client.close()  # type: ignore[no-untyped-call]

    async def get(self, kind: str, namespace: str, name: str) -> Manifest | None:
        """The object, or None."""
        try:
            return await self._call(
                f"read {kind} {namespace}/{name}", "GET", RESOURCES[kind].path(namespace, name)
            )
        except GoneError:
            return None

    async def children(self, namespace: str, name: str) -> list[Manifest]:
        """All objects of CHILD_KINDS that carry the name label, with apiVersion and kind filled in."""
        label = f"{LABEL_NAME}={name}"
        found = await asyncio.gather(
            *(self._list(kind, namespace, labelSelector=label) for kind in CHILD_KINDS)
        )
        return [item for items in found for item in items]

    async def serves(self, kind: str) -> bool:
        """Whether the API server knows the kind: a CRD may be installed after the operator."""
        resource = RESOURCES[kind]
        try:
            answer = await self._call(f"look for {kind}", "GET", f"/apis/{resource.group_version}")
        except GoneError:
            return False
        return any(found["name"] == resource.plural for found in answer["resources"])

    async def events(self, kind: str, namespace: str, name: str) -> list[Manifest]:
        """The events about one object; the API server keeps them for an hour or so."""
        about = f"involvedObject.kind={kind},involvedObject.name={name}"
        return await self._list("Event", namespace, fieldSelector=about)

    async def apply(self, manifest: Manifest, *, status: bool = False) -> Manifest:
        """Server-side apply as FIELD_MANAGER; takes over the fields named in `manifest`, touches no others.

        A `metadata.uid` in it makes sure that the object is still the one that was looked at.
        """
        kind, meta = manifest["kind"], manifest["metadata"]
        path = RESOURCES[kind].path(meta["namespace"], meta["name"]) + ("/status" if status else "")
        doing = f"{'write status of' if status else 'apply'} {kind} {meta['namespace']}/{meta['name']}"
        query = {"fieldManager": FIELD_MANAGER, "force": "true", "fieldValidation": "Strict"}
        return await self._call(doing, "PATCH", path, query, manifest, content_type=_APPLY)

    async def create(self, manifest: Manifest) -> Manifest:
        """Creates an object; fails if it exists."""
        kind, namespace = manifest["kind"], manifest["metadata"]["namespace"]
        path = RESOURCES[kind].path(namespace)
        return await self._call(
            f"create {kind} in {namespace}", "POST", path, {"fieldManager": FIELD_MANAGER}, manifest
        )

    async def replace(self, manifest: Manifest) -> Manifest:
        """Replaces an object; fails if its resourceVersion is no longer that of the one there."""
        kind, meta = manifest["kind"], manifest["metadata"]
        path = RESOURCES[kind].path(meta["namespace"], meta["name"])
        doing = f"update {kind} {meta['namespace']}/{meta['name']}"
        return await self._call(doing, "PUT", path, {"fieldManager": FIELD_MANAGER}, manifest)

    async def delete(self, kind: str, namespace: str, name: str, uid: str) -> None:
        """Deletes exactly the object with this uid, and its dependents in the background; none is fine."""
        body = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "propagationPolicy": "Background",
            "preconditions": {"uid": uid},
        }
        try:
            path = RESOURCES[kind].path(namespace, name)
            await self._call(f"delete {kind} {namespace}/{name}", "DELETE", path, body=body)
        except GoneError:
            pass

    async def watch(self, kind: str, namespace: str | None) -> AsyncIterator[Manifest]:
        """The metadata of every object of `kind` that this operator manages, at first and then at every change.

        Endless: outages are waited out. Only labels and names travel, and only of our own objects: a cluster may have
        ten thousand pods of others.
        """
        pause = 0.0
        version: str | None = None
        while True:
            try:
                if version is None:
                    async for item, at in self._list_metadata(kind, namespace):
                        version = at
                        if item is not None:
                            yield item
                async for item in self._watch_once(kind, namespace, version or "0"):
                    version = item["resourceVersion"]
                    if "name" in item:
                        yield item
                pause = 0.0  # the server ends every watch after a while
            except KubeError as error:
                # List again if our version is too old to continue from, or if the server may have been restored from a
                # backup in the meantime.
                if error.status == 410 or pause >= 8:
                    version = None
                pause = min(max(2 * pause, 0.5), 30.0)
                _log.warning("%s; trying again in %.1f s", error, pause)
                await asyncio.sleep(pause * random.uniform(0.8, 1.2))

    async def _list(self, kind: str, namespace: str, **query: str) -> list[Manifest]:
        resource = RESOURCES[kind]
        doing = f"list {resource.plural} in {namespace}"
        answer = await self._call(doing, "GET", resource.path(namespace), query)
        return [
            {"apiVersion": resource.group_version, "kind": kind, **item} for item in answer["items"] or []
        ]

    async def _list_metadata(
        self, kind: str, namespace: str | None
    ) -> AsyncIterator[tuple[Manifest | None, str]]:
        """Every managed object's metadata with the list's version; (None, version) for an empty list."""
        query = {"labelSelector": f"{LABEL_MANAGED_BY}={FIELD_MANAGER}", "limit": str(_PAGE)}
        accept = _METADATA_ONLY.format(kind="PartialObjectMetadataList")
        while True:
            doing = f"list {RESOURCES[kind].plural}"
            answer = await self._call(doing, "GET", RESOURCES[kind].path(namespace), query, accept=accept)
            version = answer["metadata"]["resourceVersion"]
            for item in answer["items"] or []:
                yield item["metadata"], version
            if not answer["metadata"].get("continue"):
                yield None, version
                return
            query["continue"] = answer["metadata"]["continue"]

    async def _watch_once(self, kind: str, namespace: str | None, version: str) -> AsyncIterator[Manifest]:
        """Metadata of changes after `version` until the server ends the watch; a bookmark has no name."""
        doing = f"watch {RESOURCES[kind].plural}"
        query = {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(int(_WATCH_SECONDS * random.uniform(0.8, 1.2))),
            "labelSelector": f"{LABEL_MANAGED_BY}={FIELD_MANAGER}",
        }
        accept = _METADATA_ONLY.format(kind="PartialObjectMetadata")
        limits = aiohttp.ClientTimeout(
            total=None, sock_connect=_REQUEST_SECONDS, sock_read=2 * _WATCH_SECONDS
        )
        response = await self._send(
            doing, "GET", RESOURCES[kind].path(namespace), query, accept=accept, limits=limits
        )
        try:
            async for line in response.content:
                event = json.loads(line)
                if event["type"] == "ERROR":
                    status = event["object"]
                    raise classify(doing, status.get("code"), status.get("message", "watch ended"))
                meta: Manifest = event["object"]["metadata"]
                if event["type"] == "BOOKMARK":
                    meta = {"resourceVersion": meta["resourceVersion"]}
                yield meta
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise UnavailableError(doing, str(error) or type(error).__name__) from error
        finally:
            response.close()

    async def _call(
        self,
        doing: str,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: Any = None,
        **options: Any,
    ) -> Manifest:
        response = await self._send(doing, method, path, query, body, **options)
        try:
            answer: Manifest = await response.json()
            return answer
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise UnavailableError(doing, str(error) or type(error).__name__) from error

    async def _send(
        self,
        doing: str,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: Any = None,
        *,
        accept: str = "application/json",
        content_type: str = "application/json",
        limits: aiohttp.ClientTimeout | None = None,
    ) -> aiohttp.ClientResponse:
        """Sends a request and returns the open response of a success; raises KubeError otherwise."""
        headers = {"Accept": accept, "Content-Type": content_type}
        try:
            method, url, headers, body, _ = await self._client.param_serialize(
                method,
                path,
                query_params=list((query or {}).items()),
                header_params=headers,
                body=body,
                auth_settings=["BearerToken"],
            )
            wrapped = await self._client.call_api(
                method,
                url,
                headers,
                body,
                _request_timeout=limits or aiohttp.ClientTimeout(total=_REQUEST_SECONDS),
            )
            response: aiohttp.ClientResponse = wrapped.response
            if response.status < 300:
                return response
            text = await response.text()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise UnavailableError(doing, str(error) or type(error).__name__) from error
        raise classify(doing, response.status, _message(text))


def _message(text: str) -> str:
    """The `message` of a Status object, or the text itself."""
    try:
        return str(json.loads(text)["message"])
    except (ValueError, KeyError, TypeError):
        return text.strip()[:500] or "no answer"
