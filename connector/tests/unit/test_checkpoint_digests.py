"""Checkpoints that differ have different digests."""

from __future__ import annotations

import json
import struct
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg_connector.checkpoint import SAMPLE_BYTES, SAMPLES, Checkpoint, read_checkpoint, sample_offsets


def safetensors(path: Path, tensors: dict[str, bytes]) -> None:
    header, data = {}, b""
    for name, content in tensors.items():
        header[name] = {"dtype": "F32", "shape": [], "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def scales(path: Path, value: float) -> Checkpoint:
    tensors = {"a.k_proj.weight": bytes(64), "a.attn.k_scale": struct.pack("<f", value)}
    safetensors(path / "model.safetensors", tensors)
    return read_checkpoint(path)


def test_a_folder_without_weights_has_no_digests(tmp_path: Path) -> None:
    assert read_checkpoint(tmp_path) == Checkpoint("", "")


def test_scales_of_the_kv_cache_are_told_apart(tmp_path: Path) -> None:
    one = scales(tmp_path, 0.5)
    assert one.kv_scales
    assert scales(tmp_path, 0.25).kv_scales != one.kv_scales
    assert scales(tmp_path, 0.5) == one
    safetensors(tmp_path / "model.safetensors", {"a.k_proj.weight": bytes(64)})
    assert read_checkpoint(tmp_path).kv_scales == ""


@pytest.mark.parametrize("position", [0, 1000, SAMPLE_BYTES * 3, -1])
def test_a_small_file_is_read_whole(tmp_path: Path, position: int) -> None:
    content = bytearray(SAMPLE_BYTES * 4)
    (tmp_path / "weights.bin").write_bytes(content)
    before = read_checkpoint(tmp_path)
    content[position] = 1
    (tmp_path / "weights.bin").write_bytes(content)
    assert read_checkpoint(tmp_path).weights != before.weights


def test_the_name_and_the_size_of_a_file_count(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"x")
    one = read_checkpoint(tmp_path).weights
    (tmp_path / "a.bin").rename(tmp_path / "b.bin")
    two = read_checkpoint(tmp_path).weights
    (tmp_path / "b.bin").write_bytes(b"xx")
    assert len({one, two, read_checkpoint(tmp_path).weights}) == 3


def test_a_file_that_cannot_be_read_is_equal_to_no_other(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "missing")
    assert read_checkpoint(tmp_path).weights != read_checkpoint(tmp_path).weights


def test_a_file_that_is_no_safetensors_file_has_no_scales(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 64)
    assert read_checkpoint(tmp_path).kv_scales == ""
    assert read_checkpoint(tmp_path).weights


@given(st.integers(0, 2**40))
def test_samples_are_spread_over_the_whole_file(size: int) -> None:
    offsets = sample_offsets(size)
    assert len(offsets) <= SAMPLES
    assert offsets == sorted(set(offsets))
    if size:
        assert offsets[0] == 0
        assert offsets[-1] < size <= offsets[-1] + SAMPLE_BYTES
        widest = max((b - a for a, b in pairwise(offsets)), default=0)
        assert widest <= max(SAMPLE_BYTES, size // (SAMPLES - 1) + 1)
