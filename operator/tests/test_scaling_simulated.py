"""The policy in simulated time (bench/autoscaling), on a fixed seed. docs/autoscaling-simulation.md has what it does not reach.

Some of the traces, and the rules that matter there; `make sim` runs them all.
"""

from random import Random

import pytest

from bench.autoscaling.clock import Clock
from bench.autoscaling.compare import GOAL, OURS, RULES, Outcome, run
from bench.autoscaling.engines import Pod
from bench.autoscaling.figures import H200
from bench.autoscaling.traces import Trace, traces
from bench.autoscaling.world import choose
from disagg_router.backends import Backend
from disagg_router.http1.message import Address
from disagg_router.pick import Load
from disagg_router.pick import choose as router_choose
from disagg_router.session import Placement, Session

SEED = 1
TRACES = {trace.name: trace for trace in traces(SEED)}
WINDOW = 60.0


@pytest.fixture(scope="module")
def found() -> dict[tuple[str, str], Outcome]:
    """By trace and rule."""
    asked = {
        "steady": (OURS, "llm-d token-aware", "HPA, waiting", "Dynamo, load rule"),
        "reuse collapse": (OURS,),
        "pod loss": (OURS,),
        "single turns": (OURS, "llm-d token-aware"),
    }
    return {
        (name, rule): run(TRACES[name], rule, RULES[rule]).outcome
        for name, rules in asked.items()
        for rule in rules
    }


@pytest.mark.parametrize("name", ["steady", "pod loss", "single turns"])
def test_first_tokens_come_in_time(name: str, found: dict[tuple[str, str], Outcome]) -> None:
    assert found[name, OURS].attained >= GOAL


def test_a_steady_load_with_reuse_takes_a_fifth_less_than_any_peer(
    found: dict[tuple[str, str], Outcome],
) -> None:
    ours = found["steady", OURS]
    peers = [o for (name, rule), o in found.items() if name == "steady" and rule != OURS]
    assert all(ours.hours <= 0.8 * peer.hours for peer in peers if peer.attained >= GOAL)


def test_the_direction_changes_at_most_four_times_an_hour(found: dict[tuple[str, str], Outcome]) -> None:
    assert max(o.changes for (_, rule), o in found.items() if rule == OURS) <= 4


def test_reuse_that_collapses_is_made_up_for_within_two_windows_and_a_pods_start(
    found: dict[tuple[str, str], Outcome],
) -> None:
    recovery = found["reuse collapse", OURS].recovery
    assert recovery is not None
    assert recovery <= 2 * WINDOW + H200.start


def test_a_seed_gives_the_same_every_time() -> None:
    trace = TRACES["single turns"]
    short = Trace(trace.name, 600.0, trace.scripts, trace.first_sizes, trace.system)
    assert run(short, OURS, RULES[OURS]).outcome == run(short, OURS, RULES[OURS]).outcome


def test_turns_go_where_the_router_sends_them() -> None:
    random = Random(SEED)
    for _ in range(300):
        pods = [Pod(f"prefill-{n}", n, Clock(), H200) for n in range(random.randint(1, 8))]
        for pod in pods:
            pod.inflight = random.randint(0, 20)
        key, known = random.randbytes(16), random.random() < 0.5
        wanted = random.choice([None, *(pod.name for pod in pods), "prefill-99"]) if known else None
        backends = [Backend(pod.name, "prefill", "a", Address("10.0.0.1", 1), 1) for pod in pods]
        backends.append(Backend("decode-0", "decode", "a", Address("10.0.0.2", 1), 1))
        last = Placement("a", "decode-0", wanted) if known else None
        load = Load({pod.name: pod.inflight for pod in pods})
        there = router_choose(backends, Session(key, "root", known), last, load)
        here = choose(pods, key, wanted, known)
        assert there is not None
        assert there.prefill is not None
        assert here is not None
        assert here.name == there.prefill.name
