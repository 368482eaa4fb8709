"""KV in another format than the model computes in, on real engines, compared with a plain one of the same format."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from connector.tests.engine.conversation import (
    MOST_TURNS,
    RECOMPUTED,
    Conversation,
    complete,
    counter,
    is_written_back,
    spec,
    turn,
    watched,
    within,
)
from connector.tests.engine.evidence import Evidence
from connector.tests.processor import needs_fp8
from e2e.engines import EngineSpec, running_all

pytestmark = [pytest.mark.engine, needs_fp8]


@pytest.mark.parametrize("kv_cache_dtype", ["fp8_e4m3"])
def test_turns_are_the_plain_engines(
    model: Path, tmp_path: Path, evidence: Evidence, kv_cache_dtype: str
) -> None:
    ledger = tmp_path / "ledger"
    ledger.mkdir()
    stored = ("--kv-cache-dtype", kv_cache_dtype)
    specs = {
        "plain": EngineSpec(model=model, extra_args=stored),
        "prefill": replace(watched(spec("prefill", model), ledger), extra_args=stored),
        "decode": replace(watched(spec("decode", model), ledger), extra_args=stored),
    }
    with running_all(specs, tmp_path) as engines:
        prefill, decode = engines["prefill"], engines["decode"]
        mine, plain = Conversation(90), Conversation(90)

        def one_turn() -> None:
            got = mine.ask(lambda prompt, n: turn(prefill, decode, prompt, n))
            assert got == plain.ask(lambda prompt, n: complete(engines["plain"], prompt, n))
            evidence.turns += 1

        def exchanges() -> bool:
            recomputed = counter(decode, RECOMPUTED)
            return is_written_back(decode, one_turn) and counter(decode, RECOMPUTED) == recomputed

        for _ in range(2):
            within(MOST_TURNS, "a turn is pushed and written back", exchanges)
        # Decode's own cache is of no help here: prefill answers out of what was written back.
        assert complete(prefill, mine.history, 20) == complete(engines["plain"], mine.history, 20)
        for engine in (prefill, decode):
            evidence.nothing_is_held(engine)
        evidence.sessions += 1
        found = evidence.count_blocks(ledger)
        assert found.checked > found.published > 0, "blocks that went either way were compared"
