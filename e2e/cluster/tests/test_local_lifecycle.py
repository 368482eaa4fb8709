"""A local cluster starts, survives the death of the run that started it, and leaves nothing behind.

Uses a second cluster beside the shared one, with names and addresses of its own.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from e2e.cluster import NoCluster, Progress, cgroups, teardown
from e2e.cluster.daemons import Daemons
from e2e.cluster.layout import REPOSITORY, Layout
from e2e.cluster.local import LocalCluster
from e2e.cluster.network import Network
from e2e.cluster.shell import run, wait_until
from e2e.cluster.state import NODE_SYSCTLS

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(os.environ.get("CLUSTER", "local") != "local", reason="only the local provider's"),
]

LAYOUT = Layout.named("dtest")
NETWORK = Network("10.97")
START = """
from e2e.cluster import Progress
from e2e.cluster.tests.test_local_lifecycle import local
local().up(1, Progress(), ["python"])
"""


def local() -> LocalCluster:
    return LocalCluster(LAYOUT, NETWORK)


@dataclass(frozen=True)
class Machine:
    """What a cluster could leave behind, less what belongs to the shared cluster or to none of our doing."""

    mounts: frozenset[str]
    namespaces: frozenset[str]
    links: frozenset[str]
    groups: frozenset[str]
    processes: frozenset[str]
    sysctls: tuple[str, ...]
    folders: frozenset[str]

    @classmethod
    def now(cls) -> "Machine":
        marks = (LAYOUT.prefix, LAYOUT.run.name, LAYOUT.data.name, LAYOUT.exposed.name)

        def of_this(texts: list[str]) -> frozenset[str]:
            return frozenset(text for text in texts if any(mark in text for mark in marks))

        links = [link["ifname"] for link in json.loads(run(["ip", "-json", "link"], "Listing links"))]
        commands = [_command_line(path) for path in Path("/proc").glob("[0-9]*/cmdline")]
        roots = (Path("/run"), Path("/var/lib"), Path("/run/netns"), Path("/var/log/containers"))
        return cls(
            mounts=of_this(Path("/proc/self/mountinfo").read_text().splitlines()),
            namespaces=of_this([str(path) for path in Path("/run/netns").glob("*")]),
            links=frozenset(link for link in links if link == LAYOUT.host_link),
            groups=frozenset(str(group) for group in cgroups.ours(LAYOUT.prefix)),
            processes=of_this([command for command in commands if "pytest" not in command]),
            sysctls=tuple((Path("/proc/sys") / name).read_text() for name in NODE_SYSCTLS),
            folders=of_this(
                [
                    f"{path} {path.readlink() if path.is_symlink() else ''}"
                    for root in roots
                    if root.is_dir()
                    for path in root.iterdir()
                ]
            ),
        )


def _command_line(path: Path) -> str:
    try:
        return path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


@pytest.fixture
def clean() -> Iterator[Machine]:
    """The machine before; whatever a failing test leaves is removed."""
    local().down(Progress())
    yield Machine.now()
    local().down(Progress())


def start_pod(name: str) -> None:
    cluster = local().connect()
    cluster.apply(
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name},
            "spec": {
                "containers": [
                    {
                        "name": "main",
                        "image": "localhost/disagg/python:dev",
                        "command": ["python", "-c", "import time; time.sleep(3600)"],
                        "volumeMounts": [{"name": "memory", "mountPath": "/dev/shm"}],
                    }
                ],
                "volumes": [{"name": "memory", "emptyDir": {"medium": "Memory"}}],
            },
        }
    )
    cluster.wait_ready(f"pod/{name}")


def test_down_leaves_nothing_behind(clean: Machine, tmp_path: Path) -> None:
    provider = local()
    provider.up(1, Progress(), ["python"])
    provider.expose("tests/shelf", tmp_path)
    start_pod("sleeper")
    during = Machine.now()
    # The measure must see what there is to see, or finding nothing afterwards would say nothing.
    assert during.mounts
    assert during.namespaces
    assert during.links
    assert during.groups
    assert during.processes
    assert during.folders
    assert teardown.our_processes(LAYOUT)

    assert provider.down(Progress())
    assert Machine.now() == clean
    assert not provider.down(Progress()), "there was something left to remove"
    with pytest.raises(NoCluster):
        provider.connect()


def test_a_second_up_takes_the_running_cluster_and_adds_a_node(clean: Machine) -> None:
    provider = local()
    provider.up(1, Progress(), ["python"])
    before = {daemon.name: daemon.pid for daemon in Daemons(LAYOUT).all()}
    cluster = provider.up(1, Progress(), ["python"])
    assert {daemon.name: daemon.pid for daemon in Daemons(LAYOUT).all()} == before
    provider.up(2, Progress(), ["python"])
    assert sorted(cluster.real_nodes()) == ["node1", "node2"]
    kept = {name: pid for name, pid in before.items() if Daemons(LAYOUT).named(name)}
    assert kept == before


def test_a_cluster_whose_component_died_is_started_anew(clean: Machine) -> None:
    provider = local()
    provider.up(1, Progress(), ["python"])
    etcd = Daemons(LAYOUT).named("etcd")
    assert etcd is not None
    os.kill(etcd.pid, signal.SIGKILL)
    wait_until(lambda: not etcd.is_alive, "etcd to be dead", limit=60)
    provider.up(1, Progress(), ["python"])
    start_pod("sleeper")


@pytest.mark.parametrize("reached", ["etcd", "kube-apiserver", "node1-kubelet"])
def test_the_remains_of_a_killed_run_are_replaced_by_a_working_cluster(clean: Machine, reached: str) -> None:
    starting = subprocess.Popen(
        [sys.executable, "-c", START],
        cwd=REPOSITORY,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_until(
            lambda: Daemons(LAYOUT).named(reached), f"the run to start {reached}", limit=300, every=0.01
        )
    finally:
        starting.kill()
        starting.wait()
    assert teardown.our_processes(LAYOUT), "the killed run left nothing to recover from"
    with pytest.raises(NoCluster):
        local().connect()

    local().up(1, Progress(), ["python"])
    start_pod("sleeper")
    local().down(Progress())
    assert Machine.now() == clean
