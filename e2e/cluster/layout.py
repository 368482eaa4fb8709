"""Where the local cluster keeps things. Everything below these roots is ours and disappears with `down`.

Sockets live under /run because a unix socket's path may have 107 bytes at most; bulk data lives under /var/lib
because /run is often a small tmpfs.
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path

from e2e.cluster.errors import ClusterError

REPOSITORY = Path(__file__).resolve().parents[2]
GOTOOLS = Path(__file__).resolve().parent / "gotools"
EXPOSED = Path("/var/lib/disagg-local")
"""Folders of the host under stable names, for hostPath volumes."""
FAILED_LOGS = REPOSITORY / "build" / "cluster-logs"
"""Where the logs of a cluster that did not come up are kept."""


@dataclass(frozen=True)
class NodeLayout:
    """The places of one node."""

    name: str
    run: Path
    data: Path
    netns: str
    """The node's network namespace, which is also the name of its root control group."""

    @property
    def socket(self) -> Path:
        """containerd's address."""
        return self.run / "containerd.sock"


@dataclass(frozen=True)
class Layout:
    """The places of one cluster. Clusters with different places and names can run side by side."""

    run: Path = Path("/run/disagg-inference")
    data: Path = Path("/var/lib/disagg-inference")
    exposed: Path = EXPOSED
    prefix: str = "disagg-"
    """Starts the name of every network namespace and control group; no other cluster's prefix starts with it."""
    host_link: str = "disagg0"
    """The host's end of the link into the cluster's network."""

    @classmethod
    def named(cls, name: str) -> "Layout":
        """The places of the cluster `name`; `disagg` gives the defaults.

        Raises:
            ClusterError: it is not one to eight small letters and digits (a network device's name is short, and a
                dash could make one cluster's names the beginning of another's).
        """
        if not re.fullmatch("[a-z][a-z0-9]{0,7}", name):
            raise ClusterError(
                f"DISAGG_CLUSTER_NAME={name}: want a letter, then at most seven letters or digits."
            )
        places = (
            Path(f"/run/{name}-inference"),
            Path(f"/var/lib/{name}-inference"),
            Path(f"/var/lib/{name}-local"),
        )
        return cls(*places, prefix=f"{name}-", host_link=f"{name}0")

    @classmethod
    def configured(cls) -> "Layout":
        """The cluster that $DISAGG_CLUSTER_NAME names. A second one needs $DISAGG_CLUSTER_NETWORK, too."""
        return cls.named(os.environ.get("DISAGG_CLUSTER_NAME") or "disagg")

    @property
    def kubeconfig(self) -> Path:
        """The administrator's kubeconfig, the one that users get."""
        return self.run / "kubeconfig"

    @property
    def pki(self) -> Path:
        """Certificates and keys."""
        return self.run / "pki"

    @property
    def logs(self) -> Path:
        """One file per component."""
        return self.data / "logs"

    @property
    def control_plane_netns(self) -> str:
        """The network namespace of the control plane."""
        return self.prefix + "cp"

    def client_config(self, user: str) -> Path:
        """The kubeconfig of one component."""
        return self.run / "clients" / f"{user}.conf"

    def node(self, index: int) -> NodeLayout:
        """The places of node `index`, counted from 1."""
        name = f"node{index}"
        return NodeLayout(name, self.run / name, self.data / name, self.prefix + name)
