"""docs/conditions.md knows every condition and every reason, and no others."""

import re
from pathlib import Path

from disagg_operator.api.conditions import ConditionType, Reason

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "conditions.md").read_text()
TYPES, REASONS = TEXT.split("## Reasons")


def test_every_type_is_explained() -> None:
    for type_ in ConditionType:
        assert f"`{type_}`" in TYPES, f"docs/conditions.md does not know {type_}"


def test_every_reason_is_explained_and_no_others() -> None:
    table, reserved = REASONS.split("Reserved for")
    explained = re.findall(r"^\| `(\w+)`", table, re.MULTILINE)
    assert sorted([*explained, *re.findall(r"`(\w+)`", reserved)]) == sorted(map(str, Reason))
