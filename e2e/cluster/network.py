"""The cluster's network: one flat /16 made of network namespaces, bridges and veth pairs.

    host 10.88.0.2 ── br0 of disagg-cp (10.88.0.1) ──┬── br0 of disagg-node1 (10.88.1.1) ── pods 10.88.65.x
                                                     └── br0 of disagg-node2 (10.88.1.2) ── pods 10.88.66.x

Nothing of the host's own network is changed and nothing can leave the machine: no namespace has a default route.
The host reaches pods directly, and Services through the control plane, whose kube-proxy translates for it.
"""

import ipaddress
import json
import os
from dataclasses import dataclass
from pathlib import Path

from e2e.cluster.errors import ClusterError
from e2e.cluster.layout import Layout
from e2e.cluster.shell import in_netns, run

DEFAULT_PREFIX = "10.88"
MAX_NODES = 40
_BRIDGE_FILTER = Path("/proc/sys/net/bridge/bridge-nf-call-iptables")


@dataclass(frozen=True)
class Network:
    """The addresses of a cluster, all derived from the first two bytes of its /16."""

    prefix: str = DEFAULT_PREFIX

    @classmethod
    def configured(cls) -> "Network":
        """`$DISAGG_CLUSTER_NETWORK` ("10.88") or the default.

        Raises:
            ClusterError: it is not the first two bytes of a private IPv4 network.
        """
        prefix = os.environ.get("DISAGG_CLUSTER_NETWORK") or DEFAULT_PREFIX
        try:
            network = ipaddress.ip_network(f"{prefix}.0.0/16")
        except ValueError as error:
            raise ClusterError(
                f'DISAGG_CLUSTER_NETWORK={prefix}: want two bytes such as "10.88" ({error}).'
            ) from error
        if not network.is_private:
            raise ClusterError(f"DISAGG_CLUSTER_NETWORK={prefix}: {network} is not a private network.")
        return cls(prefix)

    @property
    def cidr(self) -> str:
        """Everything."""
        return f"{self.prefix}.0.0/16"

    @property
    def control_plane(self) -> str:
        """The API server and the DNS server."""
        return f"{self.prefix}.0.1"

    @property
    def host(self) -> str:
        """The host's own address in the cluster's network."""
        return f"{self.prefix}.0.2"

    @property
    def pods(self) -> str:
        """Pods of all nodes."""
        return f"{self.prefix}.64.0/18"

    @property
    def services(self) -> str:
        """Cluster IPs."""
        return f"{self.prefix}.128.0/20"

    @property
    def dns(self) -> str:
        """The cluster IP of kube-dns."""
        return f"{self.prefix}.128.10"

    @property
    def fake_pods(self) -> str:
        """Addresses of pods on fake nodes; nothing answers there."""
        return f"{self.prefix}.112.0/20"

    def node(self, index: int) -> str:
        """A node's own address."""
        return f"{self.prefix}.1.{index}"

    def node_pods(self, index: int) -> tuple[str, str]:
        """First and last address of a node's pods."""
        return f"{self.prefix}.{64 + index}.10", f"{self.prefix}.{64 + index}.250"


def overlapping_routes(layout: Layout, network: Network) -> list[str]:
    """The host's routes that overlap the cluster's network, less those of our own link."""
    ours = ipaddress.ip_network(network.cidr)
    routes = json.loads(
        run(["ip", "-json", "-4", "route", "show", "table", "all"], "Reading the routes") or "[]"
    )
    found = []
    for route in routes:
        destination = route.get("dst", "default")
        if destination == "default" or route.get("dev") == layout.host_link:
            continue
        if ipaddress.ip_network(destination, strict=False).overlaps(ours):
            found.append(f"{destination} dev {route.get('dev', '?')}")
    return found


def bridged_traffic_is_filtered() -> bool:
    """Whether the kernel passes bridged packets to nftables (br_netfilter).

    Without it the answer of a Service's pod on the same bridge bypasses the translation, and kube-proxy must
    masquerade everything.
    """
    return _BRIDGE_FILTER.exists()


def make_control_plane_namespace(layout: Layout, network: Network) -> None:
    """The namespace of the control plane with the central bridge, and the host's link into it."""
    ns, link = layout.control_plane_netns, layout.host_link
    run(["ip", "netns", "add", ns], "Making the control plane's network namespace")
    _batch(
        ns,
        "link set lo up",
        "link add br0 type bridge",
        f"addr add {network.control_plane}/16 dev br0",
        "link set br0 up",
    )
    _batch(None, f"link add {link} type veth peer name host0 netns {ns}")
    _batch(ns, "link set host0 master br0 up")
    _batch(None, f"addr add {network.host}/16 dev {link}", f"link set {link} up")


def route_services_through_control_plane(layout: Layout, network: Network) -> None:
    """Let the host reach cluster IPs.

    Not through a node: what enters a node's bridge by its uplink for a pod of another node would have to leave by the
    uplink again, and a bridge never sends a frame back to the port it came from.
    """
    ns = layout.control_plane_netns
    forwarding = in_netns(ns, ["sh", "-ec", "echo 1 > /proc/sys/net/ipv4/ip_forward"])
    run(forwarding, "Switching on forwarding in the control plane")
    _batch(None, f"route replace {network.services} via {network.control_plane} dev {layout.host_link}")


def make_node_namespace(layout: Layout, network: Network, index: int) -> None:
    """A node's namespace: its bridge, the uplink to the central bridge, forwarding switched on."""
    ns = layout.node(index).netns
    run(["ip", "netns", "add", ns], f"Making the network namespace of node{index}")
    _batch(
        ns,
        "link set lo up",
        "link add br0 type bridge",
        f"addr add {network.node(index)}/16 dev br0",
        "link set br0 up",
        # An address of the service range without a rule must die here, not wander to another node.
        f"route add {network.services} dev br0",
    )
    _batch(layout.control_plane_netns, f"link add n{index} type veth peer name up0 netns {ns}")
    _batch(layout.control_plane_netns, f"link set n{index} master br0 up")
    _batch(ns, "link set up0 master br0 up")
    settings = {"ipv4/ip_forward": "1"}
    if bridged_traffic_is_filtered():
        settings["bridge/bridge-nf-call-iptables"] = "1"
    script = "; ".join(f"echo {value} > /proc/sys/net/{name}" for name, value in settings.items())
    run(in_netns(ns, ["sh", "-ec", script]), f"Switching on forwarding in node{index}")


def _batch(ns: str | None, *commands: str) -> None:
    argv = ["ip", *(["-n", ns] if ns else []), "-batch", "-"]
    where = f"namespace {ns}" if ns else "the host"
    run(argv, f"Setting up the network of {where}", stdin="\n".join(commands) + "\n")
