"""Engines that die, come back, or bring wrong blocks."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from connector.tests.engine.conversation import (
    BLOCK,
    COMPUTED,
    INSERTED,
    MOST_TURNS,
    ONDEMAND,
    SOURCES,
    Conversation,
    becomes,
    complete,
    counter,
    is_written_back,
    prefill_params,
    spec,
    turn,
    wait_until_free,
    within,
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

    def with_decode_alone(params: dict[str, Any] | None = None) -> None:
        got = mine.ask(lambda prompt, n: complete(decode, prompt, n, params))
        assert got == plain.ask(lambda prompt, n: complete(reference, prompt, n))

    def is_served_on_demand() -> bool:
        # Decode knows of no prefill to write this back to.
        with_decode_alone()
        served, computed = counter(prefill, ONDEMAND, result="served"), counter(prefill, COMPUTED)
        # Its leg goes alone, for a decode leg that ends before it starts would bring the same blocks by write-back.
        complete(prefill, mine.history, 1, prefill_params(decode))
        is_served = becomes(lambda: counter(prefill, ONDEMAND, result="served") > served, 10)
        return is_served and counter(prefill, COMPUTED) - computed <= 2 * BLOCK

    with ExitStack() as stack:
        one_turn()
        one_turn()
        control = prefill.ports.control
        # Prefill dies with its cache. Decode, which knows it by address, must notice the new boot.
        prefill.kill()
        with_decode_alone(_params(control))
        prefill = stack.enter_context(Engine(again(prefill, model, "prefill"), "prefill-2", tmp_path))
        prefill.ports = Ports(prefill.ports.http, prefill.ports.side_channel, control)
        prefill.wait_ready()
        # The new prefill is cold: it asks decode for the conversation.
        within(MOST_TURNS, "decode has pushed the conversation on demand", is_served_on_demand)
        one_turn()
        # Decode dies while it writes the turn back, or just after; nothing stays held on prefill.
        one_turn()
        decode.kill()
        control = decode.ports.control
        decode = stack.enter_context(Engine(again(decode, model, "decode"), "decode-2", tmp_path))
        decode.ports = Ports(decode.ports.http, decode.ports.side_channel, control)
        decode.wait_ready()
        one_turn()
        within(
            MOST_TURNS, "the new decode has written a turn back", lambda: is_written_back(decode, one_turn)
        )
        wait_until_free(prefill)
        wait_until_free(decode)


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
        prompt = Conversation(5).history
        said = complete(engines["reference"], prompt, 120)

        def brings_blocks() -> bool:
            assert turn(prefill, decode, prompt, 120) == said
            return becomes(lambda: counter(prefill, INSERTED) >= 3 * BLOCK)

        within(MOST_TURNS, "wrong blocks have entered prefill's cache", brings_blocks)
        # Decode's own cache would hide them: ask prefill alone.
        prompt = [*prompt, *said, 7]
        assert complete(prefill, prompt, 20) != complete(engines["reference"], prompt, 20)
