"""Addresses: every range lies in the cluster's /16 and none overlaps another."""

import ipaddress
import itertools

import pytest

from e2e.cluster import ClusterError
from e2e.cluster.network import MAX_NODES, Network


def test_no_range_overlaps_another() -> None:
    network = Network("10.88")
    ranges = {
        "nodes and control plane": ipaddress.IPv4Network("10.88.0.0/23"),
        "services": ipaddress.IPv4Network(network.services),
        "pods": ipaddress.IPv4Network(network.pods),
    }
    for (first, one), (second, other) in itertools.combinations(ranges.items(), 2):
        assert not one.overlaps(other), f"{first} overlap {second}"
    whole = ipaddress.IPv4Network(network.cidr)
    assert all(each.subnet_of(whole) for each in ranges.values())


def test_each_node_has_pod_addresses_of_its_own() -> None:
    network = Network("10.88")
    pods = ipaddress.IPv4Network(network.pods)
    fake = ipaddress.IPv4Network(network.fake_pods)
    seen: set[str] = set()
    for index in range(1, MAX_NODES + 1):
        for address in network.node_pods(index):
            assert ipaddress.ip_address(address) in pods
            assert ipaddress.ip_address(address) not in fake
            assert address not in seen
            seen.add(address)
        assert ipaddress.ip_address(network.node(index)) in ipaddress.IPv4Network("10.88.1.0/24")


def test_the_service_of_the_dns_server_is_a_service_address() -> None:
    network = Network("10.88")
    assert ipaddress.ip_address(network.dns) in ipaddress.IPv4Network(network.services)


@pytest.mark.parametrize("prefix", ["10", "10.88.1", "10.300", "8.8", "x"])
def test_a_bad_network_is_refused_by_name(prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISAGG_CLUSTER_NETWORK", prefix)
    with pytest.raises(ClusterError, match="DISAGG_CLUSTER_NETWORK="):
        Network.configured()


def test_the_network_can_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISAGG_CLUSTER_NETWORK", "172.20")
    assert Network.configured().control_plane == "172.20.0.1"
