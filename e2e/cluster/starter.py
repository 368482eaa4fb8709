"""The order in which a local cluster starts, with everything in parallel that does not wait for something else."""

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from e2e.cluster import controlplane, node, pki
from e2e.cluster.daemons import Daemons
from e2e.cluster.image_import import import_images
from e2e.cluster.layout import Layout
from e2e.cluster.network import Network, make_control_plane_namespace, route_services_through_control_plane
from e2e.cluster.progress import Progress
from e2e.images.archive import Image


@dataclass(frozen=True)
class Starter:
    """Starts the parts of one cluster."""

    layout: Layout
    daemons: Daemons
    network: Network
    programs: Mapping[str, Path]
    progress: Progress

    def start(self, nodes: int, images: Sequence[Image]) -> None:
        """Start a cluster from nothing; returns when pods can be created on `nodes` nodes that have `images`."""
        everything = (self.layout, self.network, self.programs, self.daemons)
        indexes = range(1, nodes + 1)
        make_control_plane_namespace(self.layout, self.network)
        with ThreadPoolExecutor() as pool:
            # containerd needs neither certificates nor an API server, and the import is mostly disk.
            runtimes = pool.submit(self._start_runtimes, indexes)
            loading = pool.submit(self._load_after, runtimes, indexes, images)
            with self.progress.step("certificates"):
                pki.make_certificates(self.layout, self.network, self.programs)
            with self.progress.step("etcd and the API server"):
                controlplane.start_api_server(*everything)
            controllers = pool.submit(controlplane.start_controllers, *everything)
            runtimes.result()
            with self.progress.step(f"{nodes} nodes" if nodes > 1 else "1 node"):
                self._join(indexes)
            with self.progress.step("controllers and DNS"):
                controllers.result()
                controlplane.wait_for_controllers(*everything)
            loading.result()
        controlplane.start_service_proxy(self.layout, self.programs, self.daemons)
        route_services_through_control_plane(self.layout, self.network)

    def add_nodes(self, indexes: range) -> None:
        """Add nodes to the running cluster."""
        with self.progress.step(f"{len(indexes)} more nodes"):
            self._start_runtimes(indexes)
            self._join(indexes)

    def load_images(self, indexes: range, images: Sequence[Image]) -> None:
        """Import those of `images` that a node lacks."""
        began = time.monotonic()
        if import_images(self.layout, indexes, images, self.programs["ctr"], self.layout.data):
            self.progress.done("images imported", began)

    def _start_runtimes(self, indexes: range) -> None:
        for index in indexes:
            node.start_runtime(self.layout, self.network, index, self.programs, self.daemons)

    def _load_after(self, runtimes: Future[None], indexes: range, images: Sequence[Image]) -> None:
        runtimes.result()
        self.load_images(indexes, images)

    def _join(self, indexes: range) -> None:
        with ThreadPoolExecutor() as pool:
            joined = [
                pool.submit(node.join, self.layout, self.network, index, self.programs, self.daemons)
                for index in indexes
            ]
        for each in joined:
            each.result()
        for index in indexes:
            node.wait_ready(self.layout, index, self.programs, self.daemons)
