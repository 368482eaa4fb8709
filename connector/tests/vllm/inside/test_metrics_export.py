"""Counters come out on /metrics under the names of docs/wire-contract.md."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from prometheus_client import REGISTRY, Counter, Gauge, Histogram

from disagg_connector.counters import DEFINITIONS, QUARANTINED, Counters
from disagg_connector.metrics import PushMetrics, PushStats

LABELS = {"model_name": "m", "engine": "0"}


@pytest.fixture(scope="module")
def metrics() -> PushMetrics:
    config: Any = SimpleNamespace(kv_transfer_config=None)
    kinds: Any = {Gauge: Gauge, Counter: Counter, Histogram: Histogram}
    return PushMetrics(config, kinds, ["model_name", "engine"], {0: ["m", "0"], 1: ["m", "1"]})


def value(name: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(name, {**LABELS, **labels})


def test_known_series_exist_from_the_start(metrics: PushMetrics) -> None:
    assert value("disagg_kv_push_tokens_total", direction="decode_to_prefill") == 0
    assert value("disagg_kv_writeback_offers_total", result="granted") == 0
    assert value("disagg_kv_writeback_inserted_tokens_total") == 0
    assert value("disagg_kv_blocks_quarantined") == 0


def test_counts_of_a_step_are_added_and_the_gauge_is_set(metrics: PushMetrics) -> None:
    counters = Counters()
    for name, definition in DEFINITIONS.items():
        label = definition.values[0] if definition.values else "x" * bool(definition.label)
        if definition.kind == "counter":
            counters.add(name, 5, label)
        elif definition.kind == "histogram":
            counters.observe(name, 0.03, label)
    counters.watch(QUARANTINED, lambda: 7)
    stats = PushStats.of(counters.drain())
    assert stats is not None
    for _ in range(2):
        metrics.observe(stats.to_dict(), 0)
    assert value("disagg_kv_push_tokens_total", direction="prefill_to_decode") == 10
    assert value("disagg_kv_recomputed_requests_total", reason="x") == 10
    assert value("disagg_kv_writeback_inserted_tokens_total") == 10
    assert value("disagg_kv_blocks_quarantined") == 7
    assert value("disagg_kv_grant_seconds_count") == 2
    assert value("disagg_kv_write_seconds_sum", direction="prefill_to_decode") == pytest.approx(0.06)
    assert value("disagg_kv_write_seconds_bucket", direction="prefill_to_decode", le="0.025") == 0
    assert value("disagg_kv_write_seconds_bucket", direction="prefill_to_decode", le="0.05") == 2


def test_exactly_the_defined_names_are_exported(metrics: PushMetrics) -> None:
    """docs/wire-contract.md names these; e2e/contract holds the two together."""
    families = {
        family.name: family.type for family in REGISTRY.collect() if family.name.startswith("disagg_")
    }
    assert families == {name: definition.kind for name, definition in DEFINITIONS.items()}
    for family in REGISTRY.collect():
        if family.name in DEFINITIONS:
            assert family.documentation == DEFINITIONS[family.name].help


def test_the_gauge_comes_down_again(metrics: PushMetrics) -> None:
    counters = Counters()
    held = [3]
    counters.watch(QUARANTINED, lambda: held[0])
    counters.drain()
    held[0] = 0
    stats = PushStats.of(counters.drain())
    assert stats is not None
    metrics.observe(stats.to_dict(), 0)
    assert value("disagg_kv_blocks_quarantined") == 0


def test_data_parallel_engines_show_under_their_own_label(metrics: PushMetrics) -> None:
    name = "disagg_kv_ondemand_tokens_total"
    before = value(name)
    stats = PushStats.of({"disagg_kv_ondemand_tokens": {"": 16}})
    assert stats is not None
    metrics.observe(stats.to_dict(), 1)
    assert value(name, engine="1") == 16
    assert value(name) == before


def test_nothing_to_tell_is_nothing() -> None:
    assert PushStats.of(Counters().drain()) is None


def test_what_is_told_survives_the_way_to_the_api_server() -> None:
    """vLLM packs it with msgspec, and an engine may be idle for long before the next step."""
    counters = Counters()
    counters.observe("disagg_kv_grant_seconds", 0.5)
    counters.add("disagg_kv_ondemand_tokens", 32)
    stats = PushStats.of(counters.drain())
    assert stats is not None
    packed = msgspec.msgpack.decode(msgspec.msgpack.encode(stats.to_dict()))
    assert packed == {
        "disagg": {"disagg_kv_ondemand_tokens": {"": 32}, "disagg_kv_grant_seconds": {"": [0.5]}}
    }
    assert PushStats(packed).reduce() == {"ondemand_tokens": 32, "grant_seconds.mean": 0.5}


def test_ranks_and_scheduler_are_merged() -> None:
    one = PushStats.of(
        {"disagg_kv_push_tokens": {"prefill_to_decode": 3}, "disagg_kv_grant_seconds": {"": [0.1]}}
    )
    two = PushStats.of(
        {
            "disagg_kv_push_tokens": {"prefill_to_decode": 4, "decode_to_prefill": 1},
            "disagg_kv_grant_seconds": {"": [0.2, 0.3]},
        }
    )
    assert one is not None
    assert two is not None
    merged = one.aggregate(two)
    assert merged.reduce() == {
        "push_tokens.prefill_to_decode": 7,
        "push_tokens.decode_to_prefill": 1,
        "grant_seconds.mean": pytest.approx(0.2),
    }


def test_upstreams_own_statistics_travel_along() -> None:
    from disagg_connector.compat import load

    nixl = load().NixlStats()
    nixl.record_failed_transfer()
    stats = PushStats.of({}, nixl)
    assert stats is not None
    other = PushStats.of({}, nixl)
    assert other is not None
    assert len(stats.aggregate(other).data["nixl"]["num_failed_transfers"]) == 2
