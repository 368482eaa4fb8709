"""When engines are held to refuse each other's KV, from pages of their metrics, look by look."""

import copy
import functools
from collections.abc import Mapping
from datetime import timedelta

import pytest
from operator_world import World

from disagg_operator.api.conditions import Reason
from disagg_operator.mismatch import HOLD, LOOK_EVERY, Standing, is_due, look, resume, targets, unlearn
from disagg_operator.naming import LABEL_REVISION
from disagg_operator.observe import observe
from disagg_operator.pages import Answer, NoPage, Page, Sample
from disagg_operator.plan import Report, make_plan, report

MINUTE = timedelta(minutes=1)


def page(refused: float = 0, offers: float = 0, recomputed: float | None = None) -> Page:
    """What a pod with one engine shows; other reasons are always counted and mean nothing here."""
    shown = [
        ("disagg_kv_refused_messages_total", {"reason": "fingerprint"}, refused),
        ("disagg_kv_refused_messages_total", {"reason": "epoch"}, 99.0),
        ("disagg_kv_writeback_offers_total", {"result": "fingerprint"}, offers),
        ("disagg_kv_writeback_offers_total", {"result": "granted"}, 99.0),
    ]
    if recomputed is not None:
        shown.append(("disagg_kv_recomputed_requests_total", {"reason": "fingerprint"}, recomputed))
    return tuple(Sample(name, {"engine": "0", **labels}, float(value)) for name, labels, value in shown)


QUIET = page()
NO_PAGE = NoPage("status 503")


@functools.cache
def _settled() -> World:
    """Made once, to be copied."""
    world = World()
    world.settle()
    return world


class Engines:
    """Two prefill and two decode pods that are ready, looked at once a minute."""

    def __init__(self) -> None:
        self.world = copy.deepcopy(_settled())
        self.standing = Standing("uid-1")
        names = sorted(self.world.pods)
        self.prefill = next(name for name in names if "prefill" in name)
        self.decode = next(name for name in names if "decode" in name)

    def look(self, pages: Mapping[str, Answer] | None = None, *, others: Answer = QUIET) -> Report:
        """A pass that finds these pages, and `others` on pods that are not named."""
        world = self.world
        world.now += MINUTE
        wanted, observed = world.look()
        found = dict.fromkeys(targets(observed, "default"), others) | dict(pages or {})
        self.standing = look(self.standing, observed, found, world.now)
        plan = make_plan(wanted, observed, world.now, world.policy)
        said = report(wanted, observed, plan, [], world.now, self.standing)
        world.resource["status"] = said.status.to_wire()
        return said

    def told(self) -> tuple[str, str]:
        condition = self.world.condition("RevisionsCompatible")
        assert condition is not None
        return condition["status"], condition["reason"]

    def message(self) -> str:
        condition = self.world.condition("RevisionsCompatible")
        assert condition is not None
        return str(condition["message"])


GOOD, BAD = ("True", "Compatible"), ("False", "FingerprintMismatch")


@pytest.fixture
def engines() -> Engines:
    return Engines()


@pytest.mark.parametrize("grown", [page(refused=1), page(offers=1), page(recomputed=1)])
def test_a_mismatch_appears_with_one_warning_and_goes_when_it_is_long_over(
    engines: Engines, grown: Page
) -> None:
    assert engines.look().notices == ()
    assert engines.told() == GOOD
    (notice,) = engines.look({engines.decode: grown}).notices
    assert (notice.type, notice.reason) == ("Warning", "FingerprintMismatch")
    assert engines.told() == BAD
    assert engines.decode in engines.message()
    assert engines.prefill not in engines.message(), "only who has counted is named"
    ready = engines.world.condition("Ready")
    assert ready is not None
    assert ready["status"] == "True", "turns are answered"
    for _ in range(HOLD // MINUTE - 1):
        assert engines.look({engines.decode: grown}).notices == ()
        assert engines.told() == BAD
    assert engines.look({engines.decode: grown}).notices == ()
    assert engines.told() == GOOD


def test_refusals_that_go_on_are_one_transition(engines: Engines) -> None:
    engines.look()
    notices = [engines.look({engines.prefill: page(refused=n)}).notices for n in range(1, 30)]
    assert engines.told() == BAD
    assert [len(told) for told in notices] == [1] + [0] * 28


def test_what_was_counted_before_the_first_look_says_nothing_about_now(engines: Engines) -> None:
    for _ in range(3):
        engines.look(others=page(refused=1000))
        assert engines.told() == GOOD


def test_an_engine_that_began_anew_has_refused_what_it_counts_now(engines: Engines) -> None:
    engines.look({engines.decode: page(offers=50)})
    engines.look({engines.decode: page(offers=0)})
    assert engines.told() == GOOD
    engines.look({engines.decode: page(offers=50)})
    assert engines.told() == BAD

    again = Engines()
    again.look({again.decode: page(offers=50)})
    again.look({again.decode: page(offers=3)})
    assert again.told() == BAD


@pytest.mark.parametrize(
    "absent",
    [
        NO_PAGE,
        (),
        page()[:2],
        page(refused=float("nan")),
        page(offers=float("inf")),
        (Sample("disagg_kv_refused_messages_total", {}, 7.0),),
    ],
    ids=["no page", "HTML or another program", "half a page", "NaN", "Inf", "no labels"],
)
def test_a_pod_without_a_page_raises_no_alarm_and_hides_none(engines: Engines, absent: Answer) -> None:
    engines.look()
    engines.look({engines.decode: absent})
    assert engines.told() == GOOD
    assert "not known" not in engines.message(), "the others could be read"
    engines.look({engines.decode: page(offers=1)})
    assert engines.told() == BAD, "what was counted while it could not be read"
    for _ in range(2 * (HOLD // MINUTE)):
        engines.look({engines.decode: absent})
        assert engines.told() == BAD, "the pod that refused cannot be asked"
    engines.look({engines.decode: page(offers=1)})
    assert engines.told() == GOOD


def test_where_no_page_can_be_read_the_condition_says_so_and_stays_as_it_was(engines: Engines) -> None:
    assert engines.look(others=NO_PAGE).notices == ()
    assert engines.told() == GOOD
    assert "not known: no page of their metrics could be read" in engines.message()
    engines.look()
    assert "not known" not in engines.message()
    engines.look({engines.decode: page(offers=1)})
    for _ in range(2 * (HOLD // MINUTE)):
        engines.look(others=NO_PAGE)
        assert engines.told() == BAD


def test_refusals_between_two_revisions_are_not_held_against_them(engines: Engines) -> None:
    world = engines.world
    engines.look()
    world.edit(engine={"image": "vllm:2"})
    old = {pod.labels.get(LABEL_REVISION) for pod in world.pods.values()}
    count, side_by_side = 0, 0
    while count < 40:
        world.reconcile()
        world.tick()
        ready = {pod.labels.get(LABEL_REVISION) for pod in world.pods.values() if pod.ready_at}
        if not ready & old - {None}:
            break
        side_by_side += ready > old
        count += 1
        engines.look(others=page(refused=count if ready > old else 0))
        assert engines.told() == GOOD
    assert side_by_side, "engines of two revisions were ready at once"
    engines.look(others=page(refused=count))
    assert engines.told() == GOOD, "what they refused until now"
    engines.look(others=page(refused=count + 1))
    assert engines.told() == BAD, "among those of one revision it counts"


def test_refusals_while_pods_are_replaced_in_place_are_not_either(engines: Engines) -> None:
    world = engines.world
    engines.look()
    world.edit(decode={"replicas": 2, "template": {"spec": {"priorityClassName": "high"}}})
    world.reconcile()
    world.tick()
    _, observed = world.look()
    assert any(not workload.settled for workload in observed.workloads)
    engines.look(others=page(refused=1, offers=1))
    assert engines.told() == GOOD


@pytest.mark.parametrize("blind", [True, False], ids=["pages could not be read", "it was no time for a look"])
def test_refusals_of_a_rollout_that_nobody_saw_are_not_counted_afterwards(
    engines: Engines, blind: bool
) -> None:
    world = engines.world
    engines.look()
    world.edit(decode={"replicas": 2, "template": {"spec": {"priorityClassName": "high"}}})
    world.reconcile()
    world.tick()
    if blind:
        engines.look(others=NO_PAGE)
    else:
        engines.standing = unlearn(engines.standing, world.look()[1])
    world.settle()
    engines.look(others=page(refused=5))
    assert engines.told() == GOOD
    engines.look(others=page(refused=6))
    assert engines.told() == BAD


def test_pods_that_are_gone_hold_nothing_up(engines: Engines) -> None:
    engines.look()
    engines.look({engines.decode: page(offers=1)})
    engines.world.edit(suspend=True)
    for _ in range(HOLD // MINUTE + 3):
        engines.world.reconcile()
        engines.world.tick()
        engines.look()
    assert targets(engines.world.look()[1], "default") == {}
    assert engines.told() == GOOD
    assert engines.standing.counts == {}


def test_an_operator_that_starts_keeps_what_was_told_for_as_long_as_after_a_refusal(engines: Engines) -> None:
    engines.look()
    engines.look({engines.decode: page(offers=1)})
    before, now = engines.message(), engines.world.now + HOLD / 2
    conditions = engines.world.look()[0].previous.conditions
    engines.standing = resume("uid-1", conditions, now)
    for _ in range(HOLD // MINUTE - 1):
        assert engines.look({engines.decode: page(offers=1)}).notices == ()
        assert (engines.told(), engines.message()) == (BAD, before)
    for _ in range(HOLD // MINUTE):
        engines.look({engines.decode: page(offers=1)})
    assert engines.told() == GOOD
    assert resume("uid-1", engines.world.look()[0].previous.conditions, now) == Standing("uid-1")


def test_flags_that_differ_are_told_first(engines: Engines) -> None:
    engines.look()
    engines.look({engines.decode: page(offers=1)})
    engines.world.edit(prefill={"extraArgs": ["--dtype", "half"]})
    engines.look()
    assert engines.told() == ("False", str(Reason.ARGUMENTS_DIFFER))


def test_looks_are_not_too_many(engines: Engines) -> None:
    engines.look()
    now = engines.world.now
    assert is_due(Standing(), now)
    assert not is_due(engines.standing, now + LOOK_EVERY - timedelta(seconds=1))
    assert is_due(engines.standing, now + LOOK_EVERY)


def test_ready_engines_are_asked_and_nobody_else() -> None:
    world = World()
    world.settle()
    items = [*world.live.values(), *(world._pod_manifest(pod) for pod in world.pods.values())]
    pods = [item for item in copy.deepcopy(items) if item["kind"] == "Pod"]
    engines = [pod for pod in pods if "router" not in pod["metadata"]["name"]]
    leaving, starting, without, *rest = engines
    leaving["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    starting["status"]["conditions"][0]["status"] = "False"
    del without["status"]["podIP"]
    asked = targets(observe("uid-1", pods), "default")
    assert {name: target.address for name, target in asked.items()} == {
        pod["metadata"]["name"]: pod["status"]["podIP"] for pod in rest
    }
