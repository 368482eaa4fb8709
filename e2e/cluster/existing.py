"""The `existing` provider: a cluster that the user brings, named by $KUBECONFIG or ~/.kube/config.

It is never started, changed in its nodes, or removed by us.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from e2e.cluster.errors import ClusterError, NoCluster
from e2e.cluster.handle import Cluster
from e2e.cluster.progress import Progress
from e2e.cluster.provider import Component
from e2e.images.recipes import RECIPES


class ExistingCluster:
    """The cluster of the user's kubeconfig."""

    name = "existing"

    def up(self, nodes: int, progress: Progress, images: Sequence[str] = ()) -> Cluster:
        """Check that the cluster answers and has enough nodes."""
        cluster = self.connect()
        cluster.kubectl("get", "--raw=/readyz")
        have = len(cluster.real_nodes())
        if have < nodes:
            progress.say(
                f"  {cluster.kubeconfig} has {have} nodes, {nodes} were asked for; going on with those"
            )
        self.load_images(images, progress)
        return cluster

    def down(self, progress: Progress) -> bool:
        """Leave the cluster alone."""
        progress.say("  CLUSTER=existing: the cluster is yours and stays")
        return False

    def connect(self) -> Cluster:
        """The cluster of the kubeconfig."""
        path = Path(os.environ.get("KUBECONFIG") or Path.home() / ".kube" / "config")
        if not path.is_file():
            raise NoCluster(
                f"CLUSTER=existing: there is no kubeconfig at {path}; set KUBECONFIG to one file."
            )
        return Cluster(self.name, path)

    def load_images(self, names: Sequence[str], progress: Progress) -> None:
        """Say which images the nodes must be able to pull: they come from the user's registry."""
        if not names:
            return
        wanted = ", ".join(RECIPES[name].reference for name in names if RECIPES[name].dockerfile)
        progress.say(
            f"  CLUSTER=existing: images are not loaded. Build {wanted} from their Dockerfiles, push them to a registry "
            f"that the nodes can pull from, and name them in the chart's values."
        )

    def add_fake_nodes(self, count: int, progress: Progress) -> None:
        """Refuse: fake nodes in somebody's cluster would attract real pods."""
        if count:
            raise ClusterError(
                "CLUSTER=existing: fake nodes are for local and kind clusters; real pods would land on them."
            )

    def expose(self, name: str, target: Path) -> Path:
        """Refuse: the nodes are other machines."""
        raise ClusterError(
            f"CLUSTER=existing: {target} of this machine cannot be mounted on the cluster's nodes as {name}. "
            f"Use an engine image and a model that the nodes can pull."
        )

    def status(self) -> Sequence[Component]:
        """The nodes."""
        return [Component(node, "in the cluster") for node in self.connect().real_nodes()]
