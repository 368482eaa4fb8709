"""vLLM's own configuration objects, as an engine with the connector has them."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from vllm.engine.arg_utils import EngineArgs

from connector.tests.vllm.stepped import Engine, running

BLOCK = 32


_made: dict[str, bytes] = {}


@pytest.fixture(scope="session")
def make_config() -> Callable[..., Any]:
    """Makes a `VllmConfig` of `EngineArgs`; `transfer` is laid over what the operator renders."""

    def make(transfer: dict[str, Any] | None = None, **arguments: Any) -> Any:
        rendered = {
            "kv_connector": "BidirectionalPushConnector",
            "kv_connector_module_path": "disagg_connector.connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"role": "decode"},
            **(transfer or {}),
        }
        plain = {"model": os.environ["DISAGG_TEST_MODEL"], "dtype": "float32", "block_size": BLOCK}
        whole = {**plain, "max_model_len": 512, "kv_transfer_config": rendered, **arguments}
        key = json.dumps(whole)
        if key not in _made:  # making one takes a second
            _made[key] = pickle.dumps(EngineArgs(**whole).create_engine_config())
        return pickle.loads(_made[key])

    return make


@pytest.fixture
def engine() -> Iterator[Engine]:
    """A decode engine's scheduler with the connector, to be stepped by hand."""
    with running() as made:
        yield made
