"""`make demo` on the scenarios' cluster."""

import json
import subprocess
import sys

import pytest

from e2e.demo.__main__ import REPORT
from e2e.demo.report import LEAST_ANSWER_TOKENS
from e2e.demo.stack import NAME, REPOSITORY, Stack
from e2e.inference import Inference

pytestmark = pytest.mark.cluster
RUNS = 3
RUN_SECONDS = 700


@pytest.mark.timeout(RUNS * RUN_SECONDS)
def test_the_demo_shows_kv_moving_both_ways(operator: Stack) -> None:
    """It wants of every turn what a crowded machine may take from one, so it has some runs to show it."""
    for _ in range(RUNS):
        REPORT.unlink(missing_ok=True)
        ended = run_demo(operator)
        if ended.returncode == 0:
            break

    said = ended.stdout + ended.stderr
    assert ended.returncode == 0, said
    assert "curl " in said
    first, *later = json.loads(REPORT.read_text())["turns"]
    assert len(later) >= 3
    assert all(turn["answer_tokens"] >= LEAST_ANSWER_TOKENS for turn in (first, *later))
    assert all(turn["d_written_back"] > 0 and turn["p_hit"] > 0 for turn in later)


def run_demo(operator: Stack) -> "subprocess.CompletedProcess[str]":
    try:
        return subprocess.run(
            [sys.executable, "-m", "e2e.demo", "--keep"],
            cwd=REPOSITORY,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=RUN_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        said = b"".join(part for part in (error.stdout, error.stderr) if part)  # bytes, whatever `text` says
        pytest.fail(f"The demo is not over after {RUN_SECONDS} s; it said:\n{said.decode(errors='replace')}")
    finally:
        Inference(operator.cluster, NAME).delete()
