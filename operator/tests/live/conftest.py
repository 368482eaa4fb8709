"""One control plane for the tests of a file, a namespace for each. It does not outlive them: its kubelet never rests."""

import itertools
from collections.abc import Iterator

import pytest
from live_cluster import Cluster, Kubelet, control_plane

_numbers = itertools.count(1)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with control_plane(tmp_path_factory.mktemp("control-plane")) as running, Kubelet(running):
        yield running


@pytest.fixture
def namespace(cluster: Cluster) -> str:
    cluster.require_controllers()
    name = f"test-{next(_numbers)}"
    cluster.kubectl("create", "namespace", name)
    return name
