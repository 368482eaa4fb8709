"""What a run of the engine tests has really counted, and judged.

A test counts into an `Evidence` (fixture `evidence`); `report` sums up the run.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from connector.tests.engine.conversation import counter, used_blocks, wait_until
from connector.tests.engine.ledger import Findings, read
from e2e.engines import Engine


@dataclass
class Evidence:
    turns: int = 0
    """Answers compared with the plain engine's, token by token."""
    sessions: int = 0
    """Conversations that they belong to."""
    mismatches: int = 0
    """Answers, or blocks by their checksums, that differ without a test having asked for it."""
    leaked_blocks: int = 0
    """KV blocks still in use, or held, some time after the last request."""
    kills: int = 0
    """Engines ended by SIGKILL at a named phase of a transfer."""
    checksums_checked: int = 0
    """Blocks compared byte by byte, by a checksum, on the way from one engine's memory to the other's."""
    corruptions_caught: int = 0
    """Blocks that a test has corrupted and the checksums have shown."""
    ledgers: dict[Path, Findings] = field(default_factory=dict)
    """What has been taken in of each folder."""

    def count_blocks(self, folder: Path) -> Findings:
        """Take in what the engines have written into a ledger's folder; fails for a mismatch nobody has asked for."""
        before, found = self.ledgers.get(folder, Findings()), read(folder)
        self.ledgers[folder] = found
        self.checksums_checked += found.checked - before.checked
        self.corruptions_caught += found.caught - before.caught
        self.mismatches += len(found.unexplained) - len(before.unexplained)
        assert not found.unexplained, found.unexplained[:10]
        return found

    def nothing_is_held(self, engine: Engine, limit: float = 120) -> None:
        """No KV block of an engine is in use, held or in quarantine; else they have leaked."""

        def is_free() -> bool:
            return used_blocks(engine) == 0 and counter(engine, "disagg_kv_blocks_quarantined") == 0

        try:
            wait_until(is_free, f"{engine.name} holds no blocks", limit)
        except AssertionError:
            # One block is vLLM's own null block.
            self.leaked_blocks += max(1, round(used_blocks(engine) * (engine.spec.kv_blocks - 1)))
            raise

    def counts(self) -> dict[str, int]:
        """Name -> number, as in the report."""
        return {name: value for name, value in vars(self).items() if name != "ledgers"}

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.counts()) + "\n")

    def table(self) -> list[str]:
        """Lines for a terminal."""
        rows = self.counts()
        width = max(len(name) for name in rows)
        return [f"{name.replace('_', ' '):<{width}}  {value:>8}" for name, value in rows.items()]

    def faults(self) -> list[str]:
        """Why a complete run with these counts proves nothing, or proves a fault."""
        counts = self.counts()
        none = ("mismatches", "leaked_blocks")
        wrong = [f"{name} is {counts[name]}" for name in none if counts[name]]
        return wrong + [f"{name} is 0" for name, value in counts.items() if name not in none and not value]
