from __future__ import annotations

from typing import Any

import pytest

from disagg_connector.compat import module_for
from disagg_connector.config import ConfigError, check_reserve, parse_config


def test_defaults_are_those_of_the_documentation() -> None:
    config = parse_config({"role": "prefill"})
    assert (config.control_port, config.kv_lease_duration, config.writeback_mode) == (5700, 30, "on_finish")
    assert (config.writeback_min_free_percent, config.writeback_reserve_blocks) == (10, 0)
    assert config.writeback_batch_blocks == 4
    assert (config.max_wait, config.load_timeout_seconds) == (1.0, 60)


def test_upstreams_own_keys_pass_through() -> None:
    parse_config({"role": "decode", "backends": ["LIBFABRIC"], "num_threads": 2, "kv_lease_duration": 120})


@pytest.mark.parametrize(
    ("extra", "names"),
    [
        ({}, "role"),
        ({"role": "both"}, "role"),
        ({"role": "prefill", "writeback_min_free": 3}, "writeback_min_free"),
        ({"role": "prefill", "control_port": "5700"}, "control_port"),
        ({"role": "prefill", "control_port": 70000}, "control_port"),
        ({"role": "prefill", "writeback_min_free_percent": 101}, "writeback_min_free_percent"),
        ({"role": "prefill", "load_timeout_seconds": 0}, "load_timeout_seconds"),
        ({"role": "prefill", "writeback_mode": "stream"}, "writeback_mode"),
        ({"role": "decode", "writeback_batch_blocks": 0}, "writeback_batch_blocks"),
    ],
)
def test_a_wrong_key_is_named(extra: dict[str, Any], names: str) -> None:
    with pytest.raises(ConfigError, match=names):
        parse_config(extra)


def test_a_reserve_that_leaves_no_room_for_the_longest_request_is_refused() -> None:
    prefill = parse_config({"role": "prefill", "writeback_reserve_blocks": 5})
    check_reserve(prefill, total=15, longest=10)
    with pytest.raises(ConfigError, match="Set at most 4"):
        check_reserve(prefill, total=14, longest=10)
    check_reserve(parse_config({"role": "decode", "writeback_reserve_blocks": 5}), total=14, longest=10)
    check_reserve(parse_config({"role": "prefill"}), total=5, longest=10)


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1", "0.32.0+cpu", "0.32.0rc1"])
def test_known_versions_of_vllm_are_taken(version: str) -> None:
    assert module_for(version) == "v0_32"
    assert module_for(version.replace("0.32", "0.33", 1)) == "v0_33"


@pytest.mark.parametrize("version", ["0.31.0", "0.34.0", "0.320.0", "1.0", "dev", ""])
def test_unknown_versions_of_vllm_are_refused_with_the_known_ones(version: str) -> None:
    with pytest.raises(ConfigError, match=r"0\.32\.x, 0\.33\.x"):
        module_for(version)
