"""Services: one headless for each role and revision, and the router's, which clients call."""

from ..api.transfer import TransferMode
from ..api.types import Router
from ..naming import (
    CONTROL_PORT,
    HTTP_PORT,
    LABEL_MODE,
    SIDE_CHANNEL_PORT,
    Component,
    Manifest,
    engine_name,
    labels,
    role_name,
    selector,
)


def build_engine_service(
    name: str, namespace: str, component: Component, revision: str, mode: TransferMode
) -> Manifest:
    """The headless Service whose EndpointSlices the router watches; its labels are copied to them.

    Among them the mode, which is one of the revision: the router has to speak to each revision's engines in their own.
    """
    ports = (("http", HTTP_PORT), ("side-channel", SIDE_CHANNEL_PORT), ("control", CONTROL_PORT))
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {
            "name": engine_name(name, component, revision),
            "namespace": namespace,
            "labels": {**labels(name, component, revision), LABEL_MODE: str(mode)},
        },
        "spec": {
            "clusterIP": "None",
            "selector": selector(name, component, revision),
            "ports": [{"name": port_name, "port": port, "protocol": "TCP"} for port_name, port in ports],
        },
    }


def build_router_service(name: str, namespace: str, router: Router) -> Manifest:
    """The Service that clients call. Gateways and meshes read from its port what is spoken there."""
    service = router.service
    port: Manifest = {"name": "http", "port": service.port, "targetPort": "http", "protocol": "TCP"}
    if router.tls:
        port |= {"name": "https", "appProtocol": "https"}
    metadata: Manifest = {
        "name": role_name(name, Component.ROUTER),
        "namespace": namespace,
        "labels": labels(name, Component.ROUTER),
    }
    if service.annotations:
        metadata["annotations"] = dict(service.annotations)
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata,
        "spec": {
            "type": str(service.type),
            "selector": selector(name, Component.ROUTER),
            "ports": [port],
        },
    }
