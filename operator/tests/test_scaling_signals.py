"""The load from pages of metrics: what is counted, from when on, and that neither order nor division matters."""

import dataclasses
import itertools
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scaling_pages import (
    FIRST_BYTE,
    LIMITS,
    TICK,
    Line,
    Watch,
    decode,
    histogram,
    load,
    page,
    prefill,
    router,
    watched,
)

from disagg_operator.naming import Component
from disagg_operator.pages import Answer, NoPage, Page, Sample
from disagg_operator.scaling.history import EMPTY
from disagg_operator.scaling.inputs import Reuse, Sizes
from disagg_operator.scaling.policy import decide
from disagg_operator.scaling.signals import NAMES, NOTHING, measure, see

# What is counted


def test_the_load_of_a_quiet_minute() -> None:
    _, inputs = watched()
    assert inputs.missing == ()
    assert inputs.prefill is not None
    assert inputs.decode is not None
    assert inputs.prefill.offered == pytest.approx(1000)
    assert inputs.prefill.tokens == pytest.approx(60 * 1000)
    assert inputs.prefill.reuse.local == pytest.approx(0.4)
    assert inputs.prefill.reuse.remote == pytest.approx(0.1)
    assert inputs.prefill.backlog == pytest.approx((4 + 4) * 100)
    assert (inputs.decode.kv_usage, inputs.decode.fullest) == (pytest.approx(0.3), 0.3)
    assert (inputs.decode.running, inputs.decode.waiting, inputs.decode.retained) == (40, 0, None)
    assert inputs.failed_share == 0


def test_the_latest_look_shows_a_fall_of_reuse_at_once() -> None:
    watch, before = watched()
    assert before.prefill is not None
    assert before.prefill.latest_tokens == pytest.approx(TICK * 1000)
    assert before.prefill.latest_reuse == pytest.approx(0.5)
    warm, all_ = (10 * n * TICK / 4 for n in (5, 6))
    cold = prefill(
        computed=50 * warm + 100 * (all_ - warm), cached=40 * warm, transferred=10 * warm, prompts=all_
    )
    inputs = watch.look({**load(6), **{f"p{i}": cold for i in range(4)}})
    assert inputs.prefill is not None
    assert inputs.prefill.latest_reuse == 0
    assert inputs.prefill.reuse.total == pytest.approx(0.5 * 3 / 4)


def test_every_pod_is_counted_from_its_second_look() -> None:
    watch = Watch()
    first = watch.look(load(0))
    assert first.prefill is None
    assert [why for why in first.missing if "only once" in why], "nothing has grown yet"
    assert first.decode is not None, "which does not count"
    second = watch.look(load(1))
    assert second.missing == ()
    assert second.prefill is not None
    assert second.prefill.offered == pytest.approx(1000)


def test_a_pod_that_has_just_become_ready_blinds_nobody() -> None:
    watch, before = watched(prefill=3)
    watch.prefill = 4
    pages = load(6)
    inputs = watch.look(pages)
    assert inputs.missing == ()
    assert inputs.prefill is not None
    assert before.prefill is not None
    assert inputs.prefill.offered == pytest.approx(before.prefill.offered)
    assert inputs.prefill.tokens == pytest.approx(before.prefill.tokens)
    assert inputs.prefill.backlog == pytest.approx(before.prefill.backlog + 100), "what waits there waits"
    assert watch.look(load(7)).prefill is not None


def test_routers_that_replace_others_hold_for_one_look() -> None:
    watch, _ = watched()
    watch.routers = 0
    inputs = watch.look(load(6))
    assert inputs.prefill is None
    assert inputs.missing == ("router: no pod is ready",)
    watch.routers = 2
    fresh = {**load(7), "r0": router(), "r1": router()}
    assert watch.look(fresh).missing == ("router: every pod was read only once so far",)
    later = watch.look({**load(8), "r0": router(turns=75), "r1": router(turns=75)})
    assert later.prefill is not None
    assert later.prefill.offered == pytest.approx(1000)


def test_turns_that_decode_computes_by_choice_are_not_prefills() -> None:
    watch = Watch(routers=1)
    for n in range(6):
        pages = load(n)
        turns = 10 * TICK * n
        lost: Line = (
            "disagg_router_prefill_decisions_total",
            {"placement": "decode", "reason": "no_prefill"},
            turns,
        )
        pages["r0"] = router(turns=turns, small=2 * turns, waiting=8, more=[lost])
        inputs = watch.look(pages)
    assert inputs.prefill is not None
    assert inputs.prefill.offered == pytest.approx(2 * 1000), "those that found no prefill were meant for it"
    assert inputs.prefill.backlog == pytest.approx((4 + 8 / 2) * 100), "half of what waits will go there"


def test_what_decode_wrote_back_is_told_from_other_hits() -> None:
    watch = Watch(prefill=2, decode=1, routers=1)
    for n in range(6):
        k = n * TICK
        pages = load(n)
        pages["p0"] = prefill(
            computed=10 * k, cached=80 * k, transferred=10 * k, hits=30 * k, inserted=50 * k
        )
        pages["p1"] = prefill(computed=100 * k, cached=0, hits=10 * k, prompts=k)
        inputs = watch.look(pages)
    assert inputs.prefill is not None
    assert inputs.prefill.reuse.remote == pytest.approx((10 + 30) / 200), "never more than a pod's hits"
    assert inputs.prefill.reuse.local == pytest.approx(50 / 200)
    assert inputs.prefill.written_back == pytest.approx(50 * 60)


def test_what_is_retained_is_a_share_of_all_engines_blocks() -> None:
    watch = Watch(decode=2, routers=2)
    kept = [("disagg_router_retained_kv_blocks", {}, 150.0)]
    pages = {
        **load(0),
        "d0": (
            *decode(blocks="1000"),
            *decode(blocks="1000", engine="1"),
        ),  # both engines' together, with each
        "d1": (*decode(blocks="1000"), *decode(blocks="1000", engine="1")),
        "r0": router(more=kept),
        "r1": router(more=kept),
    }
    inputs = watch.look(pages)
    assert inputs.decode is not None
    assert inputs.decode.retained == pytest.approx(300 / 2000)
    unknown = watch.look({**pages, "d0": decode(blocks="None"), "d1": decode(blocks="")})
    assert unknown.decode is not None
    assert unknown.decode.retained is None


def test_requests_whose_kv_is_on_its_way_do_not_wait_for_a_place() -> None:
    by_reason = "vllm:num_requests_waiting_by_reason"
    more = [
        (by_reason, {"reason": "capacity", "engine": "0"}, 2.0),
        (by_reason, {"reason": "deferred", "engine": "0"}, 5.0),
    ]
    watch = Watch(decode=2)
    inputs = watch.look({**load(0), "d0": decode(waiting=7, more=more), "d1": decode(waiting=3)})
    assert inputs.decode is not None
    assert inputs.decode.waiting == 2 + 3, "an engine that does not tell them apart has all of them counted"


def failures(name: str, n: int, **labels: str) -> list[Line]:
    return [(name, {"engine": "0", **labels}, 3.0 * n)]


@pytest.mark.parametrize(
    ("pod", "name", "counts"),
    [
        ("p0", "vllm:nixl_num_failed_transfers_total", True),
        ("p0", "vllm:nixl_num_kv_expired_reqs_total", True),
        ("p0", "disagg_kv_writeback_aborted_total", True),
        ("d0", "vllm:nixl_num_failed_transfers_total", True),
        ("d0", "disagg_kv_recomputed_requests_total", True),
        ("d0", "disagg_kv_writeback_offers_total", False),
    ],
)
def test_transfers_that_fail_are_counted_by_turn(pod: str, name: str, counts: bool) -> None:
    watch = Watch()
    for n in range(6):
        pages = load(n)
        own = pages[pod]
        assert not isinstance(own, NoPage)
        wanted = [line for line in failures(name, n, reason="x") if line[0] in NAMES[Component(role(pod))]]
        inputs = watch.look({**pages, pod: (*own, *page(*wanted))})
    assert inputs.failed_share == pytest.approx(3 / (10 * TICK) if counts else 0)


def role(pod: str) -> str:
    return {"p": "prefill", "d": "decode", "r": "router"}[pod[0]]


# Percentiles


SEEN = {"0.1": 0.0, "0.5": 10.0, "1.0": 90.0, "2.5": 100.0, "+Inf": 100.0}


def test_percentiles_are_of_the_window_and_of_streams() -> None:
    watch = Watch(routers=2, decode=2)
    streamed = {"streamed": "true", "endpoint": "chat"}
    other = {"streamed": "false", "endpoint": "chat"}
    for n in (1, 2):
        old = dict.fromkeys(SEEN, 50.0)  # all of it was fast, before
        counts = {bound: old[bound] + (n - 1) * count / 2 for bound, count in SEEN.items()}
        bad = {bound: 1e6 * n * (bound == "+Inf") for bound in SEEN}
        more = [*histogram(FIRST_BYTE, counts, **streamed), *histogram(FIRST_BYTE, bad, **other)]
        between = histogram("vllm:inter_token_latency_seconds_bucket", counts, engine="0")
        pages = {
            **load(n),
            **{f"r{i}": router(turns=n, more=more) for i in range(2)},
            **{f"d{i}": decode(more=between) for i in range(2)},
        }
        inputs = watch.look(pages)
    assert inputs.ttft_p95 == pytest.approx(1.0 + 1.5 * 5 / 10)
    assert inputs.itl_p95 == inputs.ttft_p95


def p95(counts: Mapping[str, float]) -> float | None:
    watch = Watch(routers=1)
    for n in (0, 1):
        lines = histogram(FIRST_BYTE, {b: n * c for b, c in counts.items()}, streamed="true")
        inputs = watch.look({**load(n), "r0": router(turns=n, more=lines)})
    return inputs.ttft_p95


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ({"1.0": 19, "+Inf": 19}, None),
        ({"1.0": 20, "+Inf": 20}, 0.95),
        ({"1.0": 0, "+Inf": 20}, 1.0),
        ({"0.5": 20, "1.0": 20, "+Inf": 20}, 0.475),
        ({"0.5": 20, "1.0": 10, "+Inf": 20}, 0.475),
        ({"+Inf": 20}, None),
        ({"1.0": 20}, None),
        ({"x": 20, "nan": 20, "": 20}, None),
        ({}, None),
    ],
)
def test_percentiles_as_promql_has_them(counts: Mapping[str, float], expected: float | None) -> None:
    assert p95(counts) == (None if expected is None else pytest.approx(expected))


# Counters that begin anew, and clocks


def test_a_counter_that_begins_anew_counts_from_nothing() -> None:
    watch = Watch(prefill=1, routers=1)
    for computed in (1000, 1600, 100, 300):
        inputs = watch.look(
            {**load(0), "p0": prefill(computed=computed, prompts=computed / 100), "r0": router(turns=0)}
        )
    assert inputs.prefill is not None
    assert inputs.prefill.tokens == 600 + 100 + 200


def test_a_sum_that_goes_down_blinds_nobody() -> None:
    """vLLM observes a negative prefill time of a request that fails before its first token."""
    watch = Watch(prefill=1)
    for n, seconds in enumerate((10.0, 20.0, -1e6, -1e6 + 5, 3.0)):
        inputs = watch.look({**load(n), "p0": prefill(computed=100 * n, prompts=n, seconds=seconds)})
    assert inputs.missing == ()
    assert watch.sight.pods["p0"].increase("vllm:request_prefill_time_seconds_sum") == 10 + 0 + 5 + (
        1e6 - 5 + 3
    )


def test_a_series_that_a_page_lacks_goes_on_where_it_was() -> None:
    """A page that was cut between two lines, and one of an engine that began anew and has not counted yet."""
    watch = Watch(routers=1)
    for n, turns in enumerate((1000.0, None, 1030.0, None, 5.0)):
        inputs = watch.look({**load(n), "r0": router(turns=turns)})
    legs = 30 + 5
    assert watch.sight.pods["r0"].increase("disagg_router_prefill_decisions_total") == legs
    assert inputs.missing == ()


@pytest.mark.parametrize("back", [-1.0, -100.0, -1e9])
def test_a_clock_that_goes_back_begins_anew_and_forgets_nothing_learned(back: float) -> None:
    watch, _ = watched()
    inputs = watch.look(load(6), after=back)
    assert inputs.prefill is None
    assert inputs.decode is not None
    assert watch.lessons.prompt_tokens == pytest.approx(100)
    again = watch.look(load(7))
    assert again.prefill is not None
    assert again.prefill.offered == pytest.approx(1000)


@pytest.mark.parametrize("jump", [90.0, 400.0, 800.0, 1e6])
def test_a_clock_that_jumps_makes_no_load_greater_and_is_soon_over(jump: float) -> None:
    watch, _ = watched()
    inputs = watch.look(load(6), after=jump)
    if inputs.prefill is not None:
        assert 0 <= inputs.prefill.offered <= 1001
        assert 0 <= inputs.prefill.tokens <= 60_001
    for n in range(7, 13):
        inputs = watch.look(load(n))
        assert inputs.prefill is not None
        assert inputs.prefill.offered <= 1001
    assert inputs.prefill is not None
    assert inputs.prefill.offered == pytest.approx(1000)


@pytest.mark.parametrize("after", [0.0, 1e-9, 0.5])
def test_two_looks_at_once_are_one(after: float) -> None:
    watch, before = watched()
    inputs = watch.look(load(7), after=after)
    assert inputs.prefill is not None
    assert before.prefill is not None
    assert inputs.prefill.offered == pytest.approx(before.prefill.offered)


def test_many_looks_within_a_window_cost_no_more_memory() -> None:
    watch = Watch(window=3600.0)
    for n in range(300):
        inputs = watch.look(load(n))
    assert inputs.prefill is not None
    assert inputs.prefill.offered == pytest.approx(1000)
    assert inputs.prefill.tokens == pytest.approx(3600 * 1000)
    assert max(len(seen.points) for seen in watch.sight.pods.values()) < 12


def test_samples_that_somebody_else_has_had_too_long_are_missing() -> None:
    def old(answer: Answer, age: float) -> Answer:
        assert not isinstance(answer, NoPage)
        return tuple(dataclasses.replace(sample, age=age) for sample in answer)

    watch, _ = watched()
    pages = load(6)
    inputs = watch.look({**pages, "p3": old(pages["p3"], 20.0)})
    assert inputs.missing == (), "older than the look before it: the same once more"
    for n in range(7, 12):
        pages = load(n)
        inputs = watch.look({**pages, "p3": old(load(6)["p3"], (n - 6) * TICK)})
    assert inputs.missing == ("p3: its newest page is not of the last 60 s",)


def test_a_sight_that_nobody_renews_is_stale() -> None:
    watch, _ = watched()
    for now in (watch.now + 61, watch.now - 1):
        inputs = measure(watch.sight, now, watch.window)
        assert (inputs.prefill, inputs.decode) == (None, None)
        assert len(inputs.missing) == 10


def test_nothing_was_seen() -> None:
    inputs = measure(NOTHING, 0.0, 60.0)
    assert (inputs.prefill, inputs.decode, inputs.ttft_p95, inputs.itl_p95) == (None, None, None, None)
    assert inputs.missing == (
        "prefill: no pod is ready",
        "decode: no pod is ready",
        "router: no pod is ready",
    )


def test_a_load_whose_prompts_nobody_has_finished_is_not_known() -> None:
    watch = Watch()
    for n in range(3):
        idle = {**load(n), **{f"p{i}": prefill() for i in range(4)}, "r0": router(), "r1": router()}
        inputs = watch.look(idle)
    assert inputs.prefill is not None, "nobody asks for anything"
    assert (inputs.prefill.offered, inputs.prefill.backlog, inputs.prefill.reuse) == (0, 0, Reuse())
    inputs = watch.look({**idle, "r0": router(turns=5)})
    assert inputs.prefill is None
    assert "how long they are" in inputs.missing[0]
    done = {**idle, "r0": router(turns=6), "p0": prefill(computed=300, prompts=3)}
    inputs = watch.look(done)
    assert inputs.prefill is not None
    assert inputs.prefill.offered == pytest.approx(6 / 60 * 100)


# One pod, several engines


def two_engines(n: int, split: bool) -> dict[str, Answer]:
    k = n * TICK
    pages = load(n)
    pages["p0"] = (
        *prefill(computed=1000 + 10 * k, prompts=0.1 * k),
        *prefill(computed=3000 + 30 * k, prompts=0.3 * k, engine="1", waiting=3),
    )
    pages["d0"] = (*decode(usage=0.9, running=4, waiting=9), *decode(usage=0.1, engine="1"))
    return {pod: divided(answer) if split else answer for pod, answer in pages.items()}


def divided(answer: Answer) -> Page:
    """The same counters, of two models; a share is of the same cache, whoever asks."""
    assert not isinstance(answer, NoPage)
    found: list[Sample] = []
    for sample in answer:
        shared = sample.name in ("vllm:kv_cache_usage_perc", "vllm:cache_config_info")
        for model, part in (("a", 0.25), ("b", 0.75)):
            value = sample.value if shared else sample.value * part
            found.append(
                dataclasses.replace(sample, labels={**sample.labels, "model_name": model}, value=value)
            )
    return tuple(found)


def test_all_engines_of_a_pod_count() -> None:
    watch = Watch(prefill=1, decode=1)
    for n in range(6):
        inputs = watch.look(two_engines(n, split=False))
    assert inputs.prefill is not None
    assert inputs.decode is not None
    assert (inputs.decode.waiting, inputs.decode.running) == (9, 4)
    assert (inputs.decode.kv_usage, inputs.decode.fullest) == (0.9, 0.9), "the full one is not hidden"
    assert inputs.prefill.tokens == pytest.approx(40 * 60)
    assert inputs.prefill.offered == pytest.approx(10 * 40 / 0.4)


def test_neither_order_nor_division_changes_a_number() -> None:
    reference = None
    for split, order in itertools.product((False, True), (1, -1)):
        watch, history = Watch(prefill=1, decode=1), EMPTY
        for n in range(6):
            pages = two_engines(n, split)
            turned = {pod: answer[::order] for pod, answer in pages.items() if not isinstance(answer, NoPage)}
            inputs = watch.look(turned)
            decision, history = decide(inputs, LIMITS, Sizes(1, 1), history, watch.now)
        found = (inputs, decision)
        reference = reference or found
        assert found == reference


def test_the_fuller_half_of_the_engines_counts() -> None:
    shares = (0.9, 0.1, 0.5, 0.7, 0.2)
    watch = Watch(decode=1)
    pages = tuple(s for n, share in enumerate(shares) for s in decode(usage=share, engine=str(n)))
    inputs = watch.look({**load(0), "d0": pages})
    assert inputs.decode is not None
    assert inputs.decode.kv_usage == pytest.approx((0.9 + 0.7 + 0.5) / 3)
    assert inputs.decode.fullest == 0.9


@given(st.permutations(list(range(4))), st.integers(0, 20))
@settings(max_examples=30, deadline=None)
def test_the_order_of_pods_and_pages_does_not_matter(order: list[int], seed: int) -> None:
    straight, turned = Watch(), Watch()
    for n in range(3):
        pages = load(n)
        pages["p1"] = prefill(computed=0.1 * seed * n, cached=0.7 * n, prompts=0.3 * n)
        one = straight.look(pages)
        names = list(pages)
        pods = {
            c: [p for i in order for p in found if p.endswith(str(i))] for c, found in turned.pods.items()
        }
        shuffled = {
            name: pages[name][::-1] for name in reversed(names) if not isinstance(pages[name], NoPage)
        }
        turned.now += TICK
        turned.sight = see(turned.sight, pods, shuffled, turned.now, turned.window)
        other = measure(turned.sight, turned.now, turned.window)
        assert one == other
