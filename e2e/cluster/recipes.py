"""Which programs the cluster is made of and how each is built. Pure data and its hash.

Each tool set is a Go module of its own under gotools/ (their dependencies conflict in one), with versions and
checksums pinned in go.mod and go.sum. A set's hash covers all that decides its binaries, so a cached binary is never
stale.
"""

import hashlib
import platform
from dataclasses import dataclass, field
from pathlib import Path

from e2e.cluster.layout import GOTOOLS

KUBERNETES_VERSION = "v1.36.3"
_KUBERNETES_STAMP = (
    f"-X k8s.io/component-base/version.gitVersion={KUBERNETES_VERSION}",
    "-X k8s.io/component-base/version.gitMajor=1",
    "-X k8s.io/component-base/version.gitMinor=36",
)


@dataclass(frozen=True)
class Toolset:
    """One Go module and the programs built from it."""

    name: str
    programs: dict[str, str]
    """Program -> its main package, in the order in which they are built."""
    stamps: tuple[str, ...] = ()
    """Linker flags that stamp the version."""
    cgo: bool = False
    tags: tuple[str, ...] = ()
    assets: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Module -> files of it that are kept beside the programs."""

    @property
    def folder(self) -> Path:
        """The module's folder."""
        return GOTOOLS / self.name

    def build_command(self, program: str, output: Path) -> list[str]:
        """The command that builds one program."""
        tags = ["-tags", ",".join(self.tags)] if self.tags else []
        linker = " ".join(("-s", "-w", *self.stamps))
        return [
            "go",
            "build",
            "-trimpath",
            *tags,
            "-ldflags",
            linker,
            "-o",
            str(output),
            self.programs[program],
        ]

    def digest(self) -> str:
        """Twelve hex digits over everything that decides the binaries, the Go release excepted."""
        sha = hashlib.sha256()
        parts = (self.name, self.programs, self.stamps, self.cgo, self.tags, self.assets, platform.machine())
        sha.update(repr(parts).encode())
        for path in sorted(self.folder.iterdir()):
            sha.update(path.name.encode() + b"\0" + path.read_bytes())
        return sha.hexdigest()[:12]


_KUBERNETES = "k8s.io/kubernetes/cmd/"
_CONTAINERD = "github.com/containerd/containerd/v2/cmd/"
_CNI = "github.com/containernetworking/plugins/plugins/"

TOOLSETS = (
    Toolset(
        "kubernetes",
        # The API server first: it compiles almost everything that the others need.
        {
            "kube-apiserver": _KUBERNETES + "kube-apiserver",
            "kube-controller-manager": _KUBERNETES + "kube-controller-manager",
            "kube-scheduler": _KUBERNETES + "kube-scheduler",
            "kubelet": _KUBERNETES + "kubelet",
            "kube-proxy": _KUBERNETES + "kube-proxy",
            "kubectl": _KUBERNETES + "kubectl",
            "kubeadm": _KUBERNETES + "kubeadm",
            "etcd": "go.etcd.io/etcd/server/v3",
        },
        stamps=_KUBERNETES_STAMP,
    ),
    Toolset(
        "containerd",
        {
            "containerd": _CONTAINERD + "containerd",
            "containerd-shim-runc-v2": _CONTAINERD + "containerd-shim-runc-v2",
            "ctr": _CONTAINERD + "ctr",
        },
        stamps=("-X github.com/containerd/containerd/v2/version.Version=2.4.2",),
    ),
    Toolset("runc", {"runc": "github.com/opencontainers/runc"}, cgo=True, tags=("seccomp",)),
    Toolset(
        "cni",
        {
            "bridge": _CNI + "main/bridge",
            "loopback": _CNI + "main/loopback",
            "host-local": _CNI + "ipam/host-local",
        },
    ),
    Toolset("coredns", {"coredns": "."}),
    Toolset(
        "helm",
        {"helm": "helm.sh/helm/v4/cmd/helm"},
        stamps=("-X helm.sh/helm/v4/internal/version.version=v4.3.1",),
    ),
    Toolset(
        "kwok",
        {"kwok": "sigs.k8s.io/kwok/cmd/kwok"},
        assets={
            "sigs.k8s.io/kwok": (
                "kustomize/stage/node/fast/node-initialize.yaml",
                "kustomize/stage/node/heartbeat-with-lease/node-heartbeat-with-lease.yaml",
                "kustomize/stage/pod/fast/pod-complete.yaml",
                "kustomize/stage/pod/fast/pod-delete.yaml",
                "kustomize/stage/pod/fast/pod-ready.yaml",
            )
        },
    ),
)

CLUSTER_PROGRAMS = tuple(
    program for toolset in TOOLSETS if toolset.name not in ("helm", "kwok") for program in toolset.programs
)
"""What a cluster without fake nodes needs."""


def toolset_of(program: str) -> Toolset:
    """The tool set that builds a program. Raises KeyError for a program of no set."""
    for toolset in TOOLSETS:
        if program in toolset.programs:
            return toolset
    raise KeyError(program)
