"""What an engine must not start with, on vLLM's own configuration objects. Each has a line in docs/support-matrix.md."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1 import kv_cache_interface as kv
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

from disagg_connector.compat import load, refusals
from disagg_connector.config import ConfigError
from disagg_connector.connector import BidirectionalPushConnector

compat = load()
SHAPE: dict[str, Any] = {"block_size": 32, "num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}
FULL = FullAttentionSpec(**SHAPE)
MAMBA = kv.MambaSpec(block_size=32, shapes=((4, 4),), dtypes=(torch.float32,))

MakeConfig = Callable[..., Any]


def caches(*specs: Any) -> KVCacheConfig:
    groups = [KVCacheGroupSpec([f"layer.{index}"], spec) for index, spec in enumerate(specs)]
    return KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups)


def why(config: Any, *specs: Any) -> str:
    """Why the engine is refused. Fails if it is not."""
    with pytest.raises(ConfigError) as refusal:
        compat.check_engine(config, caches(*(specs or (FULL,))))
    return str(refusal.value)


# --- Taken ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"enable_lora": True},
        {"async_scheduling": True},
        {"max_num_batched_tokens": 64, "max_num_seqs": 4},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}},
    ],
    ids=["plain", "lora", "async", "chunked-prefill", "ngram"],
)
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_what_is_supported_is_taken(make_config: MakeConfig, role: str, options: dict[str, Any]) -> None:
    compat.check_engine(make_config({"kv_connector_extra_config": {"role": role}}, **options), caches(FULL))


def test_latent_attention_is_taken(make_config: MakeConfig) -> None:
    latent = kv.MLAAttentionSpec(block_size=32, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
    compat.check_engine(make_config(), caches(latent))


# --- Transfer -------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
def test_a_one_sided_role_is_refused(make_config: MakeConfig, role: str) -> None:
    assert "set 'kv_both'" in why(make_config({"kv_role": role}))


def test_failing_requests_for_a_lost_transfer_is_refused(make_config: MakeConfig) -> None:
    assert "'recompute'" in why(make_config({"kv_load_failure_policy": "fail"}))


def test_staging_through_host_memory_is_refused(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config({"kv_buffer_device": "cpu"})
    compat.check_engine(config, caches(FULL))
    monkeypatch.setattr(refusals, "current_platform", SimpleNamespace(device_type="cuda"))
    assert "kv_buffer_device" in why(config)


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"role": "decode", "writeback_minimum": 3}, "writeback_minimum"),
        ({"role": "decode", "enable_cross_layers_blocks": "True"}, "enable_cross_layers_blocks"),
        ({"role": "both"}, "role"),
        ({}, "role"),
    ],
)
def test_an_unknown_or_missing_setting_is_refused(
    make_config: MakeConfig, extra: dict[str, Any], named: str
) -> None:
    config = make_config({"kv_connector_extra_config": extra})
    with pytest.raises(ConfigError, match=named):
        BidirectionalPushConnector(config, KVConnectorRole.SCHEDULER, caches(FULL))


def test_another_vllm_is_refused_with_those_that_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "__version__", "0.34.0")
    with pytest.raises(ConfigError, match=re.escape("vLLM 0.34.0") + r".*0\.32\.x, 0\.33\.x"):
        load()


# --- Prefix cache ---------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_prefix_caching_off_is_refused_with_what_to_do(make_config: MakeConfig, role: str) -> None:
    config = make_config({"kv_connector_extra_config": {"role": role}}, enable_prefix_caching=False)
    reason = why(config)
    assert "write-back is refused" in reason
    assert "start without --no-enable-prefix-caching" in reason


@pytest.mark.parametrize("algorithm", ["sha256_cbor", "xxhash", "xxhash_cbor"])
def test_a_hash_other_than_sha256_is_refused(make_config: MakeConfig, algorithm: str) -> None:
    reason = why(make_config(prefix_caching_hash_algo=algorithm))
    assert "--prefix-caching-hash-algo sha256" in reason
    assert repr(algorithm) in reason


def test_hashes_finer_than_blocks_are_refused(make_config: MakeConfig) -> None:
    assert "prefix_match_unit is 16" in why(make_config(prefix_match_unit=16))


@pytest.mark.skipif(
    not hasattr(VllmConfig, "num_hash_lookahead_tokens"), reason="this vLLM has no such hashes"
)
def test_hashes_over_tokens_after_their_block_are_refused(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config()
    monkeypatch.setattr(VllmConfig, "num_hash_lookahead_tokens", 1)
    assert "disable_lookahead_block_hashes" in why(config)


@pytest.mark.skipif(
    not hasattr(VllmConfig, "num_hash_lookahead_tokens"), reason="this vLLM has no such hashes"
)
def test_vllm_itself_keeps_hashes_to_their_block_beside_a_connector(make_config: MakeConfig) -> None:
    config = make_config()
    config.speculative_config = drafting(modules=1)
    assert config.num_hash_lookahead_tokens == 0
    config.kv_transfer_config = None
    assert config.num_hash_lookahead_tokens == 1


# --- The model's cache ----------------------------------------------------------------------------

WINDOW = kv.SlidingWindowSpec(**SHAPE, sliding_window=64)


@pytest.mark.parametrize(
    "specs", [(FULL, WINDOW), (FULL, MAMBA), (FULL, FULL)], ids=["window", "mamba", "two"]
)
def test_several_kv_cache_groups_are_refused(make_config: MakeConfig, specs: tuple[Any, ...]) -> None:
    assert "2 KV cache groups" in why(make_config(), *specs)


def test_latent_attention_is_full_attention(make_config: MakeConfig) -> None:
    latent = kv.MLAAttentionSpec(block_size=32, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
    compat.check_engine(make_config(), caches(latent))


def test_a_model_without_kv_cache_is_refused(make_config: MakeConfig) -> None:
    with pytest.raises(ConfigError, match="0 KV cache groups"):
        compat.check_engine(make_config(), caches())


@pytest.mark.parametrize(
    "spec",
    [
        WINDOW,
        MAMBA,
        kv.ChunkedLocalAttentionSpec(**SHAPE, attention_chunk_size=64),
        kv.CrossAttentionSpec(**SHAPE),
        kv.SinkFullAttentionSpec(**SHAPE, sink_len=4),
        kv.UniformTypeKVCacheSpecs(block_size=32, kv_cache_specs={"layer": FULL}),
    ],
    ids=lambda spec: type(spec).__name__,
)
def test_anything_but_full_attention_is_refused(make_config: MakeConfig, spec: Any) -> None:
    assert f"KV cache is {type(spec).__name__}" in why(make_config(), spec)


@pytest.mark.parametrize("window", [{"sliding_window": 64}, {"attention_chunk_size": 64}])
def test_windows_kept_as_full_attention_are_refused(make_config: MakeConfig, window: dict[str, int]) -> None:
    assert "has not been tried" in why(make_config(), FullAttentionSpec(**SHAPE, **window))


# --- Memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["BLHNC", "BLNHC", "BHLNC", "LHBNC"])
def test_cross_layer_and_packed_layouts_are_refused(make_config: MakeConfig, layout: str) -> None:
    config = make_config()
    config.cache_config.kv_cache_layout = layout
    assert "unset VLLM_KV_CACHE_LAYOUT" in why(config)


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC"])
def test_layouts_of_whole_blocks_are_taken(make_config: MakeConfig, layout: str) -> None:
    config = make_config()
    config.cache_config.kv_cache_layout = layout
    compat.check_engine(config, caches(FULL))


def test_sleep_mode_is_refused(make_config: MakeConfig) -> None:
    config = make_config()
    config.model_config.enable_sleep_mode = True
    assert "start without --enable-sleep-mode" in why(config)
    assert not BidirectionalPushConnector.supports_sleep_mode(config.kv_transfer_config)


def test_a_cache_that_is_partly_in_host_memory_is_refused(make_config: MakeConfig) -> None:
    config = make_config()
    config.attention_config.hisparse_config = SimpleNamespace()
    assert "HiSparse" in why(config)


# --- Parallelism and drafting ---------------------------------------------------------------------


def test_pipeline_parallelism_is_refused(make_config: MakeConfig) -> None:
    assert "pipeline parallelism" in why(make_config(pipeline_parallel_size=2))


@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_context_parallelism_is_refused(make_config: MakeConfig, kind: str) -> None:
    config = make_config()
    # vLLM itself admits it for some models and devices only.
    setattr(config.parallel_config, f"{kind}_context_parallel_size", 2)
    assert f"{kind} context parallelism" in why(config)


def test_data_parallelism_is_refused(make_config: MakeConfig) -> None:
    config = make_config(data_parallel_size=2)
    assert "run more replicas" in why(config)
    config.parallel_config.reconfigure_for_independent_dp_rank()
    config.kv_transfer_config.engine_id += "_dp0"
    assert "run more replicas" in why(config), "what the first engine of a dense model sees of it"


def drafting(modules: int) -> Any:
    """A speculative configuration like EAGLE's (one module) or that of several MTP modules."""
    return SimpleNamespace(
        use_eagle=lambda: True,
        use_eagle_block_drop=lambda: True,
        use_multi_module_mtp=lambda: modules > 1,
        num_speculative_tokens=modules,
        disable_lookahead_block_hashes=False,
    )


def test_several_draft_modules_are_refused(make_config: MakeConfig) -> None:
    config = make_config()
    config.speculative_config = drafting(modules=3)
    assert "use one module" in why(config)
    config.speculative_config = drafting(modules=1)
    compat.check_engine(config, caches(FULL))


def test_returning_routed_experts_is_refused(make_config: MakeConfig) -> None:
    config = make_config()
    config.aux_output_config.enable_return_routed_experts = True
    assert "--enable-return-routed-experts" in why(config)


def test_every_reason_is_told_at_once(make_config: MakeConfig) -> None:
    reason = why(make_config(pipeline_parallel_size=2, enable_prefix_caching=False), FULL, WINDOW)
    assert all(part in reason for part in ("pipeline", "prefix caching", "2 KV cache groups"))
