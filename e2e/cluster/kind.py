"""The `kind` provider, for machines with Docker: nodes are containers, images are built by Docker."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from e2e.cluster import binaries, fake_nodes, host_paths
from e2e.cluster.errors import NoCluster, PreflightError
from e2e.cluster.handle import Cluster, program
from e2e.cluster.kubectl import Kubectl
from e2e.cluster.layout import EXPOSED, REPOSITORY
from e2e.cluster.node_config import ZONE
from e2e.cluster.progress import Progress
from e2e.cluster.provider import Component
from e2e.cluster.shell import run
from e2e.images.archive import write_archive
from e2e.images.engine_cache import cache_root
from e2e.images.recipes import RECIPES

CLUSTER_NAME = "disagg"


def cluster_config(nodes: int, cache: Path, exposed: Path) -> dict[str, Any]:
    """kind's configuration: the first node also runs the control plane.

    The cache is mounted at its own path because the exposed folders are links into it.
    """
    mounts = [
        {"hostPath": str(path), "containerPath": str(path), "readOnly": True} for path in (cache, exposed)
    ]
    roles = ["control-plane"] + ["worker"] * (nodes - 1)
    labels = {"topology.kubernetes.io/zone": ZONE}
    return {
        "kind": "Cluster",
        "apiVersion": "kind.x-k8s.io/v1alpha4",
        "nodes": [{"role": role, "labels": labels, "extraMounts": mounts} for role in roles],
    }


class KindCluster:
    """The kind cluster named `disagg`."""

    name = "kind"

    def __init__(self, exposed: Path = EXPOSED) -> None:
        self._exposed = exposed

    def up(self, nodes: int, progress: Progress, images: Sequence[str] = ()) -> Cluster:
        """Create the cluster unless it runs."""
        _require("kind", "docker")
        if not self._exists():
            cache_root().mkdir(parents=True, exist_ok=True)
            self._exposed.mkdir(parents=True, exist_ok=True)
            config = yaml.safe_dump(cluster_config(nodes, cache_root(), self._exposed))
            self._folder.mkdir(parents=True, exist_ok=True)
            command = ["kind", "create", "cluster", f"--name={CLUSTER_NAME}", "--config=-", "--wait=120s"]
            with progress.long_step("creating the kind cluster"):
                run(
                    [*command, f"--kubeconfig={self._kubeconfig}"],
                    "Creating the kind cluster",
                    stdin=config,
                    timeout=900,
                )
        elif not self._kubeconfig.is_file():
            export = ["kind", "export", "kubeconfig", f"--name={CLUSTER_NAME}"]
            run([*export, f"--kubeconfig={self._kubeconfig}"], "Asking kind for the kubeconfig")
        self.load_images(images, progress)
        return self.connect()

    def down(self, progress: Progress) -> bool:
        """Delete the cluster and what it mounted."""
        _require("kind", "docker")
        if not self._exists():
            return False
        self._stop_kwok()
        with progress.step("kind cluster removed"):
            run(
                ["kind", "delete", "cluster", f"--name={CLUSTER_NAME}"],
                "Deleting the kind cluster",
                timeout=300,
            )
        self._kubeconfig.unlink(missing_ok=True)
        host_paths.conceal_all(self._exposed)
        return True

    def connect(self) -> Cluster:
        """The running cluster."""
        if not self._kubeconfig.is_file():
            raise NoCluster(
                "There is no kind cluster of ours. Start one with `make cluster-up CLUSTER=kind`."
            )
        return Cluster(self.name, self._kubeconfig)

    def load_images(self, names: Sequence[str], progress: Progress) -> None:
        """Build the images that have a Dockerfile with Docker, the others ourselves, and load all of them."""
        recipes = [RECIPES[name] for name in names if name != "pause"]
        load, into = ["kind", "load"], f"--name={CLUSTER_NAME}"
        for recipe in recipes:
            if recipe.dockerfile is None:
                continue
            with progress.long_step(f"docker build {recipe.dockerfile}"):
                build = ["docker", "build", "--tag", recipe.reference, "--file", recipe.dockerfile, "."]
                run(build, f"Building {recipe.reference}", cwd=REPOSITORY, timeout=1800)
            run([*load, "docker-image", recipe.reference, into], f"Loading {recipe.reference}", timeout=600)
        own = [recipe.build() for recipe in recipes if recipe.dockerfile is None]
        if own:
            with tempfile.TemporaryDirectory() as scratch:
                archive = Path(scratch) / "images.tar"
                write_archive(own, archive)
                run([*load, "image-archive", archive, into], "Loading images", timeout=600)

    def add_fake_nodes(self, count: int, progress: Progress) -> None:
        """Run kwok on this machine and add the nodes."""
        if count == 0:
            return
        programs = binaries.ensure(["kwok"], progress)
        if not self._kwok_is_running():
            command = fake_nodes.kwok_command(programs, self._kubeconfig, "10.0.0.0/20")
            with (self._folder / "kwok.log").open("w") as log:
                kwok = subprocess.Popen(
                    command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
                )
            self._kwok_pid.write_text(str(kwok.pid))
        fake_nodes.add(Kubectl(program("kubectl"), self._kubeconfig), count)

    def expose(self, name: str, target: Path) -> Path:
        """Make a folder of the cache mountable by pods."""
        return host_paths.expose(name, target, self._exposed)

    def status(self) -> Sequence[Component]:
        """kind's node containers."""
        names = run(["kind", "get", "nodes", f"--name={CLUSTER_NAME}"], "Asking kind").split()
        return [Component(name, "running") for name in names]

    @property
    def _folder(self) -> Path:
        return cache_root() / "kind"

    @property
    def _kubeconfig(self) -> Path:
        return self._folder / "kubeconfig"

    @property
    def _kwok_pid(self) -> Path:
        return self._folder / "kwok.pid"

    def _exists(self) -> bool:
        return CLUSTER_NAME in run(["kind", "get", "clusters"], "Asking kind for its clusters").split()

    def _kwok_is_running(self) -> bool:
        if not self._kwok_pid.exists():
            return False
        program_link = Path(f"/proc/{self._kwok_pid.read_text()}/exe")
        return program_link.is_symlink() and program_link.resolve() == binaries.path_of("kwok")

    def _stop_kwok(self) -> None:
        if self._kwok_is_running():
            os.kill(int(self._kwok_pid.read_text()), 15)
        self._kwok_pid.unlink(missing_ok=True)


def _require(*programs: str) -> None:
    missing = [name for name in programs if shutil.which(name) is None]
    if missing:
        raise PreflightError(
            f"CLUSTER=kind needs {' and '.join(missing)} in PATH. Without Docker use the default, CLUSTER=local."
        )
