"""What `kubectl disagg explain` says of a status, and that its arithmetic is right: every line is calculated again, as a person would."""

import json
import re
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from operator_world import SETTINGS, Manifest, minimal_spec, resource

from disagg_operator.api.status import ScalingInputsStatus
from disagg_operator.autoscale import limits
from disagg_operator.explain import MEANINGS, Account, account, text
from disagg_operator.observe import Observed
from disagg_operator.scaling.inputs import DecodeLoad, PrefillLoad, Reuse
from disagg_operator.scaling.need import Speed, decode_need, prefill_need
from disagg_operator.scaling.policy import Because
from disagg_operator.scaling.working import Step, number
from disagg_operator.wanted import read

NOW = datetime(2026, 1, 1, 12, 0, tzinfo=UTC)
SCALED = {"scaling": {"minReplicas": 1, "maxReplicas": 8}}
INPUTS: Manifest = {
    "offeredTokensPerSecond": 52000,
    "trendTokensPerSecond": 2000,
    "backlogTokens": 12000,
    "reuseMilli": 850,
    "growingReuseMilli": 810,
    "growingRemoteReuseMilli": 600,
    "shrinkingReuseMilli": 850,
    "shrinkingRemoteReuseMilli": 630,
    "tokensPerSecondPerPod": 15928,
    "remoteTokenCostMilli": 170,
    "decodePods": 2,
    "meanKVUsageMilli": 590,
    "kvUsageMilli": 610,
    "fullestKVUsageMilli": 640,
    "runningRequests": 120,
    "waitingRequests": 30,
    "decodeSteadyNeedMilli": 1844,
    "decodeComingMilli": 1050,
    "ttftMilliseconds": 730,
}


def scaling(**changes: Any) -> Manifest:
    return {
        "decidedTime": "2026-01-01T11:59:48Z",
        "reason": "ScaledUp",
        "message": "prefill 1 -> 2 (need 1.60, ScaleUpRate); decode 2 (need 1.94)",
        "prefill": {
            "currentReplicas": 1,
            "desiredReplicas": 2,
            "needMilli": 1597,
            "limitedBy": "ScaleUpRate",
        },
        "decode": {"currentReplicas": 2, "desiredReplicas": 2, "needMilli": 1936},
        "inputs": INPUTS,
        "learned": {"prefillTokensPerSecond": 15928, "remoteTokenCostMilli": 170},
        **changes,
    }


def condition(type_: str, status: str, reason: str, message: str) -> Manifest:
    return {
        "type": type_,
        "status": status,
        "observedGeneration": 1,
        "lastTransitionTime": "2026-01-01T11:00:00Z",
        "reason": reason,
        "message": message,
    }


def spec(mode: str = "Auto", **changes: Any) -> Manifest:
    scaled: Manifest = {} if mode == "Disabled" else {"prefill": SCALED, "decode": SCALED}
    return minimal_spec(autoscaling={"mode": mode}, **scaled, **changes)


def explained(spec: Manifest, status: Manifest | None) -> Account:
    found = resource(spec)
    if status is not None:
        found["status"] = {"observedGeneration": 1, **status}
    return account(read(found, SETTINGS), NOW)


def said(spec: Manifest, status: Manifest | None) -> str:
    return text(explained(spec, status), NOW)


def by_hand(formula: str) -> float:
    """What somebody with a calculator gets: words only say what a number is."""
    sum_ = re.sub(
        r"[a-z]+", lambda word: word[0] if word[0] in ("min", "max") else "", formula.replace(" x ", " * ")
    )
    assert re.fullmatch(r"(min|max|[-+*/(), .\d])*", sum_), sum_
    return float(eval(sum_, {"__builtins__": {}}, {"min": min, "max": max}))


def printed(steps: tuple[Step, ...]) -> None:
    """Each line comes to what is printed behind it; the last adds up what the lines before it came to."""
    for step in steps:
        again, shown = by_hand(step.formula), float(step.result)
        assert again == pytest.approx(shown, rel=2e-5, abs=6e-4), step
    names = {step.what: step for step in steps}
    if "to compute" in names:
        needed = [number(names[what].value) for what in names if what.startswith("to ")]
        assert re.findall(r"[\d.]+", names["need"].formula)[:3] == needed


def test_every_line_can_be_calculated_again() -> None:
    prefill, decode = explained(spec(), {"scaling": scaling()}).roles
    for steps in (prefill.growing, prefill.shrinking, decode.growing):
        assert steps
        printed(steps)


def test_the_numbers_are_put_in() -> None:
    shown = said(spec(engine={"image": "x", "extraArgs": ["--max-num-seqs=64"]}), {"scaling": scaling()})
    for line in (
        "to compute                     52000 offered x (1 - 0.81 reuse)              = 9880 tokens/s",
        "to take in what decode brings  52000 offered x 0.6 brought x 0.17 cost       = 5304 tokens/s",
        "to work off the backlog        12000 waiting x (1 - 0.81 reuse) / 30 seconds = 76 tokens/s",
        "what a pod is planned for      15928 speed x 0.6 utilization                = 9556.8 tokens/s",
        "need                           (9880 + 5304 + 76) / 9556.8                    = 1.597 pods",
        "to compute                     50000 offered x (1 - 0.85 reuse)",
        "2 pods x max(0.59 used / 0.8 target, 0.61 fuller half / 0.95) x (1 + min(30 waiting / 120 running, 2)) = 1.844 pods",
        "by running requests  (120 running + 30 waiting) / (64 sequences x 0.85 target)",
        "need of the moment   max(1.844, 2.757)",
        "need 1.844 of the last minute x 1.05 coming = 1.936 pods",
        "reuse: measured 0.85; growing counts on 0.81, shrinking on 0.85",
        "offered: 52000 tokens/s, of which 2000 are the trend or held back",
        "95th percentiles: time to first token 730 ms",
        "Decided 12 s ago, 2026-01-01T11:59:48Z: ScaledUp",
        "prefill: 1 -> 2 pods (1 now), between 1 and 8",
        "learned: a prefill pod computes 15928 tokens/s",
        "learned: a token that decode brings costs 0.17 of a computed one",
        f"ScaleUpRate: {MEANINGS[Because.UP_RATE]}",
    ):
        assert re.sub(" +", " ", line) in re.sub(" +", " ", shown), shown


shares = st.integers(0, 1000)
STATUSES = st.builds(
    lambda growing, remote, shrinking, remote_too, trend, **rest: ScalingInputsStatus(
        growing_reuse_milli=growing,
        growing_remote_reuse_milli=min(remote, growing),
        shrinking_reuse_milli=shrinking,
        shrinking_remote_reuse_milli=min(remote_too, shrinking),
        trend_tokens_per_second=min(trend, rest["offered_tokens_per_second"]),
        **rest,
    ),
    growing=shares,
    remote=shares,
    shrinking=shares,
    remote_too=shares,
    trend=st.integers(0, 10**5),
    offered_tokens_per_second=st.integers(0, 10**6),
    backlog_tokens=st.integers(0, 10**8),
    reuse_milli=shares,
    tokens_per_second_per_pod=st.integers(1, 10**6),
    remote_token_cost_milli=shares,
    decode_pods=st.integers(1, 1000),
    kv_usage_milli=shares,
    mean_kv_usage_milli=st.none() | shares,
    decode_steady_need_milli=st.integers(0, 10**6),
    decode_coming_milli=st.integers(1000, 2000),
    fullest_kv_usage_milli=shares,
    running_requests=st.integers(0, 10**5),
    waiting_requests=st.integers(0, 10**5),
    retained_milli=st.none() | shares,
)
TARGETS = st.fixed_dictionaries(
    {
        "prefillUtilizationPercent": st.integers(10, 100),
        "backlogDrainSeconds": st.integers(1, 3600),
        "decodeKVUsagePercent": st.integers(10, 100),
        "decodeRunningPercent": st.integers(10, 100),
    }
)


@given(inputs=STATUSES, targets=TARGETS, sequences=st.none() | st.integers(1, 4096))
def test_whatever_the_numbers_the_lines_add_up_to_what_a_decision_would_need(
    inputs: ScalingInputsStatus, targets: Manifest, sequences: int | None
) -> None:
    arguments = [] if sequences is None else [f"--max-num-seqs={sequences}"]
    asked = spec(engine={"image": "x", "extraArgs": arguments})
    asked["autoscaling"]["targets"] = targets
    prefill, decode = explained(asked, {"scaling": scaling(inputs=inputs.to_wire())}).roles
    for steps in (prefill.growing, prefill.shrinking, decode.growing):
        printed(steps)

    parsed = read(resource(asked), SETTINGS).spec
    assert parsed is not None
    bounds = limits(parsed, Observed())
    total, remote = inputs.growing_reuse_milli / 1000, inputs.growing_remote_reuse_milli / 1000
    load = PrefillLoad(0.0, 0.0, Reuse(), inputs.backlog_tokens)
    speed = Speed(inputs.tokens_per_second_per_pod or 0, (inputs.remote_token_cost_milli or 0) / 1000)
    need = prefill_need(load, inputs.offered_tokens_per_second, Reuse(total - remote, remote), speed, bounds)
    assert prefill.growing[-1].value == pytest.approx(need.pods)
    kept = None if inputs.retained_milli is None else inputs.retained_milli / 1000
    usage = inputs.kv_usage_milli / 1000
    mean = None if inputs.mean_kv_usage_milli is None else inputs.mean_kv_usage_milli / 1000
    of_decode = DecodeLoad(
        inputs.decode_pods, usage, usage, inputs.running_requests, inputs.waiting_requests, mean, kept
    )
    (now,) = (step.value for step in decode.growing if step.what == "need of the moment")
    assert now == pytest.approx(decode_need(of_decode, bounds).pods)
    told = (inputs.decode_steady_need_milli or 0) * (inputs.decode_coming_milli or 0) / 1e6
    assert decode.growing[-1].value == pytest.approx(told)


@given(st.floats(0, 1e17))
def test_a_number_is_written_without_powers_and_as_long_as_it_says_something(value: float) -> None:
    written = number(value)
    assert re.fullmatch(r"\d+(\.\d*[1-9])?", written)
    assert float(written) == pytest.approx(value, rel=1e-5, abs=1e-9)


def test_a_need_that_is_not_the_operators_is_told_of() -> None:
    rounded = scaling(prefill={"currentReplicas": 1, "desiredReplicas": 1, "needMilli": 1400})
    assert "The operator came to 1.400" in said(spec(), {"scaling": rounded})
    exact = scaling(prefill={"currentReplicas": 1, "desiredReplicas": 1, "needMilli": 1597})
    assert "The operator came to" not in said(spec(), {"scaling": exact})


def test_every_word_that_limits_has_its_meaning_and_what_to_do() -> None:
    assert set(MEANINGS) == set(Because)
    for word, meaning in MEANINGS.items():
        told = {"currentReplicas": 1, "desiredReplicas": 1, "limitedBy": str(word)}
        assert f"{word}: {meaning}" in said(spec(), {"scaling": scaling(decode=told)})
        assert meaning.endswith(".")
        assert "; " in meaning or ", see " in meaning, f"{word} does not say what to do"


def test_a_word_of_another_version_is_shown_as_it_is() -> None:
    told = {"currentReplicas": 1, "desiredReplicas": 1, "limitedBy": "Moonlight"}
    assert "Moonlight: a word of an operator of another version" in said(
        spec(), {"scaling": scaling(decode=told)}
    )


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("Disabled", "sizes are those of the spec, and nothing is decided"),
        ("Advisory", "nothing is changed"),
        ("External", "what somebody writes into the scalers demo-prefill and demo-decode"),
        ("Auto", "what is decided is written into the scalers demo-prefill and demo-decode"),
    ],
)
def test_each_mode_says_who_decides(mode: str, words: str) -> None:
    assert f"Mode {mode}: " in said(spec(mode), {})
    assert words in said(spec(mode), {})


def test_without_a_status_it_says_that_no_operator_has_looked() -> None:
    shown = said(spec(), None)
    assert "No operator has looked at it yet" in shown
    assert "Nothing has been decided yet" in shown


@pytest.mark.parametrize(
    ("now", "then", "words"),
    [(1, 1, "1 pod,"), (2, 2, "2 pods"), (1, 2, "1 -> 2 pods"), (2, 1, "2 -> 1 pod")],
)
def test_one_pod_is_not_called_pods(now: int, then: int, words: str) -> None:
    size = {"currentReplicas": now, "desiredReplicas": then, "needMilli": 900}
    assert f"\nprefill: {words}" in said(spec(), {"scaling": scaling(prefill=size)})


def test_an_object_whose_sizes_are_fixed_is_not_waited_for() -> None:
    shown = said(spec("Disabled"), {})
    assert "Nothing has been decided yet" not in shown
    assert "prefill: 2 pods, fixed" in shown


def test_a_suspended_object_says_so() -> None:
    shown = said(spec(suspend=True), {})
    assert "spec.suspend is true" in shown
    assert "Nothing has been decided yet" not in shown


def test_a_refused_spec_is_told_with_its_reason() -> None:
    shown = said(spec(kvTransfer={"loadFailurePolicy": "Fail"}), {})
    assert "The spec is refused, so sizes stay as they are. NotImplemented: spec.kvTransfer" in shown
    assert "Nothing has been decided yet" not in shown


def test_a_spec_that_cannot_be_read_is_told_with_what_is_wrong() -> None:
    shown = said({"model": 7}, None)
    assert "InvalidSpec: " in shown


def test_a_newer_spec_and_an_old_decision_are_told_of() -> None:
    found = resource(spec(), generation=2)
    found["status"] = {
        "observedGeneration": 1,
        "scaling": scaling(decidedTime="2026-01-01T11:00:00Z"),
    }
    shown = text(account(read(found, SETTINGS), NOW), NOW)
    assert "The spec is newer than the status" in shown
    assert "The decision is old" in shown
    assert "Decided 60 min ago" in shown


def test_missing_metrics_are_named() -> None:
    why = "sizes are held, metrics are missing: demo-prefill-1-0: status 503"
    status = {
        "conditions": [condition("ScalingActive", "False", "MetricsUnavailable", why)],
        "scaling": {
            "decidedTime": "2026-01-01T11:59:50Z",
            "reason": "MetricsUnavailable",
            "prefill": {"currentReplicas": 2, "desiredReplicas": 2, "limitedBy": "MetricsMissing"},
            "decode": {"currentReplicas": 2, "desiredReplicas": 2, "limitedBy": "MetricsMissing"},
        },
    }
    shown = said(spec(), status)
    assert f"ScalingActive is False, MetricsUnavailable: {why}" in shown
    assert shown.count("need: not known") == 2


def test_an_unknown_speed_leaves_decodes_need_known() -> None:
    unknown = {
        key: n for key, n in INPUTS.items() if key not in ("tokensPerSecondPerPod", "remoteTokenCostMilli")
    }
    told = {"currentReplicas": 2, "desiredReplicas": 2, "limitedBy": "UnknownSpeed"}
    prefill, decode = explained(spec(), {"scaling": scaling(inputs=unknown, prefill=told)}).roles
    assert not prefill.growing
    assert decode.growing[-1].what == "need"


def test_a_cost_that_is_assumed_is_called_so() -> None:
    assert "it is assumed" in said(spec(), {"scaling": scaling(learned={"prefillTokensPerSecond": 15928})})
    assert "it is assumed" not in said(spec(), {"scaling": scaling()})


def test_sizes_of_mode_external_are_told_beside_those_of_auto() -> None:
    roles = [{"name": "prefill", "desiredReplicas": 5}]
    assert "prefill: 1 -> 2 pods (5 now)" in said(spec("External"), {"roles": roles, "scaling": scaling()})


def test_pods_that_leave_are_counted_down() -> None:
    until = NOW + timedelta(seconds=83)
    roles = [
        {
            "name": "decode",
            "desiredReplicas": 2,
            "leavingReplicas": 1,
            "leavingUntil": until.isoformat(),
        }
    ]
    shown = said(spec(), {"roles": roles, "scaling": scaling()})
    assert "1 more pod takes no new turns and will be stopped in 83 s, 2026-01-01T12:01:23Z" in shown


def test_as_json_it_has_the_same_terms() -> None:
    found = explained(spec(), {"scaling": scaling()})
    wire = json.loads(json.dumps(found.to_wire()))
    prefill, decode = wire["roles"]
    assert (wire["namespace"], wire["name"], wire["mode"]) == ("default", "demo", "Auto")
    assert prefill["growing"][-1] == {
        "what": "need",
        "formula": "(9880 + 5304 + 76) / 9556.8",
        "value": found.roles[0].growing[-1].value,
        "unit": "pods",
    }
    assert (prefill["currentReplicas"], prefill["desiredReplicas"], prefill["limitedBy"]) == (
        1,
        2,
        "ScaleUpRate",
    )
    assert decode["needMilli"] == 1936
    assert wire["inputs"] == INPUTS
    assert wire["decided"] == "2026-01-01T11:59:48Z"
