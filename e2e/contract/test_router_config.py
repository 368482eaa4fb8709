"""The router reads the configuration that docs/wire-contract.md section 5 shows."""

from __future__ import annotations

import re
from pathlib import Path

from disagg_router import config
from disagg_router.backends import LABEL_KEEP, LABEL_MODE, LABEL_NAME, LABEL_REVISION, LABEL_ROLE

DOC = Path(__file__).parents[2] / "docs" / "wire-contract.md"


def documented() -> str:
    section = DOC.read_text().split("## 5. ")[1]
    blocks: list[str] = re.findall(r"```json\n(.*?)```", section, re.DOTALL)
    assert len(blocks) == 1
    return blocks[0]


def test_the_documented_configuration_is_understood() -> None:
    read = config.parse(documented().encode(), "docs/wire-contract.md")
    assert (read.namespace, read.name, read.model.name) == (
        "default",
        "smollm2",
        "HuggingFaceTB/SmolLM2-135M-Instruct",
    )
    assert (read.ports.http, read.ports.admin, read.ports.engine, read.ports.control) == (
        8000,
        8001,
        8000,
        5700,
    )
    assert read.session.keys == ("X-Session-Id",)


def test_the_documented_values_are_the_defaults() -> None:
    read = config.parse(documented().encode(), "docs/wire-contract.md")
    least = b'{"version": 1, "namespace": "default", "name": "smollm2", "model": {"name": "%s"}}'
    assert read == config.parse(least % read.model.name.encode(), "the least configuration")


def test_the_labels_are_those_of_the_contract() -> None:
    text = DOC.read_text()
    assert LABEL_NAME == "inference.disagg.dev/name"
    for label in (LABEL_NAME, LABEL_ROLE, LABEL_REVISION, LABEL_MODE, LABEL_KEEP):
        assert f"`{label}" in text
