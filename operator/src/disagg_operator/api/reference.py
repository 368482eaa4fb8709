"""Writes docs/api-reference.md from the CRDs and the enums of conditions. Pure."""

import ast
import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Any

from .conditions import ConditionType, Reason
from .schema import Schema
from .support import NOT_IMPLEMENTED

_INTRO = """\
# API reference

Generated from the types by `make crds`; do not edit. The same texts are shown by `kubectl explain`.

Where a value breaks a rule below, `kubectl apply` refuses the object with the rule's text, whether the operator runs or not.

"""
_NOT_IMPLEMENTED = """\
## Accepted, but not implemented yet

These values are part of the API and this version cannot do them. They are never ignored: an object with one of them gets
`Ready=False` and `Stalled=True` with reason `NotImplemented`, and a message that says what to write instead. What already runs
stays as it is.

| field | supported |
|---|---|
"""


def api_reference(crds: Sequence[Mapping[str, Any]]) -> str:
    """The whole page, as Markdown."""
    parts = [_INTRO]
    for crd in crds:
        version = crd["spec"]["versions"][0]
        schema = version["schema"]["openAPIV3Schema"]
        parts.append(f"## {crd['spec']['names']['kind']}\n\n{schema['description']}\n\n")
        parts.extend(_objects(schema["properties"]["spec"], "spec"))
        parts.append(_rules(schema, "metadata"))
        parts.extend(_objects(schema["properties"]["status"], "status"))
    parts.append(
        _NOT_IMPLEMENTED + "".join(f"| `{gap.path}` | {_cell(gap.supported)} |\n" for gap in NOT_IMPLEMENTED)
    )
    parts.append("\n## Conditions\n\n" + _enum_table(ConditionType, "condition", "true when"))
    parts.append("\n## Reasons\n\n" + _enum_table(Reason, "reason", "meaning"))
    return "".join(parts)


def _objects(schema: Schema, path: str) -> Iterator[str]:
    """A section for the object at `path`, then for each object in it, depth first; of twins only the first."""
    yield _section(schema, path)
    seen: dict[str, str] = {}
    for name, child in _fields(schema):
        suffix, inner = ("[]", child["items"]) if child.get("type") == "array" else ("", child)
        if "properties" not in inner or inner.get("x-kubernetes-preserve-unknown-fields"):
            continue
        twin = seen.setdefault(json.dumps(inner.get("properties")), name)
        if twin == name:
            yield from _objects(inner, f"{path}.{name}{suffix}")
        else:
            yield f"### {path}.{name}{suffix}\n\n{inner['description']} The same fields as `{path}.{twin}`.\n\n"


def _fields(schema: Schema) -> list[tuple[str, Schema]]:
    return list(schema.get("properties", {}).items())


def _section(schema: Schema, path: str) -> str:
    rows = "".join(
        f"| `{name}` | {_type(child)} | {_default(schema, name, child)} | {_cell(_text(child))} |\n"
        for name, child in _fields(schema)
    )
    head = f"### {path}\n\n{schema.get('description', '')}\n\n| field | type | default | description |\n|---|---|---|---|\n"
    return (
        head
        + rows
        + "\n"
        + _rules(schema, path)
        + "".join(_rules(c, f"{path}.{n}") for n, c in _own_rules(schema))
    )


def _own_rules(schema: Schema) -> list[tuple[str, Schema]]:
    """Fields without a section of their own that have rules: lists of text, open objects."""
    return [
        (name, child)
        for name, child in _fields(schema)
        if "properties" not in child or child.get("x-kubernetes-preserve-unknown-fields")
    ]


def _rules(schema: Schema, path: str) -> str:
    rules = schema.get("x-kubernetes-validations", ())
    if not rules:
        return ""
    return f"Rules of `{path}`:\n\n" + "".join(f"- {rule['message']}\n" for rule in rules) + "\n"


def _type(schema: Schema) -> str:
    if schema.get("x-kubernetes-int-or-string"):
        return "quantity"
    if schema["type"] == "array":
        return f"list of {_type(schema['items'])}"
    if "additionalProperties" in schema:
        return f"map of {_type(schema['additionalProperties'])}"
    return str(schema.get("format", schema["type"])) if schema["type"] == "string" else str(schema["type"])


def _default(parent: Schema, name: str, schema: Schema) -> str:
    if name in parent.get("required", ()):
        return "required"
    default = schema.get("default")
    if default in (None, {}, []):
        return ""
    return f"`{str(default).lower() if isinstance(default, bool) else default}`"


def _text(schema: Schema) -> str:
    """The description with the bounds that a user can run into."""
    notes = []
    if "enum" in schema:
        notes.append("One of " + ", ".join(f"`{value}`" for value in schema["enum"]) + ".")
    low, high = schema.get("minimum"), schema.get("maximum")
    if low is not None and high is not None:
        notes.append(f"{low} to {high}.")
    elif low is not None:
        notes.append(f"At least {low}.")
    return " ".join([schema.get("description", ""), *notes])


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _enum_table(enum: type[StrEnum], head: str, meaning: str) -> str:
    rows = "".join(f"| `{value}` | {_cell(text)} |\n" for value, text in member_docs(enum).items())
    return f"| {head} | {meaning} |\n|---|---|\n{rows}"


def member_docs(enum: type[StrEnum]) -> dict[str, str]:
    """Each member's value with the docstring written under it; Python itself keeps none for enum members."""
    body = ast.parse(inspect.getsource(enum)).body[0]
    assert isinstance(body, ast.ClassDef)
    docs: dict[str, str] = {}
    for member, following in zip(body.body, [*body.body[1:], None], strict=True):
        if isinstance(member, ast.Assign) and isinstance(member.targets[0], ast.Name):
            written = following.value if isinstance(following, ast.Expr) else None
            text = (
                written.value if isinstance(written, ast.Constant) and isinstance(written.value, str) else ""
            )
            docs[enum[member.targets[0].id].value] = text
    return docs
