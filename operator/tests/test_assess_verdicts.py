"""What is said in situations that the cluster in memory does not come into by itself."""

from typing import Any

import pytest
from operator_world import SETTINGS, START, World, key_policy, minimal_spec, resource

from disagg_operator.api.conditions import ConditionType, Reason
from disagg_operator.api.status import Condition, ConditionStatus
from disagg_operator.errors import KubeError, classify
from disagg_operator.observe import Observed, Stranger
from disagg_operator.plan import Report, make_plan, notices, report, report_blind
from disagg_operator.wanted import read


def told(report: Report, type_: str) -> tuple[str, str, str]:
    for condition in report.status.conditions:
        if condition.type == type_:
            return condition.status, condition.reason, condition.message
    return "absent", "", ""


def after_failure(*failures: Exception) -> Report:
    """What a pass reports whose requests failed like this."""
    world = World()
    wanted, observed = world.look()
    return report(wanted, observed, make_plan(wanted, observed, START, key_policy()), failures, START)


@pytest.mark.parametrize(
    ("status", "answer", "type_", "reason"),
    [
        (
            422,
            "spec.template.spec.containers[0].imagePullPolicy: Unsupported value",
            "Stalled",
            "InvalidTemplate",
        ),
        (400, "strict decoding error: unknown field", "Stalled", "InvalidTemplate"),
        (403, 'services "x" is forbidden: exceeded quota: q', "Reconciling", "QuotaExceeded"),
        (403, "cannot patch resource", "Reconciling", "APIError"),
        (500, "etcdserver: leader changed", "Reconciling", "APIError"),
        (None, "connection refused", "Reconciling", "APIError"),
        (409, "uid mismatch", "Reconciling", "APIError"),
    ],
)
def test_a_request_that_failed(status: int | None, answer: str, type_: str, reason: str) -> None:
    said = after_failure(classify("apply StatefulSet default/x", status, answer))
    assert told(said, type_)[:2] == ("True", reason)
    assert f"apply StatefulSet default/x: {answer}" in told(said, type_)[2]
    assert told(said, "Ready")[:2] == ("False", reason)


def test_what_the_user_must_mend_is_said_before_what_heals_by_itself() -> None:
    outage, refusal = classify("apply A", 500, "x"), classify("apply B", 422, "bad field")
    assert told(after_failure(outage, refusal), "Stalled")[1] == "InvalidTemplate"


def test_a_bug_of_ours_is_said_to_be_one() -> None:
    status, reason, message = told(after_failure(KeyError("spec")), "Reconciling")
    assert (status, reason) == ("True", "InternalError")
    assert "KeyError" in message


@pytest.mark.parametrize(
    ("stranger", "type_", "said"),
    [
        (Stranger("Service", "demo-router", predecessor=False), "Stalled", "Delete it, or use another name"),
        (
            Stranger("Service", "demo-router", predecessor=True),
            "Reconciling",
            "waiting for it to be collected",
        ),
    ],
)
def test_a_name_that_is_taken(stranger: Stranger, type_: str, said: str) -> None:
    wanted = read(resource(), SETTINGS)
    observed = Observed(strangers=(stranger,))
    plan = make_plan(wanted, observed, START, key_policy())
    names = {(m["kind"], m["metadata"]["name"]) for m in plan.apply}
    assert ("Service", "demo-router") not in names
    assert len(names) == 12, "all else is applied"
    status, reason, message = told(report(wanted, observed, plan, [], START), type_)
    assert (status, reason) == ("True", "NotOwned")
    assert said in message


@pytest.mark.parametrize(
    ("prefill", "decode", "said"),
    [
        (["--block-size", "32"], ["--block-size", "16"], "--block-size is 32 for prefill and 16 for decode"),
        (["--kv-cache-dtype", "fp8"], [], "--kv-cache-dtype is fp8 for prefill and not set for decode"),
        (["--dtype", "half"], ["--dtype=bfloat16"], "--dtype is float16 for prefill and bfloat16 for decode"),
        (["-q", "fp8"], ["--quantization", "awq"], "--quantization is fp8 for prefill and awq for decode"),
    ],
    ids=["block size", "KV dtype", "dtype", "quantization"],
)
def test_a_pair_that_must_not_pair_is_never_ready(prefill: list[str], decode: list[str], said: str) -> None:
    world = World(resource(minimal_spec(prefill={"extraArgs": prefill}, decode={"extraArgs": decode})))
    for _ in range(5):
        answer = world.reconcile()
        world.tick(60)
        assert told(answer, "RevisionsCompatible")[:2] == ("False", "ArgumentsDiffer")
        assert said in told(answer, "RevisionsCompatible")[2]
        assert told(answer, "Ready")[0] == "False"
    assert world.pods == {}


def test_a_pair_that_may_differ_is_ready() -> None:
    shorter = {"extraArgs": ["--max-model-len", "2048"]}
    world = World(resource(minimal_spec(prefill=shorter, decode={"extraArgs": ["--max-model-len=4096"]})))
    answer = world.settle()
    assert told(answer, "RevisionsCompatible")[:2] == ("True", "Compatible")
    assert told(answer, "Ready")[0] == "True"


@pytest.mark.parametrize(
    ("spec", "reason", "said"),
    [
        (
            minimal_spec(kvTransfer={"loadFailurePolicy": "Fail"}),
            "NotImplemented",
            "spec.kvTransfer.loadFailurePolicy: Fail",
        ),
        (
            minimal_spec(kvTransfer={"loadFailurePolicy": "Fail"}, suspend=True),
            "NotImplemented",
            "spec.kvTransfer.loadFailurePolicy: Fail",
        ),
        (
            minimal_spec(prefill={"extraArgs": ["--dtype", "half"]}),
            "ArgumentsDiffer",
            "--dtype is float16 for prefill",
        ),
        (
            minimal_spec(decode={"template": {"spec": []}}),
            "InvalidTemplate",
            "spec must be an object, not a list",
        ),
        ({"model": {"uri": "hf://a/b"}}, "InvalidSpec", "spec.engine: Field required"),
    ],
    ids=["not implemented", "not even suspended", "differ", "template", "unreadable"],
)
def test_a_refused_spec_changes_nothing(spec: dict[str, Any], reason: str, said: str) -> None:
    world = World()
    world.settle()
    before, pods = dict(world.live), sorted(world.pods)
    world.resource["spec"] = spec
    world.resource["metadata"]["generation"] += 1
    answer = world.reconcile()
    assert told(answer, "Stalled")[:2] == ("True", reason)
    assert said in told(answer, "Stalled")[2]
    assert told(answer, "Ready")[0] == "False"
    assert (world.live, sorted(world.pods)) == (before, pods)
    for type_ in ("PrefillReady", "DecodeReady", "RouterReady"):
        assert told(answer, type_)[0] == "True", f"{type_}: what ran before serves on"
    assert answer.status.observed_generation == world.resource["metadata"]["generation"]
    assert answer.status.endpoint, "clients are not sent away"


def test_a_refused_spec_that_is_the_first_makes_nothing() -> None:
    world = World(resource(minimal_spec(kvTransfer={"loadFailurePolicy": "Fail"})))
    answer = world.reconcile()
    assert world.live == {}
    assert told(answer, "PrefillReady")[:2] == ("False", "NotImplemented")


def test_a_pass_that_cannot_read_the_cluster_leaves_what_was_said_about_pods() -> None:
    world = World()
    world.settle()
    before = world.resource["status"]
    failure: KubeError = classify("list pods in default", 403, "pods is forbidden")
    said = report_blind(read(world.resource, SETTINGS), failure, world.now)
    assert told(said, "Reconciling")[:2] == ("True", "APIError")
    assert told(said, "Ready")[:2] == ("False", "APIError")
    after = said.status.to_wire()
    assert after["roles"] == before["roles"]
    kept = [c for c in after["conditions"] if c["type"] not in ("Ready", "Reconciling")]
    assert kept == [c for c in before["conditions"] if c["type"] != "Ready"]


def test_a_transition_is_told_once_and_a_change_of_words_is_not() -> None:
    world = World()
    first = world.reconcile()
    assert [(n.type, n.reason) for n in first.notices] == [("Normal", "Progressing")]
    world.tick()
    second = world.reconcile()
    assert [(n.type, n.reason) for n in second.notices] == [("Normal", "PodsStarting")]
    reworded = tuple(
        condition.model_copy(update={"message": "other words"}) for condition in second.status.conditions
    )
    assert notices(second.status.conditions, reworded) == ()


def test_an_outage_of_a_role_is_told_as_a_warning() -> None:
    world = World()
    world.settle()
    world.can_start = lambda template: False
    for name in [name for name in world.pods if "decode" in name]:
        del world.pods[name]
    world.tick()
    warned = [n for n in world.reconcile().notices if n.type == "Warning"]
    assert [n.message.split(":")[0] for n in warned] == ["DecodeReady"]


def scaling_active(status: ConditionStatus, reason: Reason) -> Condition:
    return Condition(
        type=ConditionType.SCALING_ACTIVE,
        status=status,
        observed_generation=1,
        last_transition_time=START,
        reason=reason,
        message="why",
    )


def test_a_ratio_that_cannot_be_kept_is_told_also_if_sizes_were_held_before() -> None:
    """As those of every new object are, whose pods have no metrics yet."""
    no, yes = ConditionStatus.FALSE, ConditionStatus.TRUE
    violated = scaling_active(no, Reason.RATIO_CONFLICT)
    for before in (
        (),
        [scaling_active(no, Reason.METRICS_UNAVAILABLE)],
        [scaling_active(yes, Reason.SCALING)],
    ):
        notice = ("Warning", "RatioConstraintViolated", "ScalingActive: why")
        assert [(n.type, n.reason, n.message) for n in notices(before, [violated])] == [notice]
    assert notices([violated], [violated]) == ()
    assert notices([violated], [scaling_active(no, Reason.SCALING_HELD)]) == ()
