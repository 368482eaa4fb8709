"""The report of a run says what was counted, and a run that has counted nothing of something fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from connector.tests.engine.conversation import ROOT
from connector.tests.engine.evidence import Evidence
from connector.tests.engine.ledger import Ledger
from connector.tests.engine.report import REPORT

COUNTS = (
    "turns",
    "sessions",
    "mismatches",
    "leaked_blocks",
    "kills",
    "checksums_checked",
    "corruptions_caught",
)


def test_only_a_whole_run_without_faults_proves_something() -> None:
    assert Evidence(200, 20, 0, 0, 9, 5000, 4).faults() == []
    assert Evidence(200, 20, 1, 0, 9, 5000, 4).faults() == ["mismatches is 1"]
    assert Evidence(200, 20, 0, 0, 0, 5000, 4).faults() == ["kills is 0"]


def test_a_ledger_is_counted_once_however_often_it_is_read(tmp_path: Path) -> None:
    evidence, ledger = Evidence(), Ledger(tmp_path, 0)
    for xid in ("a", "b"):
        ledger.write("source", xid, [7], [0], [[1]])
        ledger.write("target", xid, [7], [0], [[1]])
        evidence.count_blocks(tmp_path)
    assert evidence.checksums_checked == 2


def test_a_run_that_counted_nothing_fails_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "test_nothing.py").write_text("def test_nothing(): pass\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "connector.tests.engine.report", "test_nothing.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 1, run.stdout + run.stderr
    assert "not proved: turns is 0" in run.stdout
    report = json.loads((tmp_path / REPORT).read_text())
    assert report == dict.fromkeys(COUNTS, 0)
