"""The example manifest is what the demo says it is, and what the API accepts."""

import yaml

from disagg_operator.api.support import not_implemented
from disagg_operator.api.types import DisaggInference
from e2e.demo.stack import EXAMPLE, MODEL, NAME
from e2e.images.recipes import RECIPES
from e2e.inference import KIND

MANIFEST = yaml.safe_load(EXAMPLE.read_text())


def test_the_example_is_valid_and_asks_for_nothing_that_is_missing() -> None:
    spec = DisaggInference.model_validate(MANIFEST).spec
    assert not_implemented(spec) == ()
    assert spec.model.served_name == MODEL


def test_the_example_has_the_name_that_the_demo_asks_for() -> None:
    assert MANIFEST["metadata"]["name"] == NAME
    plural, _, group = KIND.partition(".")
    assert (plural, MANIFEST["apiVersion"].split("/")[0]) == ("disagginferences", group)


def test_the_example_runs_the_image_that_is_loaded() -> None:
    assert MANIFEST["spec"]["engine"]["image"] == RECIPES["engine-cpu"].reference


def test_both_roles_mount_the_engine_and_the_hosts_libraries() -> None:
    for role in ("prefill", "decode"):
        (main,) = MANIFEST["spec"][role]["template"]["spec"]["containers"]
        assert main["name"] == "main"
        assert {mount["mountPath"] for mount in main["volumeMounts"]} == {"/usr", "/opt/engine"}
        assert all(mount["readOnly"] for mount in main["volumeMounts"])
