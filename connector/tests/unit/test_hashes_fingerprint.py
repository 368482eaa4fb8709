from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg_connector.hashes import (
    Fingerprint,
    blocks_for,
    differences,
    first_missing,
    full_blocks,
)

BASE = Fingerprint(
    model="m", revision="r", weights="w", dtype="bf16", kv_dtype="auto", kv_scales="",
    quantization="None", rope="{}", draft="", block_size=16, hash_algorithm="sha256",
    none_hash="00", kv_layout="LBHNC", vllm="0.32.0", connector="0.1.0", wire=1,
)  # fmt: skip


@pytest.mark.parametrize("field", Fingerprint.__struct_fields__)
def test_every_part_changes_the_digest(field: str) -> None:
    value: Any = getattr(BASE, field)
    other = msgspec.structs.replace(BASE, **{field: value + 1 if isinstance(value, int) else value + "x"})
    assert other.digest() != BASE.digest()
    assert field in differences(BASE.parts(), other.parts())


def test_differences_name_both_sides() -> None:
    other = msgspec.structs.replace(BASE, dtype="fp16")
    assert differences(BASE.parts(), other.parts()) == "dtype: 'bf16' here, 'fp16' there"
    assert differences(BASE.parts(), BASE.parts()) == ""


@given(st.lists(st.booleans(), max_size=30), st.integers(0, 30))
def test_first_missing_is_the_first_from_start_on(held: list[bool], start: int) -> None:
    chain = [bytes([i]) for i in range(len(held))]
    found = first_missing(chain, lambda h: held[h[0]], min(start, len(held)))
    assert all(held[min(start, len(held)) : found])
    assert found == len(held) or not held[found]


@given(st.integers(0, 10_000), st.integers(1, 128))
def test_blocks_hold_their_tokens(tokens: int, size: int) -> None:
    assert (blocks_for(tokens, size) - 1) * size < tokens <= blocks_for(tokens, size) * size or tokens == 0
    assert full_blocks(tokens, size) * size <= tokens < (full_blocks(tokens, size) + 1) * size
