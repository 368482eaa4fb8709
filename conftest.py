"""Orders a run in one process: what is quick and needs nothing first, real engines next, the cluster last.

A broken unit test then shows after seconds, not after the engines have started.
"""

import os

import hypothesis
import pytest

# How long an example takes says more about what else the machine is doing than about the code.
hypothesis.settings.register_profile(
    "busy-machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.register_profile(
    "quick", hypothesis.settings.get_profile("busy-machine"), max_examples=60, stateful_step_count=40
)
hypothesis.settings.register_profile(
    "thorough", hypothesis.settings.get_profile("busy-machine"), max_examples=3000, stateful_step_count=60
)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "busy-machine"))

_ORDER = ("engine", "cluster")


def _stage(item: pytest.Item) -> int:
    return max(
        (_ORDER.index(mark.name) + 1 for mark in item.iter_markers() if mark.name in _ORDER), default=0
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=_stage)
