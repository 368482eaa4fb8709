"""From pods' sockets to a decision: pages as engines and routers write them, and all that can be wrong with one."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from aiohttp import web
from scaling_pages import TICK, decode, prefill, router

from disagg_operator import scrape
from disagg_operator.naming import Component
from disagg_operator.pages import Page, Target
from disagg_operator.scaling.history import EMPTY
from disagg_operator.scaling.inputs import Inputs, Limits, RoleLimits, Sizes
from disagg_operator.scaling.policy import Decision, Outcome, decide
from disagg_operator.scaling.signals import NAMES, NOTHING, measure, see

PODS = {
    Component.PREFILL: ["p0", "p1", "p2", "p3"],
    Component.DECODE: ["d0", "d1", "d2", "d3"],
    Component.ROUTER: ["r0"],
}
ADDRESSES = {
    pod: f"127.0.0.{n}" for n, pod in enumerate((p for pods in PODS.values() for p in pods), start=1)
}
LIMITS = Limits(RoleLimits(1, 8), RoleLimits(1, 8), tokens_per_second=1000.0, down_window=0.0)


def text(page: Page) -> str:
    lines = ["# HELP some_other_metric_total What nobody asks for.", "some_other_metric_total 1.0"]
    for sample in page:
        labels = ",".join(f'{name}="{value}"' for name, value in sample.labels.items())
        lines.append(
            f"{sample.name}{{{labels}}} {sample.value}" if labels else f"{sample.name} {sample.value}"
        )
    return "\n".join(lines) + "\n"


def written(pod: str, n: int) -> str:
    """The page of a pod at the n-th look: work for two pods of either role."""
    share = 10 * TICK * n / 4
    if pod[0] == "p":
        return text(prefill(computed=100 * share, prompts=share))
    return text(decode(usage=0.3, running=5) if pod[0] == "d" else router(turns=4 * share))


def spoilt(how: str, page: str) -> web.Response:
    lines = page.splitlines()
    if how.startswith("status"):
        return web.Response(text=page, status=int(how.split()[1]))
    if how == "HTML":
        return web.Response(
            text="<!doctype html>\n<p>vllm:num_requests_running 3\n", content_type="text/html"
        )
    if how == "cut":
        return web.Response(text=page[: len(page) // 2].rstrip("\n"))
    if how == "empty":
        return web.Response()
    name, value = how.split(" is ")
    new = [f"{line.rpartition(' ')[0]} {value}" if line.startswith(name) else line for line in lines]
    assert new != lines
    return web.Response(text="\n".join(new) + "\n")


class World:
    """Pods on one port of several addresses, and an operator that looks and decides."""

    def __init__(self) -> None:
        self.n, self.port = 0, 0
        self.spoilt: dict[str, str] = {}
        self.sight, self.history = NOTHING, EMPTY

    async def handle(self, request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        address = request.transport.get_extra_info("sockname")[0]
        pod = next(pod for pod, own in ADDRESSES.items() if own == address)
        how = self.spoilt.get(pod)
        if how == "silence":
            await asyncio.Event().wait()
        page = written(pod, self.n)
        return web.Response(text=page) if how is None else spoilt(how, page)

    async def tick(self) -> tuple[Inputs, Decision]:
        self.n += 1
        targets = {
            pod: Target("default", ADDRESSES[pod], self.port, NAMES[component])
            for component, pods in PODS.items()
            for pod in pods
        }
        pages = await scrape.read_pages(targets)
        now = self.n * TICK
        self.sight = see(self.sight, PODS, pages, now, 60.0)
        inputs = measure(self.sight, now, 60.0)
        decision, self.history = decide(inputs, LIMITS, Sizes(4, 4), self.history, now)
        return inputs, decision


@pytest.fixture
async def world(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    monkeypatch.setattr(
        scrape, "_CONNECT_SECONDS", 60
    )  # a busy machine may need longer for an answer that does come
    monkeypatch.setattr(scrape, "_PAGE_SECONDS", 60)
    monkeypatch.setattr(scrape, "_ALL_SECONDS", 120)
    world = World()
    runner = web.ServerRunner(web.Server(world.handle), shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "0.0.0.0", 0).start()
    world.port = runner.addresses[0][1]
    yield world
    await runner.cleanup()


SPOILT = [
    (
        "p",
        "vllm:prompt_tokens_by_source_total is NaN",
        "vllm:prompt_tokens_by_source_total is no finite number",
    ),
    (
        "p",
        "vllm:prompt_tokens_by_source_total is 1e400",
        "vllm:prompt_tokens_by_source_total is no finite number",
    ),
    ("p", "vllm:num_requests_waiting is +Inf", "vllm:num_requests_waiting is no finite number"),
    ("d", "vllm:num_requests_waiting is +Inf", "vllm:num_requests_waiting is no finite number"),
    ("d", "vllm:kv_cache_usage_perc is NaN", "vllm:kv_cache_usage_perc is no finite number"),
    ("d", "vllm:kv_cache_usage_perc is much", "not a page of metrics"),
    ("d", "empty", "an empty page"),
    ("p", "HTML", "not a page of metrics"),
    ("d", "cut", "its answer is cut off"),
    ("p", "status 503", "status 503"),
    ("d", "silence", "no answer within 3 s"),
]


@pytest.mark.parametrize(("role", "how", "why"), SPOILT, ids=[f"{role}: {how}" for role, how, _ in SPOILT])
async def test_a_spoilt_page_holds_the_sizes_until_it_is_whole(
    world: World, role: str, how: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if how == "silence":
        monkeypatch.setattr(scrape, "_PAGE_SECONDS", 3)
    for _ in range(3):
        _, decision = await world.tick()
    assert decision.desired != Sizes(4, 4), "the load is worth two"
    for pods in (["3"], ["0", "1", "2", "3"]):
        world.spoilt = {role + number: how for number in pods}
        inputs, decision = await world.tick()
        assert inputs.missing == tuple(f"{role}{number}: {why}" for number in pods)
        assert (decision.outcome, decision.desired) == (Outcome.BLIND, Sizes(4, 4))
    world.spoilt = {}
    inputs, decision = await world.tick()
    assert inputs.missing == ()
    assert decision.desired != Sizes(4, 4)
