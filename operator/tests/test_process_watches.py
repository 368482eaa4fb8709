"""The operator's process, and what it watches."""

import asyncio
from pathlib import Path

from scripted_api import LIMIT, operator_at, scripted_api, until

from disagg_operator.kube import CHILD_KINDS, RESOURCES


async def test_watches_leave_connections_for_passes_however_many_namespaces_there_are(
    tmp_path: Path,
) -> None:
    namespaces = [f"team-{number}" for number in range(12)]
    plurals = [RESOURCES[kind].plural for kind in CHILD_KINDS]
    async with (
        scripted_api() as (api, url),
        operator_at(url, tmp_path, WATCH_NAMESPACES=",".join(namespaces)),
    ):
        await until(
            lambda: all(api.watched[plural] == len(namespaces) for plural in plurals),
            "a watch of each kind in each namespace",
        )
        await until(lambda: api.watched["disagginferences"] == len(namespaces), "kopf's watches")
        api.add("team-3", "demo")
        demo = "/apis/inference.disagg.dev/v1alpha1/namespaces/team-3/disagginferences/demo"
        await until(lambda: demo in api.read, "a pass over the DisaggInference")


async def test_it_ends_if_kopf_does_not_find_what_it_is_to_watch(tmp_path: Path) -> None:
    """The API server serves a new CRD some time before or after it lists its group, and of several servers each its own time."""
    async with scripted_api() as (api, url):
        api.lists_our_group = False
        async with operator_at(url, tmp_path) as (process, log):
            assert await asyncio.wait_for(process.wait(), LIMIT) == 1
            assert "does not list disagginferences.inference.disagg.dev" in log.read_text()
