"""One node: containerd, kubelet and kube-proxy in a network namespace and a control group of their own."""

from collections.abc import Mapping
from pathlib import Path

from e2e.cluster import cgroups, node_config
from e2e.cluster.daemons import Daemon, Daemons, require_alive
from e2e.cluster.errors import CommandError
from e2e.cluster.kubectl import Kubectl
from e2e.cluster.layout import Layout
from e2e.cluster.network import Network, bridged_traffic_is_filtered, make_node_namespace
from e2e.cluster.pki import make_node_client
from e2e.cluster.shell import Word, in_netns, run, wait_until

_LIMIT_SECONDS = 300


def start_runtime(
    layout: Layout, network: Network, index: int, programs: Mapping[str, Path], daemons: Daemons
) -> Daemon:
    """Make the node's namespace and group, start containerd and wait until it answers. Needs no API server."""
    node = layout.node(index)
    make_node_namespace(layout, network, index)
    cgroups.make(node.netns)
    (node.run / "cni").mkdir(parents=True, exist_ok=True)
    node.data.mkdir(parents=True, exist_ok=True)
    (node.run / "config.toml").write_text(node_config.containerd(node, programs))
    (node.run / "cni" / "10-disagg.conflist").write_text(node_config.cni(node, network, index))
    (node.run / "resolv.conf").write_text(f"nameserver {network.dns}\n")
    containerd = daemons.start(
        f"{node.name}-containerd",
        node.netns,
        [programs["containerd"], "--config", node.run / "config.toml"],
        path=_search_path(programs),
    )

    def answers() -> bool:
        require_alive(containerd)
        try:
            run(
                in_netns(node.netns, [programs["ctr"], "--address", node.socket, "version"]),
                "Asking containerd",
            )
        except CommandError:
            return False
        return True

    wait_until(answers, f"containerd of {node.name} (its log is {containerd.log})", limit=_LIMIT_SECONDS)
    return containerd


def join(
    layout: Layout, network: Network, index: int, programs: Mapping[str, Path], daemons: Daemons
) -> None:
    """Start kubelet and kube-proxy. Needs the certificates; kubelet itself waits for the API server."""
    node = layout.node(index)
    make_node_client(layout, programs, node.name)
    (node.run / "kubelet.yaml").write_text(node_config.kubelet(layout, node, network, index))
    proxy = node_config.kube_proxy(layout, node, network, masquerade_all=not bridged_traffic_is_filtered())
    (node.run / "kube-proxy.yaml").write_text(proxy)
    kubelet: list[Word] = [
        programs["kubelet"],
        f"--config={node.run}/kubelet.yaml",
        f"--kubeconfig={layout.client_config(node.name)}",
        f"--hostname-override={node.name}",
        f"--node-ip={network.node(index)}",
        f"--node-labels=topology.kubernetes.io/zone={node_config.ZONE}",
        f"--root-dir={node.data}/kubelet",
        f"--cert-dir={node.run}/pki",
    ]
    daemons.start(f"{node.name}-kubelet", node.netns, kubelet, path=_search_path(programs))
    daemons.start(
        f"{node.name}-kube-proxy",
        node.netns,
        [programs["kube-proxy"], f"--config={node.run}/kube-proxy.yaml"],
    )


def wait_ready(layout: Layout, index: int, programs: Mapping[str, Path], daemons: Daemons) -> None:
    """Wait until the node is Ready.

    Raises:
        DaemonDied, WaitTimeoutError, CommandError: it is not, and why.
    """
    name = layout.node(index).name
    own = [
        daemon
        for part in ("containerd", "kubelet", "kube-proxy")
        if (daemon := daemons.named(f"{name}-{part}"))
    ]
    kubectl = Kubectl(programs["kubectl"], layout.client_config("super-admin"), layout.control_plane_netns)

    def ready() -> bool:
        require_alive(*own)
        status = kubectl(
            "get",
            "node",
            name,
            "--ignore-not-found",
            '-o=jsonpath={.status.conditions[?(@.type=="Ready")].status}',
            doing=f"Asking for {name}",
        )
        return status == "True"

    wait_until(ready, f"{name} to be Ready (see the logs in {layout.logs})", limit=_LIMIT_SECONDS, every=0.3)


def _search_path(programs: Mapping[str, Path]) -> list[Path]:
    """containerd looks its shim up in PATH; kubelet and kube-proxy call nft, mount and conntrack."""
    return [programs["containerd"].parent, Path("/usr/sbin"), Path("/sbin")]
