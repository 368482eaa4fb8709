"""Events in, keys out."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from disagg_operator.handlers import SETTLE_SECONDS, is_news, watch_children
from disagg_operator.reconcile import Key


@pytest.mark.parametrize(
    ("body", "news"),
    [
        ({"metadata": {"generation": 1}}, True),
        ({"metadata": {"generation": 2}, "status": {"observedGeneration": 1}}, True),
        ({"metadata": {"generation": 2}, "status": {"observedGeneration": 2}}, False),
        (
            {"metadata": {"generation": 2, "deletionTimestamp": "x"}, "status": {"observedGeneration": 2}},
            True,
        ),
    ],
)
def test_our_own_status_writes_are_no_news(body: Any, news: bool) -> None:
    assert is_news(body) is news


class Changes:
    def __init__(self, *metadata: dict[str, Any]) -> None:
        self._metadata = metadata

    async def watch(self, kind: str, namespace: str | None) -> AsyncIterator[dict[str, Any]]:
        for item in self._metadata:
            yield item


async def test_a_change_of_a_child_names_its_owner() -> None:
    wanted: list[tuple[Key, float]] = []
    changes = Changes(
        {"namespace": "a", "name": "x", "labels": {"inference.disagg.dev/name": "demo"}},
        {"namespace": "a", "name": "stray", "labels": {}},
        {"namespace": "b", "name": "y", "labels": {"inference.disagg.dev/name": "demo"}},
    )
    await watch_children(changes, "Pod", None, lambda key, after: wanted.append((key, after)))
    assert wanted == [(Key("a", "demo"), SETTLE_SECONDS), (Key("b", "demo"), SETTLE_SECONDS)]
