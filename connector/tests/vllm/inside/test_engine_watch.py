"""What is done to vLLM's engine is noticed, in vLLM's own methods."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine.core import EngineCore

from disagg_connector.compat import load

compat = load()


class Lifecycle:
    """Writes down what it is told, and what the workers are."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *args: self.told.append(" ".join([name, *map(str, args)]))


class Engine(EngineCore):  # type: ignore[misc]
    """As much of an engine as the methods need; it is watched while it is constructed, as a real one is."""

    def __init__(self, lifecycle: Lifecycle) -> None:
        def call_workers(method: Any, *args: Any) -> list[None]:
            lifecycle.told.append(f"workers: {method if isinstance(method, str) else 'a function'}")
            if method == "broken":
                raise RuntimeError(method)
            return [None]

        self._weight_version = "default"
        self.model_executor = SimpleNamespace(
            collective_rpc=call_workers, is_sleeping=False, sleep=lambda level: None, wake_up=lambda tags: None,
            reset_mm_cache=lambda: None, reset_encoder_cache=lambda: None,
        )  # fmt: skip
        self.scheduler = SimpleNamespace(
            finish_requests=lambda *args: [], pause_state=PauseState.UNPAUSED,
            set_pause_state=lambda state: lifecycle.told.append(state.name),
            reset_prefix_cache=lambda *args: True, has_unfinished_requests=lambda: False,
            reset_encoder_cache=lambda: None, get_kv_connector=lambda: None,
        )  # fmt: skip
        self.mm_receiver_cache = None
        assert self.construct_a_connector(lifecycle)

    def construct_a_connector(self, lifecycle: Lifecycle) -> bool:
        return bool(compat.watch_engine(lifecycle))

    def __del__(self) -> None: ...


@pytest.fixture
def lifecycle() -> Lifecycle:
    return Lifecycle()


@pytest.fixture
def engine(lifecycle: Lifecycle) -> Engine:
    return Engine(lifecycle)


def test_an_update_of_weights_is_one_change_however_many_pieces_it_has(
    engine: Engine, lifecycle: Lifecycle
) -> None:
    engine.collective_rpc("start_weight_update")
    engine.collective_rpc("update_weights", kwargs={"update_info": {}})
    engine.collective_rpc("update_weights", kwargs={"update_info": {}})
    engine.collective_rpc("finish_weight_update")
    engine.set_weight_version("step-3")
    assert lifecycle.told == [
        "changing_weights", "workers: start_weight_update", "workers: update_weights", "workers: update_weights",
        "workers: finish_weight_update", "changed_weights", "named_weights step-3",
    ]  # fmt: skip
    assert engine.get_weight_version() == "step-3"


@pytest.mark.parametrize("method", ["reload_weights", "a_method_of_somebodys_worker", lambda worker: None])
def test_whatever_may_change_weights_counts_as_a_change(
    engine: Engine, lifecycle: Lifecycle, method: Any
) -> None:
    assert engine.collective_rpc(method) == [None]
    assert lifecycle.told[0] == "changing_weights"
    assert lifecycle.told[2:] == ["changed_weights"]


def test_what_only_looks_is_no_change(engine: Engine, lifecycle: Lifecycle) -> None:
    engine.compute_weight_checksums()
    engine.collective_rpc("init_weight_transfer_engine")
    assert not [told for told in lifecycle.told if "weights" in told.split(":")[0]]


def test_a_change_that_fails_is_not_over(engine: Engine, lifecycle: Lifecycle) -> None:
    with pytest.raises(RuntimeError, match="broken"):
        engine.collective_rpc("broken")
    assert lifecycle.told == ["changing_weights", "workers: broken"]


def test_pause_and_resume_are_told_before_and_after(engine: Engine, lifecycle: Lifecycle) -> None:
    engine.pause_scheduler("abort", True)
    engine.resume_scheduler()
    told = [told for told in lifecycle.told if not told.startswith("workers")]
    assert told == ["pausing", "PAUSED_NEW", "UNPAUSED", "resumed"]


def test_a_pause_that_keeps_the_cache_is_none_of_ours(engine: Engine, lifecycle: Lifecycle) -> None:
    engine.pause_scheduler(mode="keep", clear_cache=False)
    assert "pausing" not in lifecycle.told


def test_sleep_is_a_pause_and_waking_up_its_end(engine: Engine, lifecycle: Lifecycle) -> None:
    engine.sleep(1)
    assert lifecycle.told[0] == "pausing"
    assert engine.wake_up()
    assert lifecycle.told[-1] == "resumed"


def test_without_an_engine_nothing_is_watched(lifecycle: Lifecycle) -> None:
    assert not compat.watch_engine(lifecycle)
