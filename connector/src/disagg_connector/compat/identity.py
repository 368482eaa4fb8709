"""Who this engine is to its peers: addresses, the parts of its fingerprint, how its KV cache is spread over ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import vllm
from huggingface_hub import try_to_load_from_cache
from vllm import envs
from vllm.v1.core import kv_cache_utils

import disagg_connector
from disagg_connector.checkpoint import Checkpoint
from disagg_connector.checkpoint import read_checkpoint as scan_checkpoint
from disagg_connector.config import ConnectorConfig
from disagg_connector.hashes import Fingerprint
from disagg_connector.protocol import WIRE_VERSION, Address, Peer
from disagg_connector.ranks import Sharding

# Ways to draft without attention layers: nothing of theirs lies in the KV cache, so prefill need not draft alike.
_DRAFTS_WITHOUT_KV = frozenset({"ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator"})


def own_address(vllm_config: Any, config: ConnectorConfig) -> Address:
    """Where this engine's control channel listens."""
    rank = vllm_config.parallel_config.data_parallel_index
    return Address(envs.VLLM_NIXL_SIDE_CHANNEL_HOST, config.control_port + rank)


def own_peer(vllm_config: Any, address: Address, fingerprint: str) -> Peer:
    """What peers must know of this engine."""
    parallel = vllm_config.parallel_config
    return Peer(
        vllm_config.kv_transfer_config.engine_id,
        address,
        envs.VLLM_NIXL_SIDE_CHANNEL_HOST,
        envs.VLLM_NIXL_SIDE_CHANNEL_PORT + parallel.data_parallel_index,
        parallel.tensor_parallel_size,
        fingerprint,
        events=bool(vllm_config.kv_events_config and vllm_config.kv_events_config.enable_kv_cache_events),
    )


def kv_heads(vllm_config: Any) -> int:
    """KV heads of the model; 1 for multi-head latent attention, whose latent is whole on every rank."""
    model = vllm_config.model_config
    return 1 if model.use_mla else int(model.get_total_num_kv_heads())


def sharding(vllm_config: Any) -> Sharding:
    """How this engine's KV cache is spread over its ranks. Known when its layout is, with the block pool."""
    layout = vllm_config.cache_config.get_resolved_kv_cache_layout()
    return Sharding(vllm_config.parallel_config.world_size, kv_heads(vllm_config), layout.is_block_contiguous)


def fingerprint(vllm_config: Any, checkpoint: Checkpoint) -> Fingerprint | None:
    """None until vLLM has initialised its hash seed, which is after the connector's construction."""
    none_hash = getattr(kv_cache_utils, "NONE_HASH", None)
    if none_hash is None:
        return None
    model, cache = vllm_config.model_config, vllm_config.cache_config
    return Fingerprint(
        model=str(model.model),
        revision=str(getattr(model.hf_config, "_commit_hash", None) or model.revision),
        weights=checkpoint.weights,
        dtype=str(model.dtype),
        kv_dtype=" but for layers ".join([str(cache.cache_dtype), *cache.kv_cache_dtype_skip_layers]),
        kv_scales=checkpoint.kv_scales,
        quantization=str(model.quantization),
        rope=_rope(model.hf_text_config),
        draft=_draft(vllm_config.speculative_config),
        block_size=cache.block_size,
        hash_algorithm=str(cache.prefix_caching_hash_algo),
        none_hash=none_hash.hex(),
        kv_layout=str(cache.kv_cache_layout),
        vllm=vllm.__version__,
        connector=disagg_connector.__version__,
        wire=WIRE_VERSION,
    )


def read_checkpoint(vllm_config: Any) -> Checkpoint:
    """Look at the model's files, in their folder or in the Hub's cache; nothing is known of others."""
    model = vllm_config.model_config
    folder = Path(str(model.model))
    if not folder.is_dir():
        config = try_to_load_from_cache(
            str(model.model), "config.json", vllm_config.load_config.download_dir, model.revision
        )
        if not isinstance(config, str):
            return Checkpoint()
        folder = Path(config).parent
    return scan_checkpoint(folder)


def _rope(hf_config: Any) -> str:
    names = ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor")
    known = {name: getattr(hf_config, name, None) for name in names}
    return json.dumps({k: v for k, v in known.items() if v is not None}, sort_keys=True, default=str)


def _draft(speculative: Any) -> str:
    if speculative is None or speculative.method in _DRAFTS_WITHOUT_KV:
        return ""
    draft = speculative.draft_model_config
    model = f"{draft.model}:{draft.revision}" if draft is not None else ""
    return f"{speculative.method}:{model}"
