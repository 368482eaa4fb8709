"""Several ranks: each writes and waits for its own shard, and only all of them make a transfer."""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from connector.tests.engine.conversation import (
    BLOCK,
    OFFERS,
    SOURCES,
    Conversation,
    complete,
    counter,
    spec,
    turn,
    wait_until,
    wait_until_written_back,
    watched,
)
from connector.tests.engine.evidence import Evidence
from e2e.engines import HOST, Engine, EngineSpec, Ports, running, running_all
from e2e.images.engine import ensure_model

pytestmark = pytest.mark.engine

# Workers on few cores need seconds for what takes milliseconds elsewhere, so that first attempts at meeting a
# peer may run into their limits. Answers must be right all the time; KV must have moved both ways at the end.
MOST_TURNS = 8
PATIENCE: dict[str, dict[str, Any]] = {
    "prefill": {"kv_lease_duration": 60, "max_wait_milliseconds": 15_000},
    "decode": {"kv_lease_duration": 60},
}
COMPUTED = "vllm:request_prefill_kv_computed_tokens_sum"
INSERTED = "disagg_kv_writeback_inserted_tokens_total"


def test_two_ranks_a_side(model: Path, tmp_path: Path, evidence: Evidence) -> None:
    # The plain engine has two ranks as well, since the sums of two halves round differently.
    converse(model, (2, 2), tmp_path, evidence, plain_ranks=2, copies=(1, 1))


@pytest.mark.parametrize("ranks", [(1, 2), (2, 1)])
def test_unequal_ranks_exchange_heads(
    model: Path, tmp_path: Path, evidence: Evidence, ranks: tuple[int, int]
) -> None:
    converse(model, ranks, tmp_path, evidence, copies=(1, 1))


@pytest.mark.thorough  # test_transport_ranks has these on NIXL alone
@pytest.mark.parametrize(("ranks", "copies"), [((1, 2), (2, 1)), ((2, 1), (1, 2))])
def test_a_head_that_several_ranks_hold_is_written_by_one_into_all(
    tmp_path: Path, evidence: Evidence, ranks: tuple[int, int], copies: tuple[int, int]
) -> None:
    converse(ensure_model("tiny-qwen3-mqa"), ranks, tmp_path, evidence, copies=copies)


def test_a_single_ranks_wrong_blocks_would_be_noticed(model: Path, tmp_path: Path) -> None:
    """The negative control of the tests above: half of the heads are right."""
    probe = 7
    with running(EngineSpec(model=model), "plain", tmp_path) as plain:
        reference = Conversation(5, answer_tokens=120)
        reference.ask(lambda prompt, n: complete(plain, prompt, n))
        want = complete(plain, [*reference.history, probe], 20)
    specs = {"prefill": sized("prefill", model, 1), "decode": corrupting(sized("decode", model, 2))}
    with running_all(specs, tmp_path) as engines:
        prefill, decode = engines["prefill"], engines["decode"]
        mine = Conversation(5, answer_tokens=120)
        mine.ask(lambda prompt, n: turn(prefill, decode, prompt, n))
        assert mine.history == reference.history
        wait_until(
            lambda: counter(prefill, INSERTED) >= 3 * BLOCK, "half wrong blocks are in prefill's cache", 60
        )
        # Decode's own cache would hide them: ask prefill alone.
        assert complete(prefill, [*mine.history, probe], 20) != want


def converse(
    model: Path,
    ranks: tuple[int, int],
    folder: Path,
    evidence: Evidence,
    *,
    copies: tuple[int, int],
    plain_ranks: int = 1,
) -> None:
    """Turns until KV has moved both ways, then one that hits what was written back, then one on demand.

    `ranks` and `copies` are prefill's and decode's: how many it has, and how often each of its heads goes to the other.
    """
    # One after the other: all workers at once are too much for a small machine.
    want = iter(answers_of_a_plain_engine(model, plain_ranks, folder))
    ledger = folder / "ledger"
    ledger.mkdir()
    specs = {
        role: watched(sized(role, model, count), ledger) for role, count in zip(ROLES, ranks, strict=True)
    }
    with running_all(specs, folder) as engines:
        prefill, decode = engines["prefill"], engines["decode"]
        mine = Conversation(3, answer_tokens=40)

        def ask() -> None:
            offers = counter(decode, OFFERS)
            assert mine.ask(lambda prompt, n: turn(prefill, decode, prompt, n)) == next(want)
            evidence.turns += 1
            # A reset of prefill's cache would else call it off.
            wait_until_written_back(prefill, decode, offers)

        for _ in range(MOST_TURNS - 2):
            before = moved(prefill)
            ask()
            if all(new > old for new, old in zip(moved(prefill), before, strict=True)):
                break
        else:
            raise AssertionError(f"KV never moved both ways within one of {MOST_TURNS - 2} turns")
        computed = counter(prefill, COMPUTED)
        ask()
        assert counter(prefill, COMPUTED) - computed <= mine.user_tokens + BLOCK + 1
        reset_prefix_cache(prefill)
        ask()
        assert counter(prefill, "disagg_kv_ondemand_requests_total", result="served") == 1
        for engine, direction, times in zip((prefill, decode), DIRECTIONS, copies, strict=True):
            assert bytes_a_block(engine, direction) == times * BLOCK * kv_bytes_a_token(model)
            evidence.nothing_is_held(engine)
        evidence.sessions += 1
        found = evidence.count_blocks(ledger)
        assert found.checked > found.published > 0, "blocks that went either way were compared, head by head"


ROLES = ("prefill", "decode")
DIRECTIONS = ("prefill_to_decode", "decode_to_prefill")


def sized(role: str, model: Path, ranks: int) -> EngineSpec:
    """An engine of so many ranks whose prefix cache can be reset from outside."""
    arguments = ("--tensor-parallel-size", str(ranks))
    return replace(
        spec(role, model, **PATIENCE[role]), extra_args=arguments, env={"VLLM_SERVER_DEV_MODE": "1"}
    )


def corrupting(right: EngineSpec) -> EngineSpec:
    """The same engine, whose last rank writes wrong blocks."""

    def transfer(ports: Ports) -> Mapping[str, Any]:
        assert callable(right.kv_transfer_config)
        return {
            **right.kv_transfer_config(ports),
            "kv_connector": "LastRankCorruptingConnector",
            "kv_connector_module_path": "connector.tests.engine.corrupting",
        }

    return replace(right, kv_transfer_config=transfer, python_path=(SOURCES, SOURCES.parents[1]))


def answers_of_a_plain_engine(model: Path, ranks: int, folder: Path) -> list[list[int]]:
    arguments = ("--tensor-parallel-size", str(ranks))
    with running(EngineSpec(model=model, extra_args=arguments), "plain", folder) as plain:
        reference = Conversation(3, answer_tokens=40)
        return [reference.ask(lambda prompt, n: complete(plain, prompt, n)) for _ in range(MOST_TURNS)]


def moved(prefill: Engine) -> tuple[float, float]:
    """Tokens that prefill has pushed to decode, and that decode has written back."""
    pushed = counter(prefill, "disagg_kv_push_tokens_total", direction="prefill_to_decode")
    return pushed, counter(prefill, INSERTED)


def bytes_a_block(engine: Engine, direction: str) -> float:
    """What an engine's ranks have written for each block of a transfer, all together."""
    written = counter(engine, "disagg_kv_push_bytes_total", direction=direction)
    return written / counter(engine, "disagg_kv_push_blocks_total", direction=direction)


def kv_bytes_a_token(model: Path) -> int:
    """Of all layers and KV heads, in float32, each head once."""
    config = json.loads((model / "config.json").read_text())
    return 2 * 4 * int(config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"])


def reset_prefix_cache(engine: Engine) -> None:
    def reset() -> bool:
        connection = http.client.HTTPConnection(HOST, engine.ports.http, timeout=30)
        try:
            connection.request("POST", "/reset_prefix_cache")
            return bool(json.load(connection.getresponse())["success"])
        finally:
            connection.close()

    # It fails while a block is held.
    wait_until(reset, f"{engine.name} has reset its prefix cache", 60)
