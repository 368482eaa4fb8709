"""Real engines that recognize each other by a secret: rotated while they talk, and not shared by a stranger."""

from __future__ import annotations

from pathlib import Path

import pytest
import zmq

from connector.tests.engine.conversation import (
    INSERTED,
    MOST_TURNS,
    PUSHED,
    RECOMPUTED,
    Conversation,
    becomes,
    complete,
    counter,
    is_written_back,
    spec,
    turn,
    wait_until,
    wait_until_free,
    within,
)
from connector.tests.engine.keyring import Keyring, shared_keyring
from disagg_connector.auth import SealingCodec
from disagg_connector.protocol import Hello, Welcome
from e2e.engines import Engine, running
from e2e.ports import HOST

pytestmark = pytest.mark.engine

DROPPED = "disagg_kv_control_dropped_total"


def answers(engine: Engine, codec: SealingCodec, patience: float = 10.0) -> bool:
    """Whether an engine answers to somebody with this secret."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as client:
        client.setsockopt(zmq.LINGER, 0)
        client.connect(f"tcp://{HOST}:{engine.ports.control}")
        client.send(codec.write_request(1, Hello(1)))
        return bool(client.poll(patience * 1000)) and isinstance(codec.read_reply(client.recv())[1], Welcome)


def test_conversations_go_on_while_keys_are_rotated(engines: dict[str, Engine]) -> None:
    prefill, decode = engines["prefill"], engines["decode"]
    keyring = shared_keyring()
    mine, plain = Conversation(80), Conversation(80)

    def one_turn() -> None:
        got = mine.ask(lambda prompt, n: turn(prefill, decode, prompt, n))
        assert got == plain.ask(lambda prompt, n: complete(engines["reference"], prompt, n))

    def exchanges() -> bool:
        pushed = counter(prefill, PUSHED, direction="prefill_to_decode")
        return is_written_back(decode, one_turn) and becomes(
            lambda: counter(prefill, PUSHED, direction="prefill_to_decode") > pushed, 10
        )

    def dropped() -> list[float]:
        """Not for unknown keys, with which this test asks on purpose."""
        reasons = ("forged", "unauthenticated")
        return [counter(e, DROPPED, reason=reason) for e in (prefill, decode) for reason in reasons]

    within(MOST_TURNS, "KV moves both ways", exchanges)
    before = dropped()
    for _ in range(2):
        retired = keyring.codec("previous")
        keyring.rotate()
        # At once, while either engine may or may not have looked at the folder.
        within(MOST_TURNS, "KV moves both ways after a rotation", exchanges)
        for engine in (prefill, decode):
            # The first question makes an engine look; what it answers to shows which secrets it has now.
            wait_until(lambda engine=engine: answers(engine, keyring.codec("next"), 3), "the new keys", 60)
            assert not answers(engine, retired, 1)
        within(MOST_TURNS, "KV moves both ways when both have looked", exchanges)
    assert dropped() == before


def test_a_decode_with_another_secret_computes_its_turns_itself(
    engines: dict[str, Engine], model: Path, tmp_path: Path
) -> None:
    prefill, reference = engines["prefill"], engines["reference"]
    other = tmp_path / "keys"
    other.mkdir()
    stranger_spec = spec("decode", model, control_secret_dir=str(Keyring(other).folder))
    with running(stranger_spec, "stranger", tmp_path) as stranger:
        dropped, inserted = counter(prefill, DROPPED, reason="unknown_key"), counter(prefill, INSERTED)
        mine, plain = Conversation(81), Conversation(81)
        for _ in range(2):
            got = mine.ask(lambda prompt, n: turn(prefill, stranger, prompt, n))
            assert got == plain.ask(lambda prompt, n: complete(reference, prompt, n))
        wait_until(
            lambda: counter(prefill, DROPPED, reason="unknown_key") > dropped,
            "prefill counts what it dropped",
        )
        wait_until(lambda: counter(stranger, RECOMPUTED, reason="peer") == 2, "both turns are counted")
        assert counter(stranger, PUSHED) == 0
        assert counter(prefill, INSERTED) == inserted
    wait_until_free(prefill)
