"""Real engines for the connector's tests: prefill, decode, and a plain one to compare with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from connector.tests.engine import report
from connector.tests.engine.conversation import spec
from connector.tests.engine.evidence import Evidence
from e2e.engines import Engine, EngineSpec, running, running_all
from e2e.images.engine import ensure_model

# The plain engine has room for everything, so that nothing is ever evicted there.
REFERENCE_BLOCKS = 1024


@pytest.fixture(scope="session")
def model() -> Path:
    return ensure_model("tiny-qwen3")


@pytest.fixture(scope="package")
def plain(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """An engine without the connector: what it says is right."""
    made = EngineSpec(model=model, kv_blocks=REFERENCE_BLOCKS)
    with running(made, "plain", tmp_path_factory.mktemp("plain")) as engine:
        yield engine


@pytest.fixture(scope="package")
def engines(
    model: Path, plain: Engine, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Engine]]:
    """`prefill`, `decode` and `reference`: started once, since that takes longer than most tests.

    What kills engines (test_connector_losses) comes after what talks with them (test_connector_conversations).
    """
    specs = {
        "prefill": spec("prefill", model, kv_lease_duration=20, max_wait_milliseconds=15_000),
        "decode": spec("decode", model, kv_lease_duration=20),
    }
    with running_all(specs, folder=tmp_path_factory.mktemp("engines")) as ready:
        yield {**ready, "reference": plain}


@pytest.fixture(scope="session")
def evidence(request: pytest.FixtureRequest) -> Evidence:
    """What the tests count into; the run's own if it is summed up (`report`)."""
    return request.config.stash.get(report.EVIDENCE, Evidence())
