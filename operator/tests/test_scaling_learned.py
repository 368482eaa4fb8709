"""What the engines' own figures teach: lower bounds of prefill's speed, an upper bound of what a token from decode costs."""

from collections.abc import Callable

import pytest
from scaling_pages import TICK, Watch, decode, prefill, router

from disagg_operator.pages import Answer, NoPage
from disagg_operator.scaling.inputs import Learned
from disagg_operator.scaling.learned import resume
from disagg_operator.scaling.signals import Sight

Pages = Callable[[int], dict[str, Answer]]


def working(
    speed: float, *, waiting: float = 2, prompt: float = 100, overlap: float = 2, restart: int = -1
) -> Pages:
    """One prefill pod that computes `speed` tokens per second, `overlap` prompts at a time."""

    def pages(n: int) -> dict[str, Answer]:
        k = (n if restart < 0 or n < restart else n - restart) * TICK * speed
        mine = prefill(computed=k, prompts=k / prompt, seconds=k / speed * overlap, waiting=waiting)
        return {"p0": mine, "d0": decode(), "r0": router(turns=k / prompt)}

    return pages


def run(pages: Pages, looks: int, sight: Sight | None = None) -> Watch:
    watch = Watch(prefill=1, decode=1, routers=1, sight=sight or Sight())
    for n in range(looks):
        watch.look(pages(n))
    return watch


def test_a_pod_that_is_never_idle_shows_its_speed_less_one_prompt() -> None:
    watch = run(working(1000), 30)
    speed = watch.lessons.learned.tokens_per_second
    assert speed is not None
    assert speed == pytest.approx(1000 - 100 / 60)


def test_long_prompts_make_no_pod_faster_than_it_is() -> None:
    """Of prompts that take 25 s three may be finished in a minute, and 2.4 were computed."""

    def pages(n: int) -> dict[str, Answer]:
        done = n * TICK // 25
        mine = prefill(computed=25_000 * done, prompts=done, seconds=25 * done, waiting=1)
        return {"p0": mine, "d0": decode(), "r0": router(turns=done)}

    speed = run(pages, 200).lessons.learned.tokens_per_second
    assert speed is None or speed <= 1000


def test_a_pod_that_has_time_shows_its_speed_by_the_time_of_its_prompts() -> None:
    watch = run(working(50, waiting=0, overlap=0.1), 30)
    assert watch.lessons.by_busy is None
    assert watch.lessons.learned.tokens_per_second == pytest.approx(500)


def test_all_engines_of_a_pod_are_its_speed() -> None:
    def pages(n: int) -> dict[str, Answer]:
        k = n * TICK * 500
        both = [
            prefill(computed=k, prompts=k / 100, seconds=n * TICK, waiting=0, engine=engine)
            for engine in ("0", "1")
        ]
        return {"p0": (*both[0], *both[1]), "d0": decode(), "r0": router(turns=k / 50)}

    assert run(pages, 30).lessons.learned.tokens_per_second == pytest.approx(1000)


def test_nothing_is_learned_from_little() -> None:
    assert run(working(1000), 16).lessons.learned == Learned()
    assert run(working(1, prompt=100), 100).lessons.learned == Learned(), "one prompt in a minute and a half"


def test_waiting_is_asked_for_at_every_look() -> None:
    def pages(n: int) -> dict[str, Answer]:
        return working(1000, waiting=n % 3)(n)

    assert run(pages, 60).lessons.by_busy is None


def test_an_engine_that_begins_anew_is_not_faster_for_it() -> None:
    speed = run(working(1000, restart=21), 60).lessons.learned.tokens_per_second
    assert speed is not None
    assert speed <= 1000


def test_what_was_learned_stays_when_nothing_is_to_be_done() -> None:
    watch = run(working(1000), 30)
    before = watch.lessons.learned
    idle = working(1000, waiting=0)(29)
    for _ in range(300):
        watch.look(idle)
    assert watch.lessons.busy == ()
    assert watch.lessons.learned == before


def test_memory_is_of_an_hour() -> None:
    watch = run(working(1000), 600)
    assert len(watch.lessons.busy) <= 60
    assert len(watch.lessons.spent) <= 60
    watch.look({pod: NoPage("status 503") for pod in ("p0", "d0", "r0")}, after=7200)
    assert watch.lessons.busy == ()
    assert watch.lessons.learned.tokens_per_second is not None


# What a token from decode costs


def pushing(seconds_per_token: float, *, read: bool = False) -> Pages:
    def pages(n: int) -> dict[str, Answer]:
        found = working(1000)(n)
        tokens, seconds = 300.0 * n, 300.0 * n * seconds_per_token
        to_prefill = {"engine": "0", "direction": "decode_to_prefill"}
        away = {"engine": "0", "direction": "prefill_to_decode"}
        if read:
            k = n * TICK * 1000
            own = ("vllm:nixl_xfer_time_seconds_sum", {"engine": "0"}, seconds)
            found["p0"] = prefill(
                computed=k, transferred=tokens, prompts=k / 100, seconds=k / 500, waiting=2, more=[own]
            )
            return found
        more = [
            ("disagg_kv_push_tokens_total", to_prefill, tokens),
            ("disagg_kv_write_seconds_sum", to_prefill, seconds),
            ("disagg_kv_push_tokens_total", away, 1e6 * n),
            ("disagg_kv_write_seconds_sum", away, 1e6 * n),
        ]
        return found | {"d0": decode(more=more)}

    return pages


@pytest.mark.parametrize("read", [False, True], ids=["written by decode", "read by prefill"])
def test_the_cost_is_the_time_of_its_transfer_at_prefills_speed(read: bool) -> None:
    learned = run(pushing(0.0002, read=read), 40).lessons.learned
    assert learned.tokens_per_second is not None
    assert learned.remote_cost == pytest.approx(0.0002 * learned.tokens_per_second)


def test_a_cost_is_at_most_that_of_computing() -> None:
    assert run(pushing(5.0), 40).lessons.learned.remote_cost == 1.0


def test_without_transfers_from_decode_no_cost_is_known() -> None:
    learned = run(working(1000), 40).lessons.learned
    assert learned.tokens_per_second is not None
    assert learned.remote_cost is None


# An operator that starts anew


def test_what_the_status_says_holds_until_there_is_better() -> None:
    sight = Sight(lessons=resume(800.0, 0.3))
    assert run(working(1000), 10, sight).lessons.learned == Learned(800.0, 0.3)
    learned = run(pushing(0.0002), 40, sight).lessons.learned
    assert learned.tokens_per_second == pytest.approx(1000 - 100 / 60)
    assert learned.remote_cost == pytest.approx(0.2, rel=0.01)


def test_nothing_to_resume() -> None:
    assert resume(None, None).learned == Learned()
    assert resume(None, 0.3).learned == Learned(None, 0.3)


def test_a_clock_that_goes_back_loses_samples_and_nothing_learned() -> None:
    watch = run(working(1000), 30)
    before = watch.lessons.learned
    watch.look(working(1000)(31), after=-500)
    assert watch.lessons.learned == before
    assert watch.lessons.busy == ()
    for n in range(32, 60):
        watch.look(working(1000)(n))
    assert watch.lessons.busy, "and goes on learning"
    assert watch.lessons.learned.tokens_per_second == pytest.approx(before.tokens_per_second)
