"""From a pydantic type to a structural Kubernetes schema. Pure.

Kubernetes takes a subset of OpenAPI v3: no references, no `anyOf`, and every field typed. A schema with those is refused,
or worse, its fields are silently not pruned. This pass therefore knows each keyword that pydantic makes and raises on
any other. Source: Kubernetes documentation, "Specifying a structural schema".
"""

from collections.abc import Mapping
from typing import Any

from .base import RULES_KEY, ApiObject

Schema = dict[str, Any]

_COPIED = (
    "format",
    "enum",
    "pattern",
    "minimum",
    "maximum",
    "minLength",
    "maxLength",
    "minItems",
    "maxItems",
    "maxProperties",
    "x-kubernetes-int-or-string",
    "x-kubernetes-preserve-unknown-fields",
    "x-kubernetes-list-type",
    "x-kubernetes-list-map-keys",
    RULES_KEY,
)
_HANDLED = frozenset(
    {*_COPIED, "type", "title", "description", "default", "properties", "required", "items"}
    | {"additionalProperties", "$defs"}
)


class SchemaError(Exception):
    """A type cannot be expressed as a structural schema; the message says which field and why. A bug in the types."""


def structural(model: type[ApiObject]) -> Schema:
    """The structural schema of `model`, with descriptions, defaults, bounds, list types and CEL rules.

    Raises SchemaError for what Kubernetes could not hold.
    """
    source = model.model_json_schema(by_alias=True, mode="validation")
    return _Pass(source.get("$defs", {})).convert(source, model.__name__)


class _Pass:
    """One conversion; holds the definitions that references point to."""

    def __init__(self, definitions: Mapping[str, Schema]) -> None:
        self.definitions = definitions

    def convert(self, node: Schema, at: str) -> Schema:
        node = self._resolve(node, at)
        strange = node.keys() - _HANDLED
        if strange:
            raise SchemaError(
                f"{at}: keyword {', '.join(sorted(strange))} has no place in a structural schema"
            )
        if node.get("type") == "number":
            raise SchemaError(
                f"{at}: floats are not used in Kubernetes APIs; make it an integer with a unit in the name"
            )
        out: Schema = {}
        if "description" in node:
            out["description"] = node["description"]
        if "type" in node:
            out["type"] = node["type"]
        elif "x-kubernetes-int-or-string" not in node:
            raise SchemaError(f"{at}: has no type")
        out.update({key: node[key] for key in _COPIED if key in node})
        self._members(node, out, at)
        if node.get("default") is not None:
            out["default"] = self._default(node["default"], out, at)
        return out

    def _members(self, node: Schema, out: Schema, at: str) -> None:
        """Converts what the node contains: properties, map values, list items."""
        if "properties" in node:
            out["properties"] = {k: self.convert(v, f"{at}.{k}") for k, v in node["properties"].items()}
            if node.get("required"):
                out["required"] = list(node["required"])
        elif isinstance(node.get("additionalProperties"), dict):
            out["additionalProperties"] = self.convert(node["additionalProperties"], f"{at}{{}}")
        elif node.get("type") == "object" and not node.get("x-kubernetes-preserve-unknown-fields"):
            raise SchemaError(f"{at}: an object needs properties, map values, or to be opaque")
        if node.get("type") == "array":
            if "x-kubernetes-list-type" not in node:
                raise SchemaError(
                    f"{at}: a list needs a list type, or two appliers overwrite each other's items"
                )
            out["items"] = self.convert(node["items"], f"{at}[]")

    def _resolve(self, node: Schema, at: str) -> Schema:
        """Follows references and optional fields; what stands beside the reference wins over what it refers to."""
        while True:
            if "$ref" in node:
                beside = {k: v for k, v in node.items() if k != "$ref"}
                node = {**self.definitions[node["$ref"].removeprefix("#/$defs/")], **beside}
            elif "anyOf" in node:
                choices = [c for c in node["anyOf"] if c.get("type") != "null"]
                if len(choices) != 1:
                    raise SchemaError(f"{at}: a field has one type, here are {len(choices)}")
                node = {**choices[0], **{k: v for k, v in node.items() if k != "anyOf"}}
            else:
                return node

    def _default(self, default: Any, out: Schema, at: str) -> Any:
        """A default as the API server applies it: of an object `{}`, since its fields have their own.

        An object with rules gets them written out, because the API server checks rules on the bare default.
        """
        if not isinstance(default, dict) or "properties" not in out:
            return default
        filled = _filled(out)
        if _without_blanks(default) != _without_blanks(filled):
            raise SchemaError(f"{at}: the default of an object must be what its fields' defaults give")
        return filled if RULES_KEY in out else {}


def _filled(schema: Schema) -> Schema:
    """What the API server makes of `{}`."""
    fields = schema.get("properties", {}).items()
    return {
        name: _filled(child) if "properties" in child else child["default"]
        for name, child in fields
        if "default" in child
    }


def _without_blanks(value: Any) -> Any:
    """Without fields that are None or an empty object, which the API server does not have at all."""
    if not isinstance(value, dict):
        return value
    inner = {k: _without_blanks(v) for k, v in value.items()}
    return {k: v for k, v in inner.items() if v is not None and v != {}}
