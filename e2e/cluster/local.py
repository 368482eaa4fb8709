"""The local provider: real Kubernetes in network namespaces of this machine. Needs root and Go, no container engine."""

import fcntl
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from e2e.cluster import binaries, controlplane, fake_nodes, host_paths, preflight, state, teardown
from e2e.cluster.daemons import Daemons
from e2e.cluster.errors import ClusterError, NoCluster, WaitTimeoutError
from e2e.cluster.handle import Cluster
from e2e.cluster.kubectl import Kubectl
from e2e.cluster.layout import FAILED_LOGS, Layout
from e2e.cluster.network import MAX_NODES, Network
from e2e.cluster.progress import Progress
from e2e.cluster.provider import Component
from e2e.cluster.recipes import CLUSTER_PROGRAMS
from e2e.cluster.shell import wait_until
from e2e.cluster.starter import Starter
from e2e.cluster.state import State
from e2e.images.archive import Image
from e2e.images.engine_cache import cache_root
from e2e.images.recipes import RECIPES

_ANSWER_SECONDS = 60.0


class LocalCluster:
    """The one local cluster of this machine."""

    name = "local"

    def __init__(self, layout: Layout | None = None, network: Network | None = None) -> None:
        self._layout = layout or Layout.configured()
        self._network = network
        self._daemons = Daemons(self._layout)

    def up(self, nodes: int, progress: Progress, images: Sequence[str] = ()) -> Cluster:
        """Start the cluster, or complete the one that runs; a broken one, or the rest of one, is removed first."""
        if not 1 <= nodes <= MAX_NODES:
            raise ClusterError(f"A local cluster has 1 to {MAX_NODES} nodes, not {nodes}.")
        with self._locked(progress):
            remembered = state.load(self._layout)
            if remembered is not None and self._is_healthy(remembered):
                self._complete(remembered, nodes, images, progress)
            else:
                self._start(nodes, images, progress)
        return self.connect()

    def down(self, progress: Progress) -> bool:
        """Remove the cluster with all traces."""
        with self._locked(progress):
            return self._remove(progress)

    def connect(self) -> Cluster:
        """The running cluster."""
        self._require_ready()
        return Cluster(self.name, self._layout.kubeconfig)

    def load_images(self, names: Sequence[str], progress: Progress) -> None:
        """Build images and import them into every node that lacks this very form of them."""
        remembered = self._require_ready()
        programs = {name: binaries.path_of(name) for name in CLUSTER_PROGRAMS}
        starter = Starter(self._layout, self._daemons, Network(remembered.network), programs, progress)
        starter.load_images(range(1, remembered.nodes + 1), _build(names))

    def add_fake_nodes(self, count: int, progress: Progress) -> None:
        """Start kwok where it does not run and add the nodes."""
        remembered = self._require_ready()
        if count == 0:
            return
        programs = binaries.ensure([*CLUSTER_PROGRAMS, "kwok"], progress)
        running = self._daemons.named("kwok")
        with progress.step(f"{count} fake p5en nodes"):
            if running is None or not running.is_alive:
                command = fake_nodes.kwok_command(
                    programs, self._layout.kubeconfig, Network(remembered.network).fake_pods
                )
                self._daemons.start("kwok", self._layout.control_plane_netns, command)
            admin = Kubectl(programs["kubectl"], self._layout.kubeconfig, self._layout.control_plane_netns)
            fake_nodes.add(admin, count)

    def expose(self, name: str, target: Path) -> Path:
        """Make a folder mountable by pods."""
        return host_paths.expose(name, target, self._layout.exposed)

    def status(self) -> Sequence[Component]:
        """Every daemon with its memory, then the pods' processes together."""
        if not teardown.is_present(self._layout):
            return []
        daemons = self._daemons.all()
        components = [
            Component(daemon.name, "running" if daemon.is_alive else "DEAD", daemon.resident_bytes)
            for daemon in daemons
        ]
        others = teardown.our_processes(self._layout) - {daemon.pid for daemon in daemons}
        components.append(Component("pods and shims", f"{len(others)} processes", _resident_bytes(others)))
        return components

    def _start(self, nodes: int, images: Sequence[str], progress: Progress) -> None:
        network = self._network or Network.configured()
        if teardown.is_present(self._layout):
            progress.say("  removing what an earlier cluster left")
            self._remove(progress)
        missing = binaries.missing(CLUSTER_PROGRAMS)
        preflight.check(self._layout, network, missing, progress.say)
        programs = binaries.ensure(CLUSTER_PROGRAMS, progress)
        built = _build(["pause", *images])
        beginning = State.begin(nodes, network.prefix)
        began = time.monotonic()
        try:
            state.save(self._layout, beginning)
            Starter(self._layout, self._daemons, network, programs, progress).start(nodes, built)
            state.save(self._layout, beginning.with_changes(ready=True))
        except BaseException:
            self._give_up(progress)
            raise
        progress.done("cluster", began)

    def _complete(self, remembered: State, nodes: int, images: Sequence[str], progress: Progress) -> None:
        """Add what the running cluster lacks of nodes and images."""
        programs = binaries.ensure(CLUSTER_PROGRAMS, progress)
        starter = Starter(self._layout, self._daemons, Network(remembered.network), programs, progress)
        built = _build(["pause", *images])
        added = range(remembered.nodes + 1, nodes + 1)
        if added:
            # A run that is killed now leaves a cluster that the next one starts anew.
            state.save(self._layout, remembered.with_changes(ready=False))
            starter.add_nodes(added)
            state.save(self._layout, remembered.with_changes(nodes=nodes))
        starter.load_images(range(1, max(nodes, remembered.nodes) + 1), built)

    def _is_healthy(self, remembered: State) -> bool:
        daemons = self._daemons.all()
        alive = bool(daemons) and all(daemon.is_alive for daemon in daemons)
        return remembered.ready and alive and self._answers(remembered)

    def _answers(self, remembered: State) -> bool:
        """Whether the API server is ready, now or soon: on a busy machine it is late at times, and others use the cluster."""
        try:
            return wait_until(
                lambda: controlplane.is_ready(self._layout, Network(remembered.network)),
                "the API server to answer",
                limit=_ANSWER_SECONDS,
            )
        except WaitTimeoutError:
            return False

    def _require_ready(self) -> State:
        remembered = state.load(self._layout)
        if remembered is None or not remembered.ready:
            raise NoCluster("There is no local cluster. Start one with `make cluster-up`.")
        return remembered

    def _remove(self, progress: Progress) -> bool:
        began = time.monotonic()
        was_there = teardown.take_down(self._layout)
        if was_there:
            progress.done("cluster removed", began)
        return was_there

    def _give_up(self, progress: Progress) -> None:
        """After a failed start: keep the logs, remove the rest."""
        if self._layout.logs.is_dir():
            shutil.rmtree(FAILED_LOGS, ignore_errors=True)
            shutil.copytree(self._layout.logs, FAILED_LOGS)
            progress.say(f"  the cluster did not come up; the logs of its components are in {FAILED_LOGS}")
        self._remove(progress)

    @contextmanager
    def _locked(self, progress: Progress) -> Iterator[None]:
        cache_root().mkdir(parents=True, exist_ok=True)
        with (cache_root() / "local-cluster.lock").open("w") as handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                progress.say("  another run is starting or removing the cluster, waiting for that one")
                fcntl.flock(handle, fcntl.LOCK_EX)
            yield


def _build(names: Sequence[str]) -> list[Image]:
    return [RECIPES[name].build() for name in dict.fromkeys(names)]


def _resident_bytes(pids: set[int]) -> int:
    total = 0
    for pid in pids:
        try:
            total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096
        except (OSError, IndexError):
            continue
    return total
