"""Real engines are paused, get new weights and sleep between turns; no answer changes, no old KV is exchanged."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from connector.tests.engine.conversation import (
    PUSHED,
    RECOMPUTED,
    Conversation,
    becomes,
    complete,
    counter,
    is_written_back,
    post,
    spec,
    turn,
    wait_until_free,
    within,
)
from e2e.engines import Engine, running_all

pytestmark = pytest.mark.engine

# All of them fit into the engines' longest prompt.
TURNS_A_STAGE = 4


@pytest.fixture(scope="module")
def pair(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Engine]]:
    """Engines that let themselves be paused over HTTP."""
    specs = {
        role: replace(
            spec(role, model, kv_lease_duration=20, load_timeout_seconds=20, max_wait_milliseconds=15_000),
            env={"VLLM_SERVER_DEV_MODE": "1"},
        )
        for role in ("prefill", "decode")
    }
    with running_all(specs, folder=tmp_path_factory.mktemp("lifecycle")) as ready:
        yield ready


def tell(engine: Engine, path: str, **message: Any) -> dict[str, Any]:
    return post(engine, message, "lifecycle", path=path)


def reload_weights(engine: Engine) -> None:
    """The same weights once more, as a trainer would bring new ones. A pause waits for peers only for a while."""
    wait_until_free(engine)
    tell(engine, "/pause?mode=abort&clear_cache=true")
    tell(engine, "/collective_rpc", method="reload_weights")
    tell(engine, "/resume")


def test_turns_stay_right_through_pauses_new_weights_and_sleep(
    pair: dict[str, Engine], plain: Engine
) -> None:
    prefill, decode = pair["prefill"], pair["decode"]
    mine, reference = Conversation(7), Conversation(7)

    def one_turn() -> None:
        got = mine.ask(lambda prompt, n: turn(prefill, decode, prompt, n))
        assert got == reference.ask(lambda prompt, n: complete(plain, prompt, n))

    def pushed() -> float:
        return counter(decode, PUSHED, direction="decode_to_prefill")

    def refused() -> float:
        return counter(decode, RECOMPUTED, reason="fingerprint")

    def counts_more(what: Callable[[], float]) -> bool:
        """Whether a turn makes a counter move."""
        before = what()
        one_turn()
        return becomes(lambda: what() > before)

    within(TURNS_A_STAGE, "a turn is written back", lambda: is_written_back(decode, one_turn))

    reload_weights(prefill)
    written = pushed()
    within(TURNS_A_STAGE, "decode's weights are another generation's", lambda: counts_more(refused))
    assert pushed() == written

    reload_weights(decode)
    within(TURNS_A_STAGE, "engines of one generation exchange KV again", lambda: counts_more(pushed))

    wait_until_free(decode)
    tell(decode, "/sleep?level=1")
    tell(decode, "/wake_up")
    within(TURNS_A_STAGE, "an engine that is awake again exchanges KV", lambda: counts_more(pushed))
