"""The generated schemas are what Kubernetes calls structural, and no field of theirs surprises a user."""

from collections.abc import Iterator
from typing import Annotated, Any

import pytest
from pydantic import Field

from disagg_operator.api.base import ApiObject, Rule, camel, list_type
from disagg_operator.api.crd import disagginference_crd, scaler_crd
from disagg_operator.api.schema import SchemaError, structural

# What YAML 1.1, and thus kubectl, reads as a boolean or null when it is not quoted.
YAML_WORDS = {"y", "n", "yes", "no", "on", "off", "true", "false", "null", "~"}
ALLOWED_KEYWORDS = {
    *(
        "type",
        "description",
        "properties",
        "required",
        "items",
        "additionalProperties",
        "default",
        "enum",
        "format",
    ),
    *("pattern", "minimum", "maximum", "minLength", "maxLength", "minItems", "maxItems", "maxProperties"),
    *("x-kubernetes-int-or-string", "x-kubernetes-preserve-unknown-fields", "x-kubernetes-validations"),
    *("x-kubernetes-list-type", "x-kubernetes-list-map-keys"),
}
CRDS = [pytest.param(crd(), id=crd.__name__) for crd in (disagginference_crd, scaler_crd)]


def root_of(crd: dict[str, Any]) -> dict[str, Any]:
    schema: dict[str, Any] = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return schema


def nodes(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every schema in a schema with its path."""
    yield path, schema
    for name, child in schema.get("properties", {}).items():
        yield from nodes(child, f"{path}.{name}")
    if isinstance(schema.get("additionalProperties"), dict):
        yield from nodes(schema["additionalProperties"], f"{path}{{}}")
    if "items" in schema:
        yield from nodes(schema["items"], f"{path}[]")


@pytest.mark.parametrize("crd", CRDS)
def test_only_keywords_of_structural_schemas_are_used(crd: dict[str, Any]) -> None:
    strange = {(path, key) for path, node in nodes(root_of(crd)) for key in node.keys() - ALLOWED_KEYWORDS}
    assert not strange


@pytest.mark.parametrize("crd", CRDS)
def test_every_node_has_a_type_and_none_is_a_float(crd: dict[str, Any]) -> None:
    for path, node in nodes(root_of(crd)):
        assert ("type" in node) != ("x-kubernetes-int-or-string" in node), path
        assert node.get("type") in (None, "object", "array", "string", "integer", "boolean"), path


@pytest.mark.parametrize("crd", CRDS)
def test_every_field_is_explained_in_a_sentence(crd: dict[str, Any]) -> None:
    for path, node in nodes(root_of(crd)):
        if path.endswith(("{}", "[]", "")) or path == ".metadata":
            continue
        assert node.get("description", "").endswith("."), f"{path} is not described"


@pytest.mark.parametrize("crd", CRDS)
def test_objects_hold_either_named_fields_or_map_values(crd: dict[str, Any]) -> None:
    for path, node in nodes(root_of(crd)):
        assert not ("properties" in node and "additionalProperties" in node), path


def test_only_the_overlays_and_connector_settings_are_open() -> None:
    opened = {
        p for p, n in nodes(root_of(disagginference_crd())) if n.get("x-kubernetes-preserve-unknown-fields")
    }
    assert opened == {
        *(f".spec.{role}.template" for role in ("prefill", "decode", "router")),
        ".spec.kvTransfer.extraConfig",
    }


@pytest.mark.parametrize("crd", CRDS)
def test_lists_say_how_appliers_share_them_and_are_bounded_where_rules_read_them(crd: dict[str, Any]) -> None:
    for path, node in nodes(root_of(crd)):
        if node.get("type") == "array":
            assert node["x-kubernetes-list-type"] in ("atomic", "map", "set"), path
            if path.startswith(".spec"):
                assert "maxItems" in node, path


@pytest.mark.parametrize("crd", CRDS)
def test_no_word_that_users_write_turns_into_something_else_when_unquoted(crd: dict[str, Any]) -> None:
    for path, node in nodes(root_of(crd)):
        if path.startswith(".spec"):
            assert not {word.lower() for word in node.get("enum", ())} & YAML_WORDS, path


@pytest.mark.parametrize("crd", CRDS)
def test_every_rule_has_a_message_that_is_one_line(crd: dict[str, Any]) -> None:
    for path, node in nodes(root_of(crd)):
        for rule in node.get("x-kubernetes-validations", ()):
            assert rule["rule"], path
            assert "\n" not in rule["message"], path
            assert len(rule["message"]) > 20, path


def test_bounds_that_python_has_are_in_the_schema() -> None:
    found = dict(nodes(root_of(disagginference_crd())))
    assert found[".spec.prefill.replicas"] | {"description": ""} == {
        "type": "integer",
        "minimum": 1,
        "maximum": 1000,
        "description": "",
    }
    assert found[".spec.kvTransfer.leaseSeconds"]["default"] == 120
    assert found[".spec.engine.env"]["x-kubernetes-list-map-keys"] == ["name"]
    assert found[".spec"]["required"] == ["model", "engine"]


def test_an_object_with_rules_gets_its_default_written_out_and_others_an_empty_one() -> None:
    found = dict(nodes(root_of(disagginference_crd())))
    assert found[".spec.model.storage"]["default"] == {"type": "None", "mountPath": "/models"}
    assert found[".spec.router.deadlines"]["default"] == {}


def test_a_crd_fits_into_the_annotation_that_client_side_apply_writes() -> None:
    import json

    for crd in (disagginference_crd(), scaler_crd()):
        assert len(json.dumps(crd)) < 200_000  # the API server takes 256 KiB of annotations in all


class Inner(ApiObject):
    """An inner object."""

    size: Annotated[int, Field(description="A size.")] = 1


def test_a_type_that_cannot_be_structural_is_refused_with_its_path() -> None:
    class Floating(ApiObject):
        """Has a float."""

        share: Annotated[float, Field(description="A share.")] = 0.5

    class Either(ApiObject):
        """Has two types."""

        value: Annotated[int | str, Field(description="A value.")] = 1

    class Unlisted(ApiObject):
        """Has a list without a list type."""

        names: Annotated[tuple[str, ...], Field(description="Names.")] = ()

    class Skewed(ApiObject):
        """Has an object whose default is not its fields' defaults."""

        inner: Annotated[Inner, Field(description="Inner.")] = Inner(size=2)

    for type_, complaint in (
        (Floating, r"Floating\.share: floats"),
        (Either, r"Either\.value: a field has one type, here are 2"),
        (Unlisted, r"Unlisted\.names: a list needs a list type"),
        (Skewed, r"Skewed\.inner: the default of an object"),
    ):
        with pytest.raises(SchemaError, match=complaint):
            structural(type_)


def test_rules_of_a_type_and_of_a_field_are_rendered() -> None:
    class Ruled(ApiObject):
        """Has rules."""

        names: Annotated[
            tuple[str, ...], Field(description="Names.", json_schema_extra=list_type("set"))
        ] = ()
        rules = (Rule("self.names.size() < 3", "at most two names", ".names"),)

    assert structural(Ruled)["x-kubernetes-validations"] == [
        {"rule": "self.names.size() < 3", "message": "at most two names", "fieldPath": ".names"}
    ]


@pytest.mark.parametrize(
    ("python", "wire"),
    [
        ("uri", "uri"),
        ("extra_args", "extraArgs"),
        ("devices_per_gpu", "devicesPerGPU"),
        ("hugepages_2mi", "hugepages2Mi"),
        ("kv_transfer", "kvTransfer"),
        ("decode_kv_usage_percent", "decodeKVUsagePercent"),
        ("api_key_secret_ref", "apiKeySecretRef"),
    ],
)
def test_names_on_the_wire_follow_the_words_of_the_field(python: str, wire: str) -> None:
    assert camel(python) == wire
