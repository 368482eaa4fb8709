"""Configuration files of a node's components. Pure text."""

import json
from collections.abc import Mapping
from pathlib import Path

import yaml

from e2e.cluster.layout import Layout, NodeLayout
from e2e.cluster.network import Network

PAUSE_IMAGE = "localhost/disagg/pause:1"
ZONE = "local-a"
"""All nodes are in one zone, so that placement by zone can be satisfied."""


def containerd(node: NodeLayout, programs: Mapping[str, Path]) -> str:
    """containerd's config.toml. Every path it would use by default is moved below the node's folders."""
    return f"""\
version = 3
root = "{node.data}/containerd"
state = "{node.run}/state"
disabled_plugins = [
  "io.containerd.nri.v1.nri",
  "io.containerd.snapshotter.v1.blockfile",
  "io.containerd.snapshotter.v1.btrfs",
  "io.containerd.snapshotter.v1.devmapper",
  "io.containerd.snapshotter.v1.erofs",
  "io.containerd.snapshotter.v1.zfs",
]

[grpc]
  address = "{node.socket}"
[ttrpc]
  address = "{node.socket}.ttrpc"

[plugins."io.containerd.shim.v1.manager"]
  socket_dir = "{node.run}/s"
[plugins."io.containerd.internal.v1.opt"]
  path = "{node.data}/opt"
[plugins."io.containerd.cri.v1.images"]
  snapshotter = "overlayfs"
  [plugins."io.containerd.cri.v1.images".pinned_images]
    sandbox = "{PAUSE_IMAGE}"
[plugins."io.containerd.cri.v1.runtime"]
  # Needed where the machine lacks CAP_SYS_RESOURCE.
  restrict_oom_score_adj = true
  netns_mounts_under_state_dir = true
  [plugins."io.containerd.cri.v1.runtime".cni]
    bin_dirs = ["{programs["bridge"].parent}"]
    conf_dir = "{node.run}/cni"
  [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc.options]
      SystemdCgroup = false
      BinaryName = "{programs["runc"]}"
      Root = "{node.run}/runc"
"""


def cni(node: NodeLayout, network: Network, index: int) -> str:
    """The pod network: a bridge, addresses of this node's range, Services by way of the node."""
    first, last = network.node_pods(index)
    address = network.node(index)
    bridge = {
        "type": "bridge",
        "bridge": "br0",
        "isGateway": False,
        "ipMasq": False,
        "hairpinMode": True,
        "ipam": {
            "type": "host-local",
            "dataDir": str(node.run / "ipam"),
            "ranges": [[{"subnet": network.cidr, "rangeStart": first, "rangeEnd": last, "gateway": address}]],
            "routes": [{"dst": network.services, "gw": address}],
        },
    }
    return json.dumps({"cniVersion": "1.0.0", "name": "disagg", "plugins": [bridge]}, indent=1)


def kubelet(layout: Layout, node: NodeLayout, network: Network, index: int) -> str:
    """KubeletConfiguration."""
    return yaml.safe_dump(
        {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "address": network.node(index),
            "healthzBindAddress": "127.0.0.1",
            "containerRuntimeEndpoint": f"unix://{node.socket}",
            "podLogsDir": str(node.data / "pods"),
            "volumePluginDir": str(node.data / "volume-plugins"),
            "resolvConf": str(node.run / "resolv.conf"),
            "clusterDNS": [network.dns],
            "clusterDomain": "cluster.local",
            "authentication": {
                "anonymous": {"enabled": False},
                "webhook": {"enabled": True},
                "x509": {"clientCAFile": str(layout.pki / "ca.crt")},
            },
            "authorization": {"mode": "Webhook"},
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": f"/{node.netns}",
            "failCgroupV1": False,
            "failSwapOn": False,
            # Lowering it takes CAP_SYS_RESOURCE.
            "oomScoreAdj": 0,
            "makeIPTablesUtilChains": False,
            "kubeAPIQPS": 100,
            "kubeAPIBurst": 200,
            "evictionHard": {
                "memory.available": "100Mi",
                "nodefs.available": "1%",
                "imagefs.available": "1%",
            },
            # Images come from an archive: one that is collected would be gone.
            "imageGCHighThresholdPercent": 100,
            "imageGCLowThresholdPercent": 99,
            "syncFrequency": "5s",
            "nodeStatusUpdateFrequency": "5s",
        },
        sort_keys=False,
    )


def kube_proxy(layout: Layout, node: NodeLayout, network: Network, *, masquerade_all: bool) -> str:
    """KubeProxyConfiguration."""
    return yaml.safe_dump(
        {
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
            "kind": "KubeProxyConfiguration",
            "mode": "nftables",
            "clusterCIDR": network.pods,
            "hostnameOverride": node.name,
            "healthzBindAddress": "127.0.0.1:10256",
            "metricsBindAddress": "127.0.0.1:10249",
            "nftables": {"masqueradeAll": masquerade_all},
            # The table's size belongs to the whole machine and cannot be set from a namespace.
            "conntrack": {"maxPerCore": 0, "min": 0},
            "oomScoreAdj": 0,
            "clientConnection": {"kubeconfig": str(layout.client_config("kube-proxy"))},
        },
        sort_keys=False,
    )
