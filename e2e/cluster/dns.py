"""Cluster DNS: CoreDNS beside the API server, published as the Service kube-dns."""

from pathlib import Path
from typing import Any

from e2e.cluster.layout import Layout
from e2e.cluster.network import Network

READY_PORT = 8181


def corefile(layout: Layout, network: Network) -> str:
    """CoreDNS's configuration: cluster names alone, since nothing can leave the machine."""
    return f"""\
.:53 {{
    bind {network.control_plane}
    ready {network.control_plane}:{READY_PORT}
    errors
    kubernetes cluster.local in-addr.arpa {{
        kubeconfig {layout.client_config("coredns")}
        pods insecure
        ttl 1
    }}
}}
"""


def command(program: Path, layout: Layout, network: Network) -> list[str | Path]:
    """The command that runs CoreDNS; writes its configuration first."""
    path = layout.run / "Corefile"
    path.write_text(corefile(layout, network))
    return [program, "-conf", path]


def manifests(network: Network) -> list[dict[str, Any]]:
    """The Service, its only endpoint, and what CoreDNS may read."""
    ports = [
        {"name": "dns", "port": 53, "protocol": "UDP"},
        {"name": "dns-tcp", "port": 53, "protocol": "TCP"},
    ]
    return [
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "kube-dns", "namespace": "kube-system"},
            "spec": {"clusterIP": network.dns, "ports": ports},
        },
        {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {
                "name": "kube-dns-local",
                "namespace": "kube-system",
                "labels": {"kubernetes.io/service-name": "kube-dns"},
            },
            "addressType": "IPv4",
            "ports": ports,
            "endpoints": [{"addresses": [network.control_plane], "conditions": {"ready": True}}],
        },
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "ClusterRole",
            "metadata": {"name": "disagg:coredns"},
            "rules": [
                {
                    "apiGroups": [""],
                    "resources": ["services", "pods", "namespaces", "endpoints"],
                    "verbs": ["list", "watch"],
                },
                {
                    "apiGroups": ["discovery.k8s.io"],
                    "resources": ["endpointslices"],
                    "verbs": ["list", "watch"],
                },
            ],
        },
    ]
