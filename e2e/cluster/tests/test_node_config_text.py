"""Configuration: it parses, and keeps every path inside the node's own folders."""

import json
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import yaml

from e2e.cluster import dns, kind, node_config, pki
from e2e.cluster.fake_nodes import p5en_node
from e2e.cluster.layout import Layout
from e2e.cluster.network import Network
from e2e.images.recipes import PAUSE

LAYOUT = Layout.named("unit")
NETWORK = Network("10.88")
PROGRAMS = {name: Path("/cache") / name for name in ("bridge", "runc", "kubeadm")}


def strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from strings(each)
    elif isinstance(value, list):
        for each in value:
            yield from strings(each)


def test_containerd_writes_only_below_the_nodes_folders() -> None:
    node = LAYOUT.node(1)
    config = tomllib.loads(node_config.containerd(node, PROGRAMS))
    paths = [text for text in strings(config) if text.startswith("/") and not text.startswith("/cache")]
    assert len(paths) >= 8
    assert all(path.startswith((f"{node.run}/", f"{node.data}/")) for path in paths)
    # The limit of containerd: a shim adds a file name of 64 characters to it, and a socket's path ends at 107.
    assert len(config["plugins"]["io.containerd.shim.v1.manager"]["socket_dir"]) <= 42


def test_containerd_knows_the_pause_image_that_we_build() -> None:
    config = tomllib.loads(node_config.containerd(LAYOUT.node(1), PROGRAMS))
    pinned = config["plugins"]["io.containerd.cri.v1.images"]["pinned_images"]
    assert pinned == {"sandbox": PAUSE.reference}


def test_two_nodes_share_no_path_and_no_address() -> None:
    first, second = LAYOUT.node(1), LAYOUT.node(2)
    texts = [
        (node_config.containerd(node, PROGRAMS), node_config.kubelet(LAYOUT, node, NETWORK, index))
        for index, node in ((1, first), (2, second))
    ]
    assert all(str(second.run) not in text and NETWORK.node(2) not in text for text in texts[0])
    ranges = [
        json.loads(node_config.cni(node, NETWORK, index))["plugins"][0]["ipam"]["ranges"]
        for index, node in ((1, first), (2, second))
    ]
    assert ranges[0] != ranges[1]


def test_each_kubelet_has_a_root_group_of_its_own() -> None:
    roots = {
        yaml.safe_load(node_config.kubelet(LAYOUT, LAYOUT.node(index), NETWORK, index))["cgroupRoot"]
        for index in (1, 2)
    }
    assert roots == {"/unit-node1", "/unit-node2"}


@pytest.mark.parametrize("everything", [True, False])
def test_kube_proxy_masquerades_everything_where_bridges_are_not_filtered(everything: bool) -> None:
    text = node_config.kube_proxy(LAYOUT, LAYOUT.node(1), NETWORK, masquerade_all=everything)
    assert yaml.safe_load(text)["nftables"]["masqueradeAll"] is everything


def test_dns_is_published_at_the_address_that_pods_are_told() -> None:
    service = next(manifest for manifest in dns.manifests(NETWORK) if manifest["kind"] == "Service")
    kubelet = yaml.safe_load(node_config.kubelet(LAYOUT, LAYOUT.node(1), NETWORK, 1))
    assert kubelet["clusterDNS"] == [service["spec"]["clusterIP"]]
    assert f"bind {NETWORK.control_plane}" in dns.corefile(LAYOUT, NETWORK)


def test_the_certificates_are_good_for_the_address_of_the_api_server() -> None:
    cluster, local = yaml.safe_load_all(pki.kubeadm_config(LAYOUT, NETWORK))
    assert NETWORK.control_plane in cluster["apiServer"]["certSANs"]
    assert local["localAPIEndpoint"] == {"advertiseAddress": NETWORK.control_plane, "bindPort": 6443}


def test_kind_mounts_the_cache_where_the_exposed_links_point() -> None:
    config = kind.cluster_config(3, Path("/home/me/cache"), Path("/var/lib/disagg-local"))
    assert [node["role"] for node in config["nodes"]] == ["control-plane", "worker", "worker"]
    for node in config["nodes"]:
        mounts = {mount["hostPath"]: mount["containerPath"] for mount in node["extraMounts"]}
        assert mounts == {path: path for path in ("/home/me/cache", "/var/lib/disagg-local")}
        assert node["labels"]["topology.kubernetes.io/zone"] == node_config.ZONE


def test_fake_nodes_have_the_shape_of_p5en_and_two_zones() -> None:
    nodes = [p5en_node(index) for index in range(4)]
    for node in nodes:
        assert node["status"]["allocatable"]["nvidia.com/gpu"] == "8"
        assert node["status"]["allocatable"]["vpc.amazonaws.com/efa"] == "16"
        assert node["metadata"]["labels"]["node.kubernetes.io/instance-type"] == "p5en.48xlarge"
    zones = [node["metadata"]["labels"]["topology.kubernetes.io/zone"] for node in nodes]
    assert zones == ["us-west-2a"] * 3 + ["us-west-2b"]
