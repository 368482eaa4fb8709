"""Flags that are the operator's, however they are spelt."""

import re

import pytest
from operator_world import World, minimal_spec, parsed_spec, resource

from disagg_operator.api.engine import RESERVED_ARGS, ReservedArg
from disagg_operator.reserved import evasions

SPELLINGS = {
    "--por=9000": "--port",
    "--p": "--port",
    "--kv-transfer-conf={}": "--kv-transfer-config",
    "--kv_transfer_conf": "--kv-transfer-config",
    "--kv-transfer-conf.kv_connector_extra_config.control_port": "--kv-transfer-config",
    "--kv-transfer-con.kv_role=x": "--kv-transfer-config",
    "--served-model": "--served-model-name",
    "--tensor-parallel": "--tensor-parallel-size",
    "-t": "-tp",
    "--data_parallel": "--data-parallel-address",
    "--shut": "--shutdown-timeout",
    "--conf": "--config",
    "--api-k=x": "--api-key",
    "--ssl-key=/x": "--ssl-keyfile",
    "--ud": "--uds",
    "--prefix-caching-hash": "--prefix-caching-hash-algo",
}


@pytest.mark.parametrize(("arg", "flag"), SPELLINGS.items())
@pytest.mark.parametrize("where", ["engine", "prefill", "decode"])
def test_an_abbreviation_of_a_reserved_flag_is_found(where: str, arg: str, flag: str) -> None:
    spec = {"engine": {"image": "vllm:1"}, "prefill": {}, "decode": {}}
    spec[where]["extraArgs"] = ["--seed", "1", arg]  # type: ignore[assignment]
    (found,) = evasions(parsed_spec(**spec))
    assert found.startswith(f"{where}.extraArgs: ")
    assert f"is short for {flag}: " in found


@pytest.mark.parametrize(
    "args",
    [
        ["--max-model-len", "4096"],
        ["--model-impl", "vllm"],
        ["--config-format=hf"],
        ["--tokenizer-revision", "abc"],
        ["--seed", "-1"],
        ["-q", "fp8"],
        ["-O3"],
        ["--chat-template", "--port"],
    ],
    ids=str,
)
def test_other_flags_and_values_are_the_users(args: list[str]) -> None:
    assert evasions(parsed_spec(engine={"image": "vllm:1", "extraArgs": args})) == ()


def test_the_end_of_flags_may_not_be_given() -> None:
    (found,) = evasions(parsed_spec(decode={"extraArgs": ["--"]}))
    assert found == "decode.extraArgs: -- would hide the flags after it, also the operator's: remove it"


@pytest.mark.parametrize("reserved", RESERVED_ARGS, ids=lambda reserved: reserved.shown)
def test_the_flags_in_full_are_what_the_api_server_refuses(reserved: ReservedArg) -> None:
    pattern = re.compile(f"^({reserved.pattern})([.=].*)?$")
    for flag in reserved.flags:
        dashes, name = flag[: len(flag) - len(flag.lstrip("-"))], flag.lstrip("-")
        for spelling in (flag, f"{flag}=1", f"{flag}.key", dashes + name.replace("-", "_")):
            assert pattern.match(spelling), spelling


def test_it_is_reported_and_what_runs_is_left_as_it_is() -> None:
    world = World(resource(minimal_spec()))
    world.settle()
    before = {name: pod.template for name, pod in world.pods.items()}
    world.edit(decode={"replicas": 3, "extraArgs": ["--por=9000"]})
    world.settle()
    stalled = world.condition("Stalled")
    assert stalled is not None
    assert stalled["reason"] == "ReservedArgument"
    assert stalled["message"].startswith(
        "decode.extraArgs: --por is short for --port: engines always listen on port 8000"
    )
    assert world.condition("Ready")["status"] == "False"  # type: ignore[index]
    assert {name: pod.template for name, pod in world.pods.items()} == before
