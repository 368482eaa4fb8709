"""docs/autoscaling.md knows every word that limits a size and every metric, and its example is what is really printed."""

import re
from pathlib import Path

import yaml
from operator_world import SETTINGS, resource
from test_explain_text import INPUTS, NOW, scaling, spec

from disagg_operator.api.status import DisaggInferenceStatus, ScalingInputsStatus
from disagg_operator.explain import MEANINGS, account, text
from disagg_operator.metrics import Metrics
from disagg_operator.scaling.policy import Outcome
from disagg_operator.wanted import read

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "autoscaling.md").read_text()


def test_every_word_that_limits_is_explained_as_the_command_explains_it() -> None:
    explained = dict(re.findall(r"^\| `([A-Z]\w+)` \| (.*) \|$", TEXT, re.MULTILINE))
    assert explained.items() >= {str(word): meaning for word, meaning in MEANINGS.items()}.items()


def test_every_outcome_is_named() -> None:
    (listed,) = re.findall(r"^`reason` is ((?:.|\n)*?)\n\n", TEXT, re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", listed)) - {"ScalingActive"} == {str(outcome) for outcome in Outcome}


def test_every_metric_is_in_the_table_and_no_others() -> None:
    shown = set(
        re.findall(r"^# HELP (disagg_(?:scaling|reuse)_\w+)", Metrics().render().decode(), re.MULTILINE)
    )
    assert set(re.findall(r"^\| `(disagg_(?:scaling|reuse)_\w+)` \|", TEXT, re.MULTILINE)) == shown


def test_the_worked_example_is_what_the_command_prints() -> None:
    found = resource(spec(engine={"image": "x", "extraArgs": ["--max-num-seqs=256"]}))
    for role in ("prefill", "decode"):
        found["spec"][role] = {"scaling": {"maxReplicas": 4}}
    status = {"roles": [{"name": "prefill", "desiredReplicas": 2}, {"name": "decode", "desiredReplicas": 2}]}
    found["status"] = status | {"scaling": scaling()}
    printed = text(account(read(found, SETTINGS), NOW), NOW).splitlines()
    (example,) = re.findall(r"^```\n(prefill: .*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    assert [line for line in example.splitlines() if line not in printed] == []


def test_the_example_of_a_status_can_be_read() -> None:
    (example,) = re.findall(r"^```yaml\n(status:.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    status = DisaggInferenceStatus.model_validate(yaml.safe_load(example)["status"])
    assert status.scaling is not None
    assert status.scaling.inputs == ScalingInputsStatus.model_validate(INPUTS)
    assert status.reuse is not None
    computed = status.reuse.prompt_tokens * (100 - status.reuse.ratio_percent) // 100
    assert status.reuse.computed_tokens == computed
