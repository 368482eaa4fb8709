"""Pages that cannot be used: what is missing then, that sizes are held, and that no number comes of them that cannot be."""

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scaling_pages import FIRST_BYTE, LIMITS, Line, Watch, decode, histogram, load, prefill, router, watched

from disagg_operator.naming import Component
from disagg_operator.pages import Answer, NoPage, Page
from disagg_operator.scaling.history import EMPTY, History
from disagg_operator.scaling.inputs import Inputs, Sizes
from disagg_operator.scaling.names import RUNNING
from disagg_operator.scaling.policy import Because, Decision, Outcome, decide
from disagg_operator.scaling.seen import MOST_SERIES


def without(answer: Answer, name: str) -> Page:
    assert not isinstance(answer, NoPage)
    return tuple(sample for sample in answer if sample.name != name)


def with_value(answer: Answer, name: str, value: float) -> Page:
    assert not isinstance(answer, NoPage)
    return tuple(dataclasses.replace(s, value=value) if s.name == name else s for s in answer)


BROKEN: dict[str, tuple[str, str, float | Answer]] = {
    "NaN tokens": ("p", "vllm:prompt_tokens_by_source_total", math.nan),
    "NaN usage": ("d", "vllm:kv_cache_usage_perc", math.nan),
    "Inf waiting on prefill": ("p", "vllm:num_requests_waiting", math.inf),
    "Inf waiting on decode": ("d", "vllm:num_requests_waiting", math.inf),
    "1e400": ("p", "vllm:prompt_tokens_by_source_total", float("1e400")),
    "-Inf": ("d", "vllm:num_requests_running", -math.inf),
    "less than nothing": ("d", "vllm:num_requests_running", -1.0),
    "no share": ("d", "vllm:kv_cache_usage_perc", 37.0),
    "absurd": ("p", "vllm:prompt_tokens_by_source_total", 1e300),
    "empty": ("p", "", ()),
    "empty on decode": ("d", "", ()),
    "HTML": ("d", "", NoPage("not a page of metrics")),
    "half a page": ("p", "", NoPage("its answer is cut off")),
    "503": ("d", "", NoPage("status 503")),
    "silence": ("p", "", NoPage("no answer within 2 s")),
}


def broken(
    pages: Mapping[str, Answer], which: Iterable[int], how: tuple[str, str, float | Answer]
) -> dict[str, Answer]:
    letter, name, value = how
    found = dict(pages)
    for i in which:
        pod = f"{letter}{i}"
        found[pod] = with_value(found[pod], name, value) if isinstance(value, float) else value
    return found


class Operator:
    """Watches and decides, tick by tick; both roles have four pods."""

    def __init__(self) -> None:
        self.watch, self.history, self.n = Watch(), EMPTY, 0

    def tick(
        self, which: Iterable[int] = (), how: tuple[str, str, float | Answer] = ("p", "", ())
    ) -> tuple[Inputs, Decision]:
        inputs = self.watch.look(broken(load(self.n), which, how))
        self.n += 1
        decision, self.history = decide(inputs, LIMITS, Sizes(4, 4), self.history, self.watch.now)
        return inputs, decision


def told(*things: Inputs | Decision | History) -> str:
    return json.dumps([dataclasses.asdict(thing) for thing in things])


@pytest.mark.parametrize("all_at_once", [False, True])
@pytest.mark.parametrize("how", BROKEN.values(), ids=BROKEN.keys())
def test_a_page_that_cannot_be_used_holds_and_the_tick_after_it_decides(
    how: tuple[str, str, float | Answer], all_at_once: bool
) -> None:
    operator = Operator()
    for _ in range(8):
        operator.tick()
    _, before = operator.tick()
    assert before.desired in (Sizes(3, 4), Sizes(4, 3)), "the load is worth two"
    which = range(4) if all_at_once else (3,)
    for _ in range(20):
        inputs, decision = operator.tick(which, how)
        assert (decision.outcome, decision.desired) == (Outcome.BLIND, Sizes(4, 4))
        assert {pod.split(":")[0] for pod in inputs.missing} == {f"{how[0]}{i}" for i in which}
        assert all(pod in decision.detail for pod in inputs.missing)
        written = told(inputs, decision, operator.history)
        assert "NaN" not in written
        assert "Infinity" not in written
    inputs, decision = operator.tick()
    assert inputs.missing == ()
    assert decision.outcome is not Outcome.BLIND, "the tick after the pages are clean decides"
    assert decision.arithmetic is not None
    assert decision.desired == before.desired


def test_four_pods_of_five_speak_for_all_and_nothing_shrinks() -> None:
    watch, history = Watch(prefill=5, decode=5), EMPTY
    for n in range(12):
        pages = {**load(n), "p4": NoPage("status 503"), "d4": NoPage("status 503")}
        inputs = watch.look(pages)
        decision, history = decide(inputs, LIMITS, Sizes(5, 5), history, watch.now)
    assert inputs.prefill is not None
    assert inputs.decode is not None
    assert inputs.missing == ("p4: status 503", "d4: status 503")
    assert inputs.decode.running == 50
    assert inputs.prefill.backlog == pytest.approx((5 + 4) * 100)
    assert inputs.prefill.offered == pytest.approx(1000)
    assert decision.desired == Sizes(5, 5)
    assert Because.MISSING in (decision.prefill_because, decision.decode_because)
    for pod in ("p3", "d3"):
        pages[pod] = NoPage("status 503")
    inputs = watch.look(pages)
    assert (inputs.prefill, inputs.decode) == (None, None), "three of five do not"


def test_one_router_stands_for_others_and_none_for_none() -> None:
    watch, _ = watched()
    inputs = watch.look({**load(6), "r1": NoPage("no connection")})
    assert inputs.prefill is not None
    assert inputs.prefill.offered == pytest.approx(1000)
    assert inputs.missing == ("r1: no connection",)
    inputs = watch.look({**load(7), "r0": (), "r1": NoPage("no connection")})
    assert inputs.prefill is None
    assert inputs.decode is not None
    assert inputs.missing == ("r0: no disagg_router_waiting_turns on its page", "r1: no connection")


@pytest.mark.parametrize("role", list(Component)[:2])
def test_a_page_without_one_required_sample_cannot_be_used(role: Component) -> None:
    pod = f"{role[0]}0"
    required = {
        Component.PREFILL: ["vllm:prompt_tokens_by_source_total", "vllm:request_prefill_time_seconds_count"],
        Component.DECODE: ["vllm:kv_cache_usage_perc", "vllm:num_requests_running"],
    }[role]
    for name in [*required, "vllm:num_requests_waiting"]:
        inputs = Watch().look({**load(0), pod: without(load(0)[pod], name)})
        assert inputs.missing[0] == f"{pod}: no {name} on its page"


def test_an_engine_that_a_page_shows_in_part_is_not_overlooked() -> None:
    half = (*decode(), *without(decode(engine="1"), "vllm:kv_cache_usage_perc"))
    inputs = Watch(decode=1).look({**load(0), "d0": half})
    assert inputs.missing[0] == "d0: no vllm:kv_cache_usage_perc of engine 1 on its page"


def test_a_series_that_is_there_twice_is_none() -> None:
    inputs = Watch(decode=1).look({**load(0), "d0": (*decode(), *decode())})
    assert inputs.missing[0].startswith("d0: ")
    assert "is there twice" in inputs.missing[0]


def aborted(n: int, prefix: str = "") -> list[Line]:
    return [("disagg_kv_writeback_aborted_total", {"reason": f"{prefix}{i}"}, 1.0) for i in range(n)]


def test_labels_that_never_come_again_do_not_pile_up() -> None:
    watch, known = Watch(prefill=1), []
    for n in range(12):
        inputs = watch.look({**load(0), "p0": prefill(more=aborted(1000, f"{n}-"))})
        known.append(sum(map(len, watch.sight.pods["p0"].last.values())))
    assert max(known) <= MOST_SERIES
    assert inputs.missing[0] == f"p0: more than {MOST_SERIES} series"


def test_a_page_of_very_many_series_is_none() -> None:
    inputs = Watch(prefill=1).look({**load(0), "p0": prefill(more=aborted(MOST_SERIES))})
    assert inputs.missing[0] == f"p0: more than {MOST_SERIES} series"


def test_a_label_that_nobody_could_read_is_not_quoted() -> None:
    inputs = Watch(decode=1).look(
        {**load(0), "d0": (*decode(), *without(decode(engine="9" * 5000), RUNNING))}
    )
    assert inputs.missing[0].startswith("d0: the labels of vllm:")
    assert inputs.missing[0].endswith("are too long")


# Whatever comes

values = st.one_of(
    st.floats(min_value=0, max_value=1e9),
    st.integers(0, 5).map(float),
    st.sampled_from([math.nan, math.inf, -math.inf, -1.0, 1e18, 1e300]),
)
answers = st.one_of(st.sampled_from([NoPage("status 503"), ()]), st.lists(values, min_size=8, max_size=8))


def any_page(pod: str, numbers: Answer | list[float]) -> Answer:
    if not isinstance(numbers, list):
        return numbers
    a, b, c, d, e, f, g, h = numbers
    if pod[0] == "p":
        return prefill(
            computed=a, cached=b, transferred=c, prompts=d, seconds=e, waiting=f, hits=g, inserted=h
        )
    if pod[0] == "d":
        pushed = [
            ("disagg_kv_push_tokens_total", {"direction": "decode_to_prefill"}, d),
            ("disagg_kv_write_seconds_sum", {"direction": "decode_to_prefill"}, e),
            ("disagg_kv_recomputed_requests_total", {"reason": "lost"}, f),
        ]
        return decode(usage=a / 1e9, running=b, waiting=c, more=pushed)
    kept = ("disagg_router_retained_kv_blocks", {}, e)
    return router(
        turns=a,
        small=b,
        waiting=c,
        more=[*histogram(FIRST_BYTE, {"1.0": d, "+Inf": d}, streamed="true"), kept],
    )


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_whatever_pods_say_the_numbers_are_such_as_can_be(data: st.DataObject) -> None:
    watch, history = Watch(prefill=2, decode=1, routers=1), EMPTY
    pods = [pod for names in watch.pods.values() for pod in names]
    highest: dict[str, float] = {}
    for _ in range(data.draw(st.integers(1, 6))):
        after = data.draw(st.sampled_from([0.0, 0.1, 15.0, 15.0, 15.0, 70.0, 1000.0, 1e9, -5.0]))
        pages = {pod: any_page(pod, data.draw(answers)) for pod in pods}
        for pod, answer in pages.items():
            if pod[0] == "p" and not isinstance(answer, NoPage):
                highest[pod] = highest.get(pod, 0.0) + sum(
                    s.value
                    for s in answer
                    if s.name == "vllm:prompt_tokens_by_source_total" and 0 <= s.value < 1e19
                )
        inputs = watch.look(pages, after)
        decision, history = decide(inputs, LIMITS, Sizes(4, 4), history, watch.now)
        written = told(inputs, decision, history)
        assert "NaN" not in written
        assert "Infinity" not in written
        assert not negative(inputs)
        assert 0 <= inputs.failed_share <= 1
        if inputs.prefill is not None:
            assert inputs.prefill.reuse.total <= 1 + 1e-9
            assert inputs.prefill.tokens <= sum(highest.values()) * (1 + 1e-9)
        if inputs.decode is not None:
            assert inputs.decode.kv_usage <= inputs.decode.fullest <= 1
        cost = inputs.learned.remote_cost
        assert cost is None or 0 <= cost <= 1


def negative(inputs: Inputs) -> bool:
    numbers = [inputs.failed_share, inputs.ttft_p95 or 0.0, inputs.itl_p95 or 0.0]
    if inputs.prefill is not None:
        load = inputs.prefill
        numbers += [
            load.offered,
            load.tokens,
            load.backlog,
            load.written_back,
            load.reuse.local,
            load.reuse.remote,
        ]
    if inputs.decode is not None:
        numbers += [
            inputs.decode.kv_usage,
            inputs.decode.running,
            inputs.decode.waiting,
            inputs.decode.retained or 0.0,
        ]
    return min(numbers) < 0
