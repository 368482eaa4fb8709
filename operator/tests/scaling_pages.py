"""Pages of pods, made up for tests: engines that count, and a load on them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from disagg_operator.naming import Component
from disagg_operator.pages import Answer, NoPage, Page, Sample
from disagg_operator.scaling.inputs import Inputs, Limits, RoleLimits
from disagg_operator.scaling.learned import Lessons
from disagg_operator.scaling.signals import Sight, measure, see

WINDOW = 60.0
TICK = 15.0
FIRST_BYTE = "disagg_router_time_to_first_byte_seconds_bucket"
Line = tuple[str, Mapping[str, str], float]


def page(*lines: Line) -> Page:
    return tuple(Sample(name, dict(labels), float(value)) for name, labels, value in lines)


def prefill(
    *,
    computed: float = 0,
    cached: float = 0,
    transferred: float = 0,
    prompts: float = 0,
    seconds: float = 0,
    waiting: float = 0,
    hits: float = 0,
    inserted: float = 0,
    engine: str = "0",
    more: Iterable[Line] = (),
) -> Page:
    own = {"engine": engine, "model_name": "m"}
    by_source = {"local_compute": computed, "local_cache_hit": cached, "external_kv_transfer": transferred}
    return page(
        *(
            ("vllm:prompt_tokens_by_source_total", {**own, "source": source}, n)
            for source, n in by_source.items()
        ),
        ("vllm:request_prefill_time_seconds_count", own, prompts),
        ("vllm:request_prefill_time_seconds_sum", own, seconds),
        ("vllm:num_requests_waiting", own, waiting),
        ("disagg_kv_writeback_hit_tokens_total", own, hits),
        ("disagg_kv_writeback_inserted_tokens_total", own, inserted),
        *more,
    )


def decode(
    *,
    usage: float = 0,
    running: float = 0,
    waiting: float = 0,
    blocks: str = "1000",
    engine: str = "0",
    more: Iterable[Line] = (),
) -> Page:
    own = {"engine": engine, "model_name": "m"}
    return page(
        ("vllm:kv_cache_usage_perc", own, usage),
        ("vllm:num_requests_running", own, running),
        ("vllm:num_requests_waiting", own, waiting),
        ("vllm:cache_config_info", {"engine": engine, "block_size": "16", "num_gpu_blocks": blocks}, 1),
        *more,
    )


def router(
    *, turns: float | None = None, small: float = 0, waiting: float = 0, more: Iterable[Line] = ()
) -> Page:
    """A label is not there before it has counted: `turns` is None then."""
    name = "disagg_router_prefill_decisions_total"
    decisions: list[Line] = (
        [] if turns is None else [(name, {"placement": "prefill", "reason": "disabled"}, turns)]
    )
    if small:
        decisions.append((name, {"placement": "decode", "reason": "small"}, small))
    return page(("disagg_router_waiting_turns", {}, waiting), *decisions, *more)


def histogram(name: str, counts: Mapping[str, float], **labels: str) -> list[Line]:
    return [(name, {**labels, "le": bound}, count) for bound, count in counts.items()]


@dataclass
class Watch:
    """Looks at pods, tick by tick."""

    prefill: int = 4
    decode: int = 4
    routers: int = 2
    now: float = 1000.0
    window: float = WINDOW
    sight: Sight = field(default_factory=Sight)

    @property
    def pods(self) -> dict[Component, list[str]]:
        return {
            Component.PREFILL: [f"p{n}" for n in range(self.prefill)],
            Component.DECODE: [f"d{n}" for n in range(self.decode)],
            Component.ROUTER: [f"r{n}" for n in range(self.routers)],
        }

    def look(self, pages: Mapping[str, Answer], after: float = TICK) -> Inputs:
        """A tick. A pod that `pages` does not name did not answer."""
        self.now += after
        answers = {pod: pages.get(pod, NoPage("status 503")) for pods in self.pods.values() for pod in pods}
        self.sight = see(self.sight, self.pods, answers, self.now, self.window)
        return measure(self.sight, self.now, self.window)

    @property
    def lessons(self) -> Lessons:
        return self.sight.lessons


LIMITS = Limits(
    prefill=RoleLimits(1, 8),
    decode=RoleLimits(1, 8),
    tokens_per_second=1000.0,
    down_window=0.0,
    down_pods=1,
    sequences=100,
)
"""Of decisions on what `load` has."""


def load(n: int, *, turns: float = 10.0) -> dict[str, Answer]:
    """The n-th look at four pods a role with work for two: 100 tokens a prompt, `turns` a second, half of it reused."""
    at = n * TICK
    share = turns * at / 4
    return {
        **{
            f"p{i}": prefill(
                computed=50 * share, cached=40 * share, transferred=10 * share, prompts=share, waiting=1
            )
            for i in range(4)
        },
        **{f"d{i}": decode(usage=0.3, running=10) for i in range(4)},
        **{f"r{i}": router(turns=turns * at / 2 if n else None, waiting=2) for i in range(2)},
    }


def watched(looks: int = 6, **pods: int) -> tuple[Watch, Inputs]:
    """Who has looked at `load` so often, and what was seen last."""
    watch = Watch(**pods)
    found = [watch.look(load(n)) for n in range(looks)]
    return watch, found[-1]
