"""The tests that the documents name exist, so that a line that nothing holds any more is noticed."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[3]
MATRIX = REPOSITORY / "docs" / "support-matrix.md"
HAZARDS = REPOSITORY / "docs" / "connector-hazards.md"
PARTS = ("connector", "e2e", "operator", "router")
DOCUMENTS = [MATRIX, HAZARDS]

# `test_module`, `test_module::test_function`, `test_function`, or its beginning: `test_func...`
_NAME = re.compile(r"`(test_\w+(?:::test_\w+)?)(\.\.\.)?`")
_DEFINED = re.compile(r"^ *(?:async )?def (test_\w+)", re.MULTILINE)
_STATES = ("supported", "refused", "computed", "not tried")


@functools.cache
def defined() -> dict[str, set[str]]:
    """The tests of each module."""
    paths = [path for part in PARTS for path in (REPOSITORY / part).rglob("test_*.py")]
    return {path.stem: set(_DEFINED.findall(path.read_text())) for path in paths}


def exists(name: str, *, begins: bool) -> bool:
    module, _, function = name.rpartition("::")
    if module:
        return function in defined().get(module, set())
    functions = set().union(*defined().values())
    if begins:
        return any(other.startswith(name) for other in functions)
    return name in defined() or name in functions


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.stem)
def test_every_test_that_is_named_exists(document: Path) -> None:
    named = _NAME.findall(document.read_text())
    assert len(named) > 20
    missing = [name for name, dots in named if not exists(name, begins=bool(dots))]
    assert not missing, f"docs/{document.name} names tests that do not exist"


def rows(document: Path) -> list[list[str]]:
    lines = [line for line in document.read_text().splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [row for row in cells if "state" not in row[1:3] and set(row[0]) != {"-"}]


@pytest.mark.parametrize("row", rows(HAZARDS), ids=lambda row: row[0])
def test_every_hazard_has_a_test(row: list[str]) -> None:
    assert len(row) == 4
    assert _NAME.search(row[3]), "no test holds this line"


@pytest.mark.parametrize("row", rows(MATRIX), ids=lambda row: row[0])
def test_every_line_of_the_matrix_has_a_state_and_what_holds_it(row: list[str]) -> None:
    assert len(row) == 4
    assert row[1].startswith(_STATES)
    if not row[1].startswith("not tried"):
        assert _NAME.search(row[3]), "no test holds this line"
