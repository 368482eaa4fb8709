"""What the ledgers show, and that they show it: no engine is needed for that."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from connector.tests.engine.ledger import Ledger, read


def test_equal_blocks_are_counted_and_different_ones_named(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, 0)
    ledger.write("source", "a", [7, 8], [0, 1], [[1, 2], [3, 4]])
    ledger.write("target", "a", [7, 8], [0, 1], [[1, 2], [3, 5]])
    found = read(tmp_path)
    assert (found.checked, found.transfers, found.bad_transfers) == (1, 1, {"a"})
    assert found.mismatches == ["a block 8 head 1 rank 0: target differs from its source"]


def test_two_blocks_that_changed_places_are_a_mismatch(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, 0)
    ledger.write("source", "a", [7, 8], [0], [[1], [2]])
    ledger.write("target", "a", [7, 8], [0], [[2], [1]])
    assert len(read(tmp_path).mismatches) == 2


def test_ranks_of_both_sides_are_joined_by_head(tmp_path: Path) -> None:
    for rank, head in ((0, 0), (1, 1)):
        Ledger(tmp_path, rank).write("source", "a", [7], [head], [[10 + head]])
    whole = Ledger(tmp_path, 0)
    whole.write("target", "a", [7], [0, 1], [[10, 99]])
    # The other rank of the writer was later.
    whole.write("target", "a", [7], [0, 1], [[10, 11]])
    found = read(tmp_path)
    assert (found.checked, found.mismatches) == (1, [])


def test_what_nobody_wrote_is_a_mismatch(tmp_path: Path) -> None:
    Ledger(tmp_path, 0).write("published", "a", [7], [0], [[1]])
    assert read(tmp_path).mismatches == ["a block 7 head 0 rank 0: published has no source"]


def test_a_fault_that_was_put_in_is_told_from_one_that_was_not(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, 0)
    for xid in ("a", "b"):
        ledger.write("source", xid, [7], [0], [[1]])
        ledger.write("target", xid, [7], [0], [[2]])
    for stage in ("source", "target", "corrupted"):
        ledger.write(stage, "d", [7], [0], [[1]])
    ledger.write("corrupted", "a")
    ledger.write("corrupted", "c")
    found = read(tmp_path)
    assert found.caught == 1
    assert found.missed == {"d"}
    assert [text.split()[0] for text in found.unexplained] == ["b"]


def test_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, 0)
    ledger.write("source", "a", [7], [0], [[1]])
    (path,) = tmp_path.glob("*.jsonl")
    path.write_text(path.read_text() + '{"stage": "target", "xi')
    found = read(tmp_path)
    assert (found.checked, found.unseen) == (0, 1)


def test_a_transfer_that_comes_while_the_ledger_is_read_has_its_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, receiver = tmp_path / "1.jsonl", tmp_path / "2.jsonl"
    line = {"stage": "source", "xid": "a", "rank": 0, "blocks": [7], "heads": [0], "checksums": [[1]]}
    writer.touch()
    receiver.touch()
    read_text = Path.read_text

    def read_and_then_transfer(path: Path) -> str:
        text = read_text(path)
        if not writer.stat().st_size:
            writer.write_text(json.dumps(line) + "\n")
            receiver.write_text(json.dumps({**line, "stage": "target"}) + "\n")
        return text

    monkeypatch.setattr(Path, "read_text", read_and_then_transfer)
    found = read(tmp_path)
    assert (found.checked, found.mismatches) == (1, [])
