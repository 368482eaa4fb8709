"""What engines under test write down of the blocks they exchange, and what a test makes of it.

One JSON line per transfer, rank and stage, in files of a common folder, one a process:

* `source`: the writer, when it starts the write; the blocks are named by where they go;
* `target`: the receiver, when NIXL has announced the write, before the engine hears of it;
* `published`: the receiver of a write-back, when the block is in the prefix cache, before the step in which a request
  can use it;
* `corrupted`: a fault that the test has asked for was put into this transfer.

Checksums are compared by transfer, target block and KV head, so that it does not matter how many ranks either side has.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Stage = Literal["source", "target", "published", "corrupted"]

FOLDER = "DISAGG_LEDGER"
"""The environment variable that names the folder."""


class Ledger:
    """Appends to this process's file. Lines are whole also after a SIGKILL but for the last."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder = folder
        self.rank = rank
        self._file = (folder / f"{os.getpid()}.jsonl").open("a", buffering=1)

    def write(
        self,
        stage: Stage,
        xid: str,
        blocks: Sequence[int] = (),
        heads: Sequence[int] = (),
        checksums: Sequence[Sequence[int]] = (),
    ) -> None:
        """`checksums[i][j]` is of target block `blocks[i]` and KV head `heads[j]`, counted over all ranks."""
        line = {
            "stage": stage,
            "xid": xid,
            "rank": self.rank,
            "blocks": list(blocks),
            "heads": list(heads),
            "checksums": [list(row) for row in checksums],
        }
        self._file.write(json.dumps(line) + "\n")


@dataclass
class Findings:
    """What the ledgers of a folder say."""

    checked: int = 0
    """Blocks of which every head on every receiving rank was compared with what its writer had, at their arrival."""
    published: int = 0
    """Of these, blocks compared once more when they had entered the prefix cache."""
    mismatches: list[str] = field(default_factory=list)
    """Each says which transfer, block, head and rank."""
    bad_transfers: set[str] = field(default_factory=set)
    corrupted: set[str] = field(default_factory=set)
    """Transfers into which a test has put a fault."""
    missed: set[str] = field(default_factory=set)
    """Of these, transfers that have arrived and look right."""
    transfers: int = 0
    """Transfers that have arrived."""
    unseen: int = 0
    """Transfers that were started and never arrived, or that nobody waited for any more."""

    @property
    def caught(self) -> int:
        """Faults put in that the checksums have shown."""
        return len(self.corrupted & self.bad_transfers)

    @property
    def unexplained(self) -> list[str]:
        """Mismatches that no test has asked for."""
        return [text for text in self.mismatches if text.split()[0] not in self.corrupted]


_Key = tuple[str, int, int]


def read(folder: Path) -> Findings:
    """Compare all that engines have written down in a folder."""
    findings = Findings()
    sources: dict[_Key, set[int]] = defaultdict(set)
    # Of several announcements on one rank, each by another of the writer's ranks, the last shows the whole.
    arrivals: dict[tuple[Stage, int, _Key], int] = {}
    # Engines go on writing. What comes before an arrival, its source and any fault, is read after it, so that it is seen.
    for line in _lines(folder):
        if line["stage"] in ("target", "published"):
            for key, checksum in _entries(line):
                arrivals[line["stage"], line["rank"], key] = checksum
    for line in _lines(folder):
        if line["stage"] == "corrupted":
            findings.corrupted.add(line["xid"])
        elif line["stage"] == "source":
            for key, checksum in _entries(line):
                sources[key].add(checksum)
    whole: dict[Stage, dict[tuple[str, int], bool]] = {"target": {}, "published": {}}
    for (stage, rank, key), checksum in arrivals.items():
        xid, block, head = key
        same = sources.get(key) == {checksum}
        seen = whole[stage]
        seen[xid, block] = seen.get((xid, block), True) and same
        if not same:
            why = "differs from its" if key in sources else "has no"
            findings.mismatches.append(f"{xid} block {block} head {head} rank {rank}: {stage} {why} source")
            findings.bad_transfers.add(xid)
    findings.checked = sum(whole["target"].values())
    findings.published = sum(whole["published"].values())
    arrived = {xid for xid, _ in whole["target"]}
    findings.missed = (findings.corrupted & arrived) - findings.bad_transfers
    findings.transfers = len(arrived)
    findings.unseen = len({xid for xid, _, _ in sources} - arrived)
    return findings


def _entries(line: dict[str, Any]) -> Iterator[tuple[_Key, int]]:
    for block, row in zip(line["blocks"], line["checksums"], strict=True):
        for head, checksum in zip(line["heads"], row, strict=True):
            yield (line["xid"], block, head), checksum


def _lines(folder: Path) -> Iterator[dict[str, Any]]:
    for path in sorted(folder.glob("*.jsonl")):
        for text in path.read_text().splitlines():
            try:
                yield json.loads(text)
            except json.JSONDecodeError:
                continue  # the last line of an engine that was killed
