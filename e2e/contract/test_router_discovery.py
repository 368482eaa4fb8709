"""The router finds engines at a real API server, with the rights that the operator gives it and no others."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes.aio import client, config

from disagg_operator.build.rbac import build_role, build_role_binding, build_service_account
from disagg_operator.naming import Component, Manifest, labels
from disagg_router.backends import Backend
from disagg_router.discovery import KubernetesSlices, SliceSource
from e2e.apiserver import ApiServer, api_server
from e2e.cluster.shell import wait_until

pytestmark = pytest.mark.cluster

NAME, NAMESPACE = "smollm2", "default"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    with api_server(tmp_path_factory.mktemp("router-apiserver")) as running:
        for manifest in (
            build_service_account(NAME, NAMESPACE),
            build_role(NAME, NAMESPACE),
            build_role_binding(NAME, NAMESPACE),
        ):
            applied = running.apply(manifest)
            assert applied.ok, applied.stderr
        account = f"--as=system:serviceaccount:{NAMESPACE}:{NAME}-router"
        asked = ("auth", "can-i", "watch", "endpointslices.discovery.k8s.io", f"--namespace={NAMESPACE}")
        wait_until(
            lambda: running.kubectl(*asked, account).ok, "the API server to know the rights", limit=120
        )
        yield running


@pytest.fixture(scope="module")
def router_kubeconfig(server: ApiServer) -> Path:
    """A kubeconfig with the token of the router's own service account."""
    token = server.kubectl("create", "token", f"{NAME}-router", f"--namespace={NAMESPACE}")
    assert token.ok, token.stderr
    content = yaml.safe_load(server.kubeconfig.read_text())
    content["users"] = [{"name": "admin", "user": {"token": token.stdout.strip()}}]
    path = server.kubeconfig.with_name("router.kubeconfig")
    path.write_text(yaml.safe_dump(content))
    return path


@asynccontextmanager
async def slices_of(kubeconfig: Path) -> AsyncIterator[KubernetesSlices]:
    await config.load_kube_config(config_file=str(kubeconfig))  # type: ignore[no-untyped-call]
    slices = KubernetesSlices(NAMESPACE, NAME)
    try:
        yield slices
    finally:
        await slices.close()
        client.Configuration.set_default(None)


@dataclass
class Seen:
    """What a running source has published."""

    now: dict[str, Backend] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)

    def publish(self, backends: tuple[Backend, ...]) -> None:
        self.now = {backend.name: backend for backend in backends}

    async def until(
        self, holds: Callable[[dict[str, Backend]], bool], what: str, seconds: float = 120.0
    ) -> None:
        for _ in range(int(seconds / 0.02)):
            if holds(self.now):
                return
            await asyncio.sleep(0.02)
        pytest.fail(f"not within {seconds} s: {what}; seen {self.now}, errors {self.errors}")


def piece(
    component: Component, pods: dict[str, str], revision: str = "0a1b2c3d", **condition: bool
) -> Manifest:
    """An EndpointSlice as the controller makes it of the operator's headless Service."""
    name = f"{NAME}-{component}-{revision}"
    own = {"kubernetes.io/service-name": name, "endpointslice.kubernetes.io/managed-by": "test"}
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {
            "name": f"{name}-x7f9k",
            "namespace": NAMESPACE,
            "labels": {**labels(NAME, component, revision), **own},
        },
        "addressType": "IPv4",
        "endpoints": [
            {
                "addresses": [address],
                "conditions": {"ready": True, "serving": True, "terminating": False, **condition},
                "targetRef": {"kind": "Pod", "namespace": NAMESPACE, "name": pod},
                "zone": "eu-central-1a",
            }
            for pod, address in pods.items()
        ],
        "ports": [{"name": "http", "port": 8000, "protocol": "TCP"}],
    }


def put(server: ApiServer, manifest: dict[str, Any]) -> None:
    applied = server.apply(manifest)
    assert applied.ok, applied.stderr


async def test_engines_are_followed_as_the_api_server_tells_of_them(
    server: ApiServer, router_kubeconfig: Path
) -> None:
    seen = Seen()
    async with slices_of(router_kubeconfig) as slices:
        source = SliceSource(slices, 8000, 5700, seen.errors.append)
        task = asyncio.create_task(source.run(seen.publish))
        try:
            await asyncio.to_thread(put, server, piece(Component.PREFILL, {"p-0": "10.0.0.1"}))
            await asyncio.to_thread(
                put, server, piece(Component.DECODE, {"d-0": "10.0.1.1", "d-1": "10.0.1.2"})
            )
            await seen.until(lambda now: set(now) == {"p-0", "d-0", "d-1"}, "all three engines are seen")
            assert (seen.now["p-0"].role, seen.now["d-1"].role) == ("prefill", "decode")
            assert {b.revision for b in seen.now.values()} == {"0a1b2c3d"}
            assert all(b.takes_turns and b.zone == "eu-central-1a" for b in seen.now.values())

            leaving = piece(Component.DECODE, {"d-0": "10.0.1.1"}, ready=False, terminating=True)
            await asyncio.to_thread(put, server, leaving)
            await seen.until(lambda now: set(now) == {"p-0", "d-0"}, "d-1 is gone")
            assert seen.now["d-0"].state == "terminating"

            other = piece(Component.ROUTER, {"r-0": "10.0.2.1"})
            stranger = piece(Component.DECODE, {"x-0": "10.0.3.1"}, revision="ffffffff")
            stranger["metadata"]["labels"]["inference.disagg.dev/name"] = "another"
            await asyncio.to_thread(put, server, other)
            await asyncio.to_thread(put, server, stranger)
            gone = await asyncio.to_thread(
                server.kubectl,
                "delete",
                "endpointslice",
                leaving["metadata"]["name"],
                f"--namespace={NAMESPACE}",
            )
            assert gone.ok, gone.stderr
            await seen.until(lambda now: set(now) == {"p-0"}, "only prefill is left")
            assert seen.errors == []
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def test_without_the_right_the_refusal_says_so(server: ApiServer, router_kubeconfig: Path) -> None:
    async with slices_of(router_kubeconfig) as slices:
        elsewhere = KubernetesSlices("kube-system", NAME)
        with pytest.raises(OSError, match=r"403 .*cannot list resource .*endpointslices"):
            await elsewhere.list()
        await elsewhere.close()
        items, version = await slices.list()
        assert int(version) > 0
        assert all(item["metadata"]["labels"]["inference.disagg.dev/name"] == NAME for item in items), (
            json.dumps(items)
        )
