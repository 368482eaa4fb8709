"""What all API types share: naming, immutability, CEL rules and the scalar types of Kubernetes.

The types are the one source of the CRDs. `schema.py` turns them into a structural OpenAPI schema, so what matters to
a user of kubectl is declared here beside the field: description, bounds, default, list type and CEL rules.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any, ClassVar

from pydantic import (
    AwareDatetime,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    PlainSerializer,
    WithJsonSchema,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

GROUP = "inference.disagg.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"

RULES_KEY = "x-kubernetes-validations"

_UPPER_WORDS = frozenset({"gpu", "kv"})


def camel(name: str) -> str:
    """The JSON name of a Python field: `devices_per_gpu` is `devicesPerGPU`, `hugepages_2mi` is `hugepages2Mi`."""
    first, *rest = name.split("_")
    return first + "".join(w.upper() if w in _UPPER_WORDS else _capitalized(w) for w in rest)


def _capitalized(word: str) -> str:
    head = len(word) - len(word.lstrip("0123456789"))
    return word[:head] + word[head:].capitalize()


@dataclass(frozen=True, slots=True)
class Rule:
    """One `x-kubernetes-validations` entry: a CEL expression on `self`, and what the user reads if it is false.

    `path` is the field (relative, as `.writeBack`) that the API server names in its error; without it the object.
    """

    rule: str
    message: str
    path: str | None = None


class ApiObject(BaseModel):
    """A part of a custom resource: immutable, camelCase on the wire, ignorant of fields that it does not know.

    Unknown fields are dropped because the API server has already pruned or refused them; an operator must still read
    what a newer CRD let in.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="ignore",
        alias_generator=camel,
        validate_by_name=True,
        validate_by_alias=True,
    )

    rules: ClassVar[tuple[Rule, ...]] = ()

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler, /
    ) -> JsonSchemaValue:
        """The schema with the type's CEL rules."""
        schema = handler(core_schema)
        if cls.rules:
            handler.resolve_ref_schema(schema).update(validations(cls.rules))
        return schema

    def to_wire(self) -> dict[str, Any]:
        """As JSON data with the names of the wire; fields that are None are left out."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


def validations(rules: Iterable[Rule]) -> dict[str, Any]:
    """Schema extension with CEL rules."""
    return {
        RULES_KEY: [
            {"rule": r.rule, "message": r.message} | ({"fieldPath": r.path} if r.path else {}) for r in rules
        ]
    }


def list_type(kind: str, *keys: str) -> dict[str, Any]:
    """Schema extension for a list: `atomic`, `set`, or `map` with its keys."""
    extra: dict[str, Any] = {"x-kubernetes-list-type": kind}
    if keys:
        extra["x-kubernetes-list-map-keys"] = list(keys)
    return extra


def _text_of(value: object) -> object:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


QUANTITY_PATTERN = r"^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$"  # as apimachinery's CRDs write it; the API server parses the rest

Quantity = Annotated[
    str,
    BeforeValidator(_text_of),
    WithJsonSchema({"x-kubernetes-int-or-string": True, "pattern": QUANTITY_PATTERN}),
]
"""A Kubernetes resource quantity, `8`, `500m` or `64Gi`; kept as text."""

Opaque = Annotated[dict[str, Any], Field(json_schema_extra={"x-kubernetes-preserve-unknown-fields": True})]
"""An object that the schema does not look into."""


def _rfc3339(value: datetime) -> str:
    return value.strftime("%Y-%m-%dT%H:%M:%SZ")


Time = Annotated[
    AwareDatetime,
    PlainSerializer(_rfc3339, return_type=str, when_used="json"),
    WithJsonSchema({"type": "string", "format": "date-time"}),
]
"""A moment, RFC 3339 with seconds, as all Kubernetes timestamps."""
