"""What docs/wire-contract.md promises of the connector, checked against the connector."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from disagg_connector.config import ConnectorConfig
from disagg_connector.counters import DEFINITIONS
from disagg_connector.protocol import Address, DecodeLeg, Dismissal, PrefillLeg, parse_params

CONTRACT = (Path(__file__).parents[2] / "docs" / "wire-contract.md").read_text()
SECTIONS = dict(re.findall(r"^## (\d)\.[^\n]*\n(.*?)(?=^## |\Z)", CONTRACT, re.M | re.S))


def _params() -> list[dict[str, Any]]:
    return [json.loads(block) for block in re.findall(r"```json\n(.*?)```", SECTIONS["1"], re.S)]


def test_the_params_of_the_contract_are_understood() -> None:
    prefill, decode, _ = _params()
    assert parse_params(prefill, "prefill") == PrefillLeg(Address("10.88.65.11", 5700))
    assert parse_params(decode, "decode") == DecodeLeg(Address("10.88.64.11", 5700))


def test_the_decodes_address_is_optional() -> None:
    prefill, *_ = _params()
    del prefill["disagg"]["decode"]
    assert parse_params(prefill, "prefill") == PrefillLeg(None)


def test_the_dismissal_of_the_contract_is_understood() -> None:
    *_, dismissal = _params()
    assert parse_params(dismissal, "prefill") == Dismissal(dismissal["disagg"]["dismiss"])


def test_the_metrics_are_those_of_the_contract() -> None:
    promised: dict[str, tuple[str, str]] = {}
    rows = re.findall(r"^\| (`disagg_[^|]+)\|([^|]+)\|([^|]*)\|", SECTIONS["2"], re.M)
    for names, kind, label in rows:
        for name in re.findall(r"`(\w+)`", names):
            promised[name.removesuffix("_total")] = (kind.strip(), label.strip().strip("`"))
    exported = {name: (definition.kind, definition.label) for name, definition in DEFINITIONS.items()}
    assert exported == promised


def test_the_offer_results_are_those_of_the_contract() -> None:
    row = next(line for line in SECTIONS["2"].splitlines() if "writeback_offers" in line)
    promised = re.findall(r"`(\w+)`", row.rsplit("|", 2)[1])
    assert set(DEFINITIONS["disagg_kv_writeback_offers"].values) == set(promised)


def test_the_control_port_is_the_contracts() -> None:
    port = re.search(r"^\| (\d+) \+ rank \| `control`", SECTIONS["3"], re.M)
    assert port is not None
    assert ConnectorConfig(role="prefill").control_port == int(port.group(1))
