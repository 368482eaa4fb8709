"""Checksums of KV blocks where they lie: torch only, on CPU or a GPU, any dtype, any layout of the cache.

A checksum is of one block's raw bytes of every layer, K and V, for one KV head. It is a linear hash over 64-bit words
with odd weights, so it changes for certain with any single changed byte, and but for chances of about 2^-64 with
anything else: bytes, tokens, heads, layers or blocks exchanged among each other included. It is computed where the
cache is, and only 8 bytes a block and head leave the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

# Odd constants of splitmix64 and of Knuth's MMIX generator, as signed 64-bit integers; products wrap around.
_GOLDEN = -7046029254386353131
_MIX = -4658895280553007687
_LAYER = 6364136223846793005


class Checksums:
    """Computes checksums of blocks of one rank's KV cache, and can change what lies in it.

    `kv_caches` is what vLLM hands to a connector: per layer a view [blocks, heads, tokens, content], or without the
    heads for MLA. `num_blocks` is the number of the scheduler's blocks; a kernel's may be smaller, and are then several
    to one of the scheduler's.
    """

    def __init__(self, kv_caches: Mapping[str, torch.Tensor], num_blocks: int) -> None:
        caches = [kv_caches[name] for name in sorted(kv_caches)]
        if any(cache.ndim not in (3, 4) for cache in caches):
            raise ValueError("checksums need caches of blocks, heads, tokens and content, in this order")
        self._layers = [cache.view(torch.uint8) for cache in caches]
        self._ratio = self._layers[0].shape[0] // num_blocks
        self._weights: dict[int, torch.Tensor] = {}
        # Looks at the memory as it is now: behind the kernels that the engine has launched it would wait for them.
        on_gpu = self._layers[0].is_cuda
        self._stream = torch.cuda.Stream(self._layers[0].device) if on_gpu else None

    def of(self, blocks: Sequence[int]) -> list[list[int]]:
        """The checksums of some blocks, for each of this rank's heads."""
        if self._stream is None:
            return self._of(blocks)
        with torch.cuda.stream(self._stream):
            return self._of(blocks)

    def flip(self, block: int) -> None:
        """Change one bit in the middle of the first layer's part of a block."""
        cache = self._layers[0]
        page = cache[block * self._ratio].contiguous()
        changed = page.flatten()
        changed[changed.numel() // 2] ^= 1
        cache[block * self._ratio] = changed.view(page.shape)
        if cache.is_cuda:
            torch.cuda.synchronize(cache.device)

    def _of(self, blocks: Sequence[int]) -> list[list[int]]:
        pages = [block * self._ratio + part for block in blocks for part in range(self._ratio)]
        index = torch.tensor(pages, device=self._layers[0].device)
        total: torch.Tensor | None = None
        for cache in self._layers:
            own = self._of_layer(cache.index_select(0, index))
            total = own if total is None else total * _LAYER + own
        assert total is not None
        found: list[list[int]] = total.cpu().tolist()
        return found

    def _of_layer(self, pages: torch.Tensor) -> torch.Tensor:
        """[pages, heads, ...] -> [blocks, heads]."""
        heads = pages.shape[1] if pages.ndim == 4 else 1
        words = pages.contiguous().view(pages.shape[0], heads, -1).view(torch.int64)
        weights = self._weights_for(words.shape[2] * self._ratio, words.device)
        weights = weights.view(self._ratio, 1, -1)
        per_page = words.view(-1, self._ratio, heads, words.shape[2]) * weights
        return per_page.sum(dim=(1, 3))

    def _weights_for(self, count: int, device: torch.device) -> torch.Tensor:
        if count not in self._weights:
            mixed = torch.arange(1, count + 1, dtype=torch.int64, device=device) * _GOLDEN
            mixed = (mixed ^ (mixed >> 31)) * _MIX
            self._weights[count] = (mixed ^ (mixed >> 29)) | 1
        return self._weights[count]
