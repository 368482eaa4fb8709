"""The cluster that all scenarios of one session share."""

import os
from collections.abc import Iterator

import pytest

from e2e.cluster import Cluster, NoCluster, Progress, Provider, choose
from e2e.cluster.provider import ALL_IMAGES

NODES = 2


@pytest.fixture(scope="session")
def provider() -> Provider:
    """Where clusters come from, chosen by $CLUSTER."""
    return choose()


@pytest.fixture(scope="session")
def cluster(provider: Provider, pytestconfig: pytest.Config) -> Iterator[Cluster]:
    """A cluster of two nodes with our images.

    Started if none is up, and removed at the end only if it was started here and $KEEP is not set.
    """
    progress = Progress()
    capture = pytestconfig.pluginmanager.getplugin("capturemanager")
    try:
        provider.connect()
        was_there = True
    except NoCluster:
        was_there = False
    # Shown at once: a first run compiles Kubernetes, which takes minutes.
    with capture.global_and_fixture_disabled():
        running = provider.up(NODES, progress, ALL_IMAGES)
    yield running
    if not was_there and not os.environ.get("KEEP"):
        with capture.global_and_fixture_disabled():
            provider.down(progress)
