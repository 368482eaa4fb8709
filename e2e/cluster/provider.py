"""Where a cluster comes from: `CLUSTER=local|kind|existing`."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from e2e.cluster.errors import ClusterError
from e2e.cluster.handle import Cluster
from e2e.cluster.progress import Progress
from e2e.images.recipes import RECIPES

ALL_IMAGES = tuple(RECIPES)


@dataclass(frozen=True)
class Component:
    """One line of `status`."""

    name: str
    state: str
    resident_bytes: int = 0


class Provider(Protocol):
    """A way to have a cluster. Every method may raise ClusterError."""

    name: str

    def up(self, nodes: int, progress: Progress, images: Sequence[str] = ()) -> Cluster:
        """Start a cluster with `nodes` nodes, or take the running one, and load `images`.

        Returns when pods can be created.
        """

    def down(self, progress: Progress) -> bool:
        """Remove the cluster with all traces; returns whether there was one."""

    def connect(self) -> Cluster:
        """The running cluster. Raises NoCluster if there is none."""

    def load_images(self, names: Sequence[str], progress: Progress) -> None:
        """Build images of e2e.images.recipes and give them to every node."""

    def add_fake_nodes(self, count: int, progress: Progress) -> None:
        """See to it that fake P5en nodes 0 to count-1 are there."""

    def expose(self, name: str, target: Path) -> Path:
        """Make a folder of this machine mountable by pods; returns the path for `hostPath`."""

    def status(self) -> Sequence[Component]:
        """What the cluster is made of; empty if there is none."""


def choose(name: str | None = None) -> Provider:
    """The provider that `name` or `$CLUSTER` names; the local one by default.

    Raises:
        ClusterError: there is no such provider.
    """
    # Imported here: each provider needs what this module defines.
    from e2e.cluster.existing import ExistingCluster
    from e2e.cluster.kind import KindCluster
    from e2e.cluster.local import LocalCluster

    providers: dict[str, type[Provider]] = {
        "local": LocalCluster,
        "kind": KindCluster,
        "existing": ExistingCluster,
    }
    wanted = name or os.environ.get("CLUSTER") or "local"
    if wanted not in providers:
        raise ClusterError(
            f"CLUSTER={wanted}: there is no such provider; choose one of {', '.join(providers)}."
        )
    return providers[wanted]()


def expose_engine(provider: Provider, progress: Progress, models: Sequence[str] = ("smollm2-135m",)) -> None:
    """Make the engine bundle and `models` mountable as engine and models/<name>, building what is missing.

    Raises:
        EngineError, ClusterError: they cannot be built or exposed.
    """
    # Imported here: only this needs it.
    from e2e.images.engine import ensure_bundle, ensure_model

    provider.expose("engine", ensure_bundle(progress.say))
    for model in models:
        provider.expose(f"models/{model}", ensure_model(model, progress.say))
