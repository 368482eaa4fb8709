"""The revision changes with what decides KV compatibility, and with nothing else."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from operator_world import parsed_spec

from disagg_operator.api.transfer import TransferMode
from disagg_operator.revision import MUST_MATCH, differences, parse_flags, revision


def rev(**changes: Any) -> str:
    return revision(parsed_spec(**changes), "connector:1")


def engine(*args: str, image: str = "vllm:1") -> dict[str, Any]:
    return {"image": image, "extraArgs": list(args)}


@pytest.mark.parametrize(
    "changes",
    [
        {"engine": engine(image="vllm:2")},
        {"model": {"uri": "hf://org/other"}},
        {"model": {"uri": "hf://org/model", "revision": "abc"}},
        {"model": {"uri": "hf://org/model", "name": "other"}},
        {"engine": engine("--block-size", "32")},
        {"engine": engine("--kv-cache-dtype=fp8")},
        {"engine": engine("--dtype", "float32")},
        {"prefill": {"replicas": 2, "extraArgs": ["--dtype", "float32"]}},
        {"prefill": {"replicas": 2, "parallelism": {"tensor": 2}}},
        {"decode": {"replicas": 2, "parallelism": {"tensor": 2}}},
        {"kvTransfer": {"backend": "Libfabric"}},
        {"kvTransfer": {"mode": "BidirectionalPull"}},
        {"kvTransfer": {"mode": "Push"}},
        {"kvTransfer": {"mode": "Pull"}},
        {"fabric": {"type": "EFA"}},
        {"decode": {"replicas": 2, "extraArgs": ["--speculative-config", '{"method":"ngram"}']}},
    ],
    ids=str,
)
def test_it_changes_with(changes: dict[str, Any]) -> None:
    assert rev(**changes) != rev()


@pytest.mark.parametrize(
    "changes",
    [
        {"prefill": {"replicas": 7}},
        {"decode": {"replicas": 2, "resources": {"limits": {"memory": "1Gi"}}}},
        {"engine": engine("--max-model-len", "2048", "--max-num-seqs=8", "--gpu-memory-utilization", "0.9")},
        {"engine": {"image": "vllm:1", "env": [{"name": "A", "value": "b"}]}},
        {"router": {"replicas": 5}},
        {"suspend": True},
        {"kvTransfer": {"leaseSeconds": 300}},
        {"prefill": {"replicas": 2, "template": {"spec": {"nodeSelector": {"a": "b"}}}}},
    ],
    ids=str,
)
def test_it_does_not_change_with(changes: dict[str, Any]) -> None:
    assert rev(**changes) == rev()


def test_every_mode_has_a_revision_of_its_own() -> None:
    assert len({rev(kvTransfer={"mode": mode}) for mode in TransferMode}) == len(TransferMode)


def test_how_long_decode_keeps_kv_decides_nothing() -> None:
    def pull(seconds: int) -> str:
        return rev(kvTransfer={"mode": "BidirectionalPull", "decodeRetentionSeconds": seconds})

    assert pull(60) == pull(600)


def test_the_same_path_mounted_from_elsewhere_is_another_model() -> None:
    def mounted(path: str) -> dict[str, Any]:
        return {"uri": "file:///models/a", "storage": {"type": "HostPath", "path": path}}

    assert rev(model=mounted("/data/1")) != rev(model=mounted("/data/2"))
    cached = {"uri": "hf://org/model", "storage": {"type": "PVC", "claimName": "cache"}}
    assert rev(model=cached) == rev(), "where a hub's files are cached decides nothing"


def test_it_changes_with_the_connector() -> None:
    assert revision(parsed_spec(), "connector:1") != revision(parsed_spec(), "connector:2")


def test_it_is_the_same_tomorrow() -> None:
    """Another value for the same spec would roll every engine when the operator is upgraded."""
    assert rev() == "f1179a8a"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (["--block-size", "32"], ["--block-size=32"]),
        (["--block-size", "32"], ["--block_size", "32"]),
        (["--block-size", "16", "--block-size", "32"], ["--block-size", "32"]),
        (["--dtype", "half"], ["--dtype", "float16"]),
        (["-q", "fp8"], ["--quantization", "fp8"]),
        (["--block-s", "32"], ["--block-size", "32"]),
        (
            ["--enable-prefix-caching", "--block-size", "32"],
            ["--block-size", "32", "--enable-prefix-caching"],
        ),
        (['--hf-overrides={"a": 1, "b": 2}'], ["--hf-overrides", '{"b":2,"a":1}']),
    ],
    ids=str,
)
def test_two_ways_to_write_the_same(one: list[str], other: list[str]) -> None:
    assert rev(engine=engine(*one)) == rev(engine=engine(*other))


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ([], {}),
        (["--flag"], {"flag": "true"}),
        (["--no-flag"], {"flag": "false"}),
        (["--flag", "-1"], {"flag": "-1"}),
        (["--flag", "-0.5"], {"flag": "-0.5"}),
        (["--a", "--b", "1"], {"a": "true", "b": "1"}),
        (["--json.key", "1", "--json.other.key=2"], {"json": "key=1,other.key=2"}),
        (["value without a flag"], {}),
    ],
    ids=str,
)
def test_flags_are_read_as_vllm_reads_them(args: list[str], expected: dict[str, str]) -> None:
    assert parse_flags(args) == expected


@given(st.lists(st.text(max_size=12), max_size=8))
def test_reading_flags_never_fails(args: list[str]) -> None:
    parse_flags(args, known=MUST_MATCH)


@pytest.mark.parametrize(
    ("prefill", "decode", "said"),
    [
        (["--block-size", "32"], ["--block-size", "16"], "--block-size is 32 for prefill and 16 for decode"),
        (["--kv-cache-dtype=fp8"], [], "--kv-cache-dtype is fp8 for prefill and not set for decode"),
        ([], ["--dtype", "bfloat16"], "--dtype is not set for prefill and bfloat16 for decode"),
        (["-q", "fp8"], ["--quantization=awq"], "--quantization is fp8 for prefill and awq for decode"),
        (
            [],
            ["--chat-template", "/x.jinja"],
            "--chat-template is not set for prefill and /x.jinja for decode",
        ),
    ],
    ids=str,
)
def test_an_illegal_difference_names_the_flag_and_both_values(
    prefill: list[str], decode: list[str], said: str
) -> None:
    spec = parsed_spec(prefill={"extraArgs": prefill}, decode={"extraArgs": decode})
    assert [str(difference) for difference in differences(spec)] == [said]


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        (["--max-model-len", "2048"], ["--max-model-len", "512"]),
        (["--block-size=32"], ["--block_size", "32"]),
        ([], ["--speculative-config", '{"method":"ngram"}']),
        (["--max-num-seqs", "4"], []),
    ],
    ids=str,
)
def test_a_legal_difference(prefill: list[str], decode: list[str]) -> None:
    spec = parsed_spec(prefill={"extraArgs": prefill}, decode={"extraArgs": decode})
    assert differences(spec) == ()


def test_a_role_overrides_what_both_have() -> None:
    spec = parsed_spec(engine=engine("--block-size", "16"), decode={"extraArgs": ["--block-size", "16"]})
    assert differences(spec) == ()
