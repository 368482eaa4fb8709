"""Names, labels and ports are those of docs/wire-contract.md."""

import re
from pathlib import Path

import pytest
from operator_world import SETTINGS, parsed_spec

from disagg_operator import naming
from disagg_operator.api.types import MAX_NAME_LENGTH
from disagg_operator.build.children import Owner, build_children
from disagg_operator.control_secret import build_control_secret
from disagg_operator.naming import Component

CONTRACT = (Path(__file__).resolve().parents[2] / "docs" / "wire-contract.md").read_text()


@pytest.mark.parametrize("length", [1, 20, MAX_NAME_LENGTH])
def test_every_name_and_label_of_a_child_fits_kubernetes(length: int) -> None:
    children = build_children(Owner("default", "a" * length, "uid"), parsed_spec(), SETTINGS)
    for child in children.manifests:
        name = child["metadata"]["name"]
        longest = 52 if child["kind"] == "StatefulSet" else 63
        assert len(name) <= longest, name
        assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name)
        for value in child["metadata"]["labels"].values():
            assert len(value) <= 63


def test_names_that_differ_only_at_their_end_share_no_child() -> None:
    names = [
        {
            (m["kind"], m["metadata"]["name"])
            for m in build_children(Owner("default", name, "uid"), parsed_spec(), SETTINGS).manifests
        }
        for name in ("a" * 34 + "b", "a" * 34 + "c")
    ]
    assert not names[0] & names[1]


def test_the_children_are_those_of_the_contract() -> None:
    children = build_children(Owner("default", "NAME", "uid"), parsed_spec(), SETTINGS)
    secret = build_control_secret("default", "NAME", "uid")
    made = sorted(
        (m["kind"], m["metadata"]["name"].replace(children.revision, "REV8"))
        for m in (secret, *children.manifests)
    )
    assert made == sorted(
        [
            *(
                (kind, f"NAME-{role}-REV8")
                for kind in ("StatefulSet", "Service")
                for role in ("prefill", "decode")
            ),
            ("Secret", "NAME-control"),
            *(("PodDisruptionBudget", f"NAME-{role}") for role in ("prefill", "decode", "router")),
            *(
                (kind, "NAME-router")
                for kind in ("Deployment", "Service", "ServiceAccount", "Role", "RoleBinding", "ConfigMap")
            ),
        ]
    )
    for _, name in made:
        assert f"`{name}`" in CONTRACT


@pytest.mark.parametrize("component", list(Component))
def test_every_label_key_is_in_the_contract(component: Component) -> None:
    revision = None if component is Component.ROUTER else "0123abcd"
    for key in naming.labels("demo", component, revision):
        assert key in CONTRACT or f"{{{key.split('/')[1]}" in CONTRACT


def test_the_ports_are_those_of_the_contract() -> None:
    rows = re.findall(r"^\| (\d+)(?: \+ rank)? \| `([a-z-]+)`", CONTRACT, re.MULTILINE)
    assert {name: int(port) for port, name in rows} == {
        "http": naming.HTTP_PORT,
        "admin": naming.ADMIN_PORT,
        "side-channel": naming.SIDE_CHANNEL_PORT,
        "control": naming.CONTROL_PORT,
    }
