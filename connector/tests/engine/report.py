"""A pytest plugin (`-p connector.tests.engine.report`): sums up a run of the engine tests.

Writes `build/reports/connector.json`, prints it as a table, and fails a run that counted nothing of something that it
is there to count.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from connector.tests.engine.evidence import Evidence

REPORT = Path("build") / "reports" / "connector.json"
EVIDENCE = pytest.StashKey[Evidence]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[EVIDENCE] = Evidence()


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    evidence = session.config.stash[EVIDENCE]
    evidence.write(session.config.rootpath / REPORT)
    if evidence.faults() and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    evidence = config.stash[EVIDENCE]
    terminalreporter.section(str(REPORT))
    for line in evidence.table():
        terminalreporter.write_line(line)
    for fault in evidence.faults():
        terminalreporter.write_line(f"not proved: {fault}", red=True)
