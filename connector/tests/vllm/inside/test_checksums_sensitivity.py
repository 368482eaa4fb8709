"""The checksums of the engine tests: they show every fault that matters, and nothing but the content counts."""

from __future__ import annotations

import pytest
import torch

from connector.tests.engine.checking import heads_of_rank
from connector.tests.engine.checksums import Checksums

BLOCKS, HEADS, TOKENS, CONTENT = 16, 4, 32, 24


def cache(dtype: torch.dtype = torch.float32, seed: int = 0) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    shape = (BLOCKS, HEADS, TOKENS, CONTENT)
    return {f"layer{i}": torch.randn(shape, generator=random).to(dtype) for i in range(3)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_one_bit_in_one_block_shows_in_that_block_alone(dtype: torch.dtype) -> None:
    checksums = Checksums(cache(dtype), BLOCKS)
    before = checksums.of([3, 5])
    checksums.flip(5)
    after = checksums.of([3, 5])
    assert after[0] == before[0]
    assert sum(old != new for old, new in zip(before[1], after[1], strict=True)) == 1


def test_what_attention_does_not_see_shows() -> None:
    kv = cache()
    before = Checksums(kv, BLOCKS).of([1])
    swapped = {name: tensor.clone() for name, tensor in kv.items()}
    swapped["layer1"][1, :, [0, 1]] = kv["layer1"][1, :, [1, 0]]
    assert all(a != b for a, b in zip(before[0], Checksums(swapped, BLOCKS).of([1])[0], strict=True))
    layers = dict(zip(("layer1", "layer0", "layer2"), kv.values(), strict=True))
    assert all(a != b for a, b in zip(before[0], Checksums(layers, BLOCKS).of([1])[0], strict=True))


def test_the_layout_in_memory_does_not_matter() -> None:
    kv = cache()
    tokens_first = {name: tensor.transpose(1, 2).contiguous().transpose(1, 2) for name, tensor in kv.items()}
    assert Checksums(tokens_first, BLOCKS).of([2, 9]) == Checksums(kv, BLOCKS).of([2, 9])


def test_a_rank_has_the_checksums_of_its_heads() -> None:
    kv = cache()
    whole = Checksums(kv, BLOCKS).of([4])[0]
    for rank in range(2):
        heads = heads_of_rank(HEADS, rank, 2)
        part = {name: tensor[:, heads].contiguous() for name, tensor in kv.items()}
        assert Checksums(part, BLOCKS).of([4])[0] == [whole[head] for head in heads]
    assert [heads_of_rank(2, rank, 4) for rank in range(4)] == [[0], [0], [1], [1]]


def test_blocks_may_be_several_of_a_kernels_and_without_heads() -> None:
    kv = {name: tensor[:, 0] for name, tensor in cache().items()}
    checksums = Checksums(kv, BLOCKS // 2)
    before = checksums.of([1, 2])
    checksums.flip(2)
    after = checksums.of([1, 2])
    assert after[0] == before[0]
    assert after[1] != before[1]
