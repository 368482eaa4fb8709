"""Certificates and kubeconfigs, made by kubeadm's own phases."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import yaml

from e2e.cluster.layout import Layout
from e2e.cluster.network import Network
from e2e.cluster.recipes import KUBERNETES_VERSION
from e2e.cluster.shell import Word, run

API_PORT = 6443
COMPONENT_USERS = {
    # File name -> user name. Default bindings of the API server exist for the first three.
    "controller-manager": "system:kube-controller-manager",
    "scheduler": "system:kube-scheduler",
    "kube-proxy": "system:kube-proxy",
    "coredns": "system:coredns",
}


def kubeadm_config(layout: Layout, network: Network) -> str:
    """kubeadm's configuration of the cluster as YAML."""
    cluster = {
        "apiVersion": "kubeadm.k8s.io/v1beta4",
        "kind": "ClusterConfiguration",
        "kubernetesVersion": KUBERNETES_VERSION,
        "certificatesDir": str(layout.pki),
        "clusterName": "disagg-local",
        "controlPlaneEndpoint": f"{network.control_plane}:{API_PORT}",
        "networking": {
            "serviceSubnet": network.services,
            "podSubnet": network.pods,
            "dnsDomain": "cluster.local",
        },
        "apiServer": {"certSANs": ["127.0.0.1", network.control_plane]},
    }
    local = {
        "apiVersion": "kubeadm.k8s.io/v1beta4",
        "kind": "InitConfiguration",
        "localAPIEndpoint": {"advertiseAddress": network.control_plane, "bindPort": API_PORT},
        # kubeadm wants a socket even for phases that do not talk to one.
        "nodeRegistration": {"criSocket": "unix:///nonexistent.sock", "name": "control-plane"},
    }
    return yaml.safe_dump_all([cluster, local], sort_keys=False)


def make_certificates(layout: Layout, network: Network, programs: Mapping[str, Path]) -> None:
    """All certificates, and kubeconfigs for the administrator and the control plane's components."""
    layout.run.mkdir(parents=True, exist_ok=True)
    (layout.run / "clients").mkdir(exist_ok=True)
    config = _config_path(layout)
    config.write_text(kubeadm_config(layout, network))
    phase: list[Word] = [programs["kubeadm"], "init", "phase"]
    run([*phase, "certs", "all", "--config", config], "Making the certificates")
    for name in ("admin", "super-admin"):
        command = [*phase, "kubeconfig", name, "--config", config, "--kubeconfig-dir", layout.run / "clients"]
        run(command, f"Making {name}'s kubeconfig")
    layout.client_config("admin").rename(layout.kubeconfig)
    with ThreadPoolExecutor() as pool:
        made = [pool.submit(_client, layout, programs, name, user) for name, user in COMPONENT_USERS.items()]
    for client in made:
        client.result()


def make_node_client(layout: Layout, programs: Mapping[str, Path], node: str) -> None:
    """The kubeconfig with which a kubelet joins."""
    _client(layout, programs, node, f"system:node:{node}", "system:nodes")


def _client(
    layout: Layout, programs: Mapping[str, Path], name: str, user: str, org: str | None = None
) -> None:
    groups = ["--org", org] if org else []
    command: list[Word] = [
        programs["kubeadm"],
        "kubeconfig",
        "user",
        "--config",
        _config_path(layout),
        "--client-name",
        user,
    ]
    made = run([*command, *groups], f"Making the kubeconfig of {user}")
    path = layout.client_config(name)
    path.touch(mode=0o600)
    path.write_text(made)


def _config_path(layout: Layout) -> Path:
    return layout.run / "kubeadm.yaml"
