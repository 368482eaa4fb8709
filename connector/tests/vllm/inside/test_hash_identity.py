"""What vLLM puts into a block's hash: all that makes the same tokens have other KV."""

from __future__ import annotations

from typing import Any

import pytest
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.request import Request

from disagg_connector.compat import load

BLOCK = 16
TOKENS = [7] * 40
compat = load()


@pytest.fixture(autouse=True)
def hash_seed() -> None:
    kv_cache_utils.init_none_hash(get_hash_fn_by_name("sha256"))


def identity(tokens: list[int] = TOKENS, **options: Any) -> tuple[list[bytes], bytes]:
    """Hashes of the full blocks and the digest of a prompt."""
    hasher = kv_cache_utils.get_request_block_hasher(BLOCK, get_hash_fn_by_name("sha256"))
    made = Request("r", tokens, SamplingParams(max_tokens=4), None, block_hasher=hasher, **options)
    view = compat.EngineRequest(made, BLOCK)
    return list(view.hashes), view.prompt_digest()


def picture(name: str, start: int, length: int) -> MultiModalFeatureSpec:
    return MultiModalFeatureSpec(
        data=None,
        modality="image",
        identifier=name,
        mm_position=PlaceholderRange(offset=start, length=length),
        mm_hash=name,
    )


def test_a_hash_is_32_bytes_and_the_same_again() -> None:
    hashes, digest = identity()
    assert [len(block_hash) for block_hash in hashes] == [32, 32]
    assert identity() == (hashes, digest)


def test_a_hash_covers_the_whole_prefix() -> None:
    hashes, _ = identity()
    others, _ = identity([8, *TOKENS[1:]])
    assert not set(hashes) & set(others)
    assert identity([*TOKENS[:-1], 8])[0] == hashes, "the partial block has no hash"


def test_salts_are_in_hashes_and_digest() -> None:
    seen = [identity(), identity(cache_salt="a"), identity(cache_salt="b")]
    assert len({block_hash for hashes, _ in seen for block_hash in hashes}) == 6
    assert len({digest for _, digest in seen}) == 3


def test_lora_names_are_in_hashes_and_digest() -> None:
    plain, one = identity(), identity(lora_request=LoRARequest("one", 1, "/one"))
    other = identity(lora_request=LoRARequest("other", 2, "/other"))
    assert len({block_hash for hashes, _ in (plain, one, other) for block_hash in hashes}) == 6
    assert len({plain[1], one[1], other[1]}) == 3


@pytest.mark.parametrize("start", [2, 20, 33])
def test_multimodal_inputs_are_in_hashes_and_digest(start: int) -> None:
    """`start` is in the first block, the second, and the partial one, which the digest alone covers."""
    cat, dog = (identity(mm_features=[picture(name, start, 5)]) for name in ("cat", "dog"))
    same = start // BLOCK
    assert cat[0][:same] == dog[0][:same]
    assert not set(cat[0][same:]) & set(dog[0][same:])
    assert cat[1] != dog[1]


def test_a_picture_over_a_block_boundary_is_in_both_blocks() -> None:
    cat, dog = (identity(mm_features=[picture(name, 14, 4)]) for name in ("cat", "dog"))
    assert not set(cat[0]) & set(dog[0])


def test_two_pictures_in_one_prompt_are_told_apart() -> None:
    one = identity(mm_features=[picture("cat", 2, 4), picture("dog", 34, 4)])
    other = identity(mm_features=[picture("cat", 2, 4), picture("cow", 34, 4)])
    assert one[0] == other[0]
    assert one[1] != other[1], "the second is in the partial block"
