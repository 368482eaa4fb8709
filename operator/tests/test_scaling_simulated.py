"""The policy in simulated time (bench/autoscaling), on a fixed seed. docs/autoscaling-simulation.md has what it does not reach.

Some of the traces, and the rules that matter there; `make sim` runs them all.
"""

from functools import cache
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
MOST_CHANGES = 4
"""Of direction, in an hour."""


@cache
def outcome(trace: str, rule: str = OURS) -> Outcome:
    """Simulated when first asked for: tests may be spread over processes, and each runs only what it needs."""
    return run(TRACES[trace], rule, RULES[rule]).outcome


@pytest.mark.parametrize("trace", ["steady", "pod loss", "single turns"])
def test_first_tokens_come_in_time_and_the_direction_changes_seldom(trace: str) -> None:
    found = outcome(trace)
    assert found.attained >= GOAL
    assert found.changes <= MOST_CHANGES


@pytest.mark.parametrize("peer", ["llm-d token-aware", "HPA, waiting", "Dynamo, load rule"])
def test_a_steady_load_with_reuse_takes_a_fifth_less_than_any_peer_that_serves_it(peer: str) -> None:
    assert (
        outcome("steady", peer).attained < GOAL
        or outcome("steady").hours <= 0.8 * outcome("steady", peer).hours
    )


def test_reuse_that_collapses_is_made_up_for_within_two_windows_and_a_pods_start() -> None:
    found = outcome("reuse collapse")
    assert found.recovery is not None
    assert found.recovery <= 2 * WINDOW + H200.start
    assert found.changes <= MOST_CHANGES


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
