"""Engines that die, come back, or bring wrong blocks."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from connector.tests.engine.conversation import (
    BLOCK,
    SOURCES,
    Conversation,
    complete,
    counter,
    prefill_params,
    spec,
    turn,
    wait_until,
    wait_until_free,
)
from e2e.engines import Engine, EngineSpec, Ports

pytestmark = pytest.mark.engine


def again(engine: Engine, model: Path, role: str) -> EngineSpec:
    """The same role at the same control address: what a restarted container is.

    Its prompts wait for decode's KV as long as a crowded machine may need for the engines' first handshake.
    """
    control = engine.ports.control

    def transfer(ports: Ports) -> Mapping[str, Any]:
        made = spec(
            role, model, kv_lease_duration=20, load_timeout_seconds=20, max_wait_milliseconds=15_000
        ).kv_transfer_config
        assert callable(made)
        return made(Ports(ports.http, ports.side_channel, control))

    return EngineSpec(model=model, kv_transfer_config=transfer, python_path=(SOURCES,))


def test_turns_stay_right_while_engines_come_and_go(
    engines: dict[str, Engine], model: Path, tmp_path: Path
) -> None:
    prefill, decode, reference = engines["prefill"], engines["decode"], engines["reference"]
    mine, plain = Conversation(1), Conversation(1)

    def one_turn() -> None:
        got = mine.ask(lambda prompt, n: turn(prefill, decode, prompt, n))
        assert got == plain.ask(lambda prompt, n: complete(reference, prompt, n))

    with ExitStack() as stack:
        one_turn()
        one_turn()
        control = prefill.ports.control
        # Prefill dies with its cache. Decode, which knows it by address, must notice the new boot.
        prefill.kill()
        got = mine.ask(lambda prompt, n: complete(decode, prompt, n, _params(control)))
        assert got == plain.ask(lambda prompt, n: complete(reference, prompt, n))
        prefill = stack.enter_context(Engine(again(prefill, model, "prefill"), "prefill-2", tmp_path))
        prefill.ports = Ports(prefill.ports.http, prefill.ports.side_channel, control)
        prefill.wait_ready()
        # The new prefill is cold: it asks decode for the conversation. Its leg goes alone, for a decode leg
        # that ends before it starts would bring the same blocks by write-back.
        computed = counter(prefill, "vllm:request_prefill_kv_computed_tokens_sum")
        complete(prefill, mine.history, 1, prefill_params(decode))
        wait_until(
            lambda: counter(prefill, "disagg_kv_ondemand_requests_total", result="served") == 1,
            "decode has pushed the conversation on demand",
            limit=30,
        )
        computed = counter(prefill, "vllm:request_prefill_kv_computed_tokens_sum") - computed
        assert computed <= 2 * BLOCK
        one_turn()
        # Decode dies while it writes the turn back, or just after; nothing stays held on prefill.
        one_turn()
        decode.kill()
        control = decode.ports.control
        decode = stack.enter_context(Engine(again(decode, model, "decode"), "decode-2", tmp_path))
        decode.ports = Ports(decode.ports.http, decode.ports.side_channel, control)
        decode.wait_ready()
        one_turn()
        one_turn()
        wait_until(
            lambda: counter(decode, "disagg_kv_push_tokens_total", direction="decode_to_prefill") > 0,
            "the new decode has written a turn back",
            limit=30,
        )
        for engine in (prefill, decode):
            wait_until_free(engine)
            assert counter(engine, "disagg_kv_blocks_quarantined") == 0


def _params(control: int) -> dict[str, Any]:
    prefill = {"host": "127.0.0.1", "control_port": control}
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "disagg": {"version": 1, "prefill": prefill},
    }


def test_wrong_blocks_would_be_noticed(engines: dict[str, Engine], model: Path, tmp_path: Path) -> None:
    """The negative control of every comparison in these tests."""

    def transfer(ports: Ports) -> Mapping[str, Any]:
        made = spec("decode", model).kv_transfer_config
        assert callable(made)
        return {
            **made(ports),
            "kv_connector": "CorruptingConnector",
            "kv_connector_module_path": "connector.tests.engine.corrupting",
        }

    root = SOURCES.parents[1]
    corrupting = EngineSpec(model=model, kv_transfer_config=transfer, python_path=(SOURCES, root))
    engines["decode"].kill()
    engines["prefill"].kill()
    with ExitStack() as stack:
        prefill = stack.enter_context(Engine(spec("prefill", model), "prefill-3", tmp_path))
        decode = stack.enter_context(Engine(corrupting, "decode-3", tmp_path))
        prefill.wait_ready()
        decode.wait_ready()
        mine, plain = Conversation(5, answer_tokens=120), Conversation(5, answer_tokens=120)
        mine.ask(lambda prompt, n: turn(prefill, decode, prompt, n))
        plain.ask(lambda prompt, n: complete(engines["reference"], prompt, n))
        wait_until(
            lambda: counter(prefill, "disagg_kv_writeback_inserted_tokens_total") >= 3 * BLOCK,
            "wrong blocks have entered prefill's cache",
        )
        # Decode's own cache would hide them: ask prefill alone.
        prompt = [*mine.history, 7]
        assert complete(prefill, prompt, 20) != complete(engines["reference"], prompt, 20)
