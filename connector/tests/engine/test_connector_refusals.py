"""An engine that must not run the connector says why and does not start."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from connector.tests.engine.conversation import spec
from e2e.engines import Engine
from e2e.images.engine_bundle import EngineError

pytestmark = pytest.mark.engine


def test_a_wrong_setting_stops_the_engine_with_its_reason(model: Path, tmp_path: Path) -> None:
    wrong = {
        "key": (spec("prefill", model, writeback_minimum=3), "writeback_minimum"),
        "cache": (
            replace(spec("prefill", model), extra_args=("--no-enable-prefix-caching",)),
            "prefix caching is off",
        ),
        "data": (
            replace(spec("decode", model), extra_args=("--data-parallel-size", "2")),
            "data parallelism is not supported",
        ),
    }
    for name, (engine_spec, reason) in wrong.items():
        with Engine(engine_spec, name, tmp_path) as engine:
            with pytest.raises(EngineError, match="exited"):
                engine.wait_ready()
            assert reason in engine.log.read_text()
