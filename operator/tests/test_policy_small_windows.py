"""Short windows and slow engines: the sizes follow reuse there as they do on fast engines with the defaults."""

from collections.abc import Sequence

import pytest

from disagg_operator.scaling.history import EMPTY
from disagg_operator.scaling.inputs import DecodeLoad, Inputs, Limits, PrefillLoad, Reuse, RoleLimits, Sizes
from disagg_operator.scaling.policy import decide

TICK = 15.0
COLD, WARM = Reuse(), Reuse(local=0.9)
IDLE_DECODE = DecodeLoad(pods=1, kv_usage=0.1, fullest=0.1, running=1.0, waiting=0.0)


def limits(*, speed: float, window: float, down_window: float) -> Limits:
    return Limits(
        prefill=RoleLimits(1, 2),
        decode=RoleLimits(1, 1),
        tokens_per_second=speed,
        window=window,
        down_window=down_window,
    )


def prefill_sizes(asked: Limits, offered: float, reuses: Sequence[Reuse]) -> list[int]:
    """Prefill's size after each tick of that reuse, from two pods on."""
    history, sizes, found = EMPTY, Sizes(2, 1), []
    for number, reuse in enumerate(reuses):
        load = PrefillLoad(offered=offered, tokens=offered * asked.window, reuse=reuse, backlog=0.0)
        decision, history = decide(Inputs(load, IDLE_DECODE), asked, sizes, history, number * TICK)
        sizes = decision.desired
        found.append(sizes.prefill)
    return found


def test_a_pool_that_shrank_by_the_reuse_of_a_short_window_does_not_grow_by_that_of_a_longer_one() -> None:
    asked = limits(speed=1000, window=20, down_window=40)
    sizes = prefill_sizes(asked, offered=1000, reuses=[COLD] * 20 + [WARM] * 12)
    assert sizes[:20] == [2] * 20
    assert sizes[-5:] == [1] * 5


@pytest.mark.parametrize(("speed", "window"), [(300, 20), (20, 60), (16_000, 60)])
def test_reuse_counts_however_slow_the_engines_are(speed: float, window: float) -> None:
    asked = limits(speed=speed, window=window, down_window=40)
    assert prefill_sizes(asked, offered=speed, reuses=[WARM] * 8)[-1] == 1


def test_reuse_of_a_few_prompts_does_not_count() -> None:
    asked = limits(speed=1000, window=20, down_window=40)
    load = PrefillLoad(offered=1000, tokens=1900, reuse=WARM, backlog=0.0)
    decision, _ = decide(Inputs(load, IDLE_DECODE), asked, Sizes(1, 1), EMPTY, 0.0)
    assert decision.desired.prefill == 2


def sizes_after_blindness(down_window: float, blind: float) -> list[int]:
    """Prefill's size after each tick once metrics are back; nobody asks anything, and before they did."""
    asked = limits(speed=1000, window=20, down_window=down_window)
    history, now = EMPTY, 0.0
    for _ in range(10):
        busy = PrefillLoad(offered=1000, tokens=20_000, reuse=COLD, backlog=0.0)
        decision, history = decide(Inputs(busy, IDLE_DECODE), asked, Sizes(2, 1), history, now)
        now += TICK
    assert decision.desired.prefill == 2
    now += blind
    sizes, found = Sizes(2, 1), []
    for _ in range(5):
        idle = PrefillLoad(offered=0, tokens=0, reuse=COLD, backlog=0.0)
        decision, history = decide(Inputs(idle, IDLE_DECODE), asked, sizes, history, now)
        sizes = decision.desired
        found.append(sizes.prefill)
        now += TICK
    return found


@pytest.mark.parametrize("blind", [45, 60, 200])
def test_a_pool_that_was_not_seen_for_its_window_is_looked_at_for_a_whole_one_again(blind: float) -> None:
    assert sizes_after_blindness(down_window=40, blind=blind) == [2, 2, 2, 1, 1]


def test_a_window_shorter_than_a_tick_is_no_reason_to_wait() -> None:
    assert sizes_after_blindness(down_window=0, blind=0)[0] == 1
