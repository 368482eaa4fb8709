"""Real engines that recognize each other by a secret: rotated while they talk, and not shared by a stranger."""

from __future__ import annotations

from pathlib import Path

import pytest
import zmq

from connector.tests.engine.conversation import (
    Conversation,
    complete,
    counter,
    spec,
    turn,
    wait_until,
    wait_until_free,
)
from connector.tests.engine.keyring import Keyring, shared_keyring
from disagg_connector.auth import SealingCodec
from disagg_connector.protocol import Hello, Welcome
from e2e.engines import HOST, Engine, running

pytestmark = pytest.mark.engine


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
    unknown = counter(decode, "disagg_kv_recomputed_requests_total", reason="peer")
    # Other tests have sent such on purpose.
    forged = {
        e.name: counter(e, "disagg_kv_control_dropped_total", reason="forged") for e in (prefill, decode)
    }

    def one_turn() -> None:
        inserted = counter(prefill, "disagg_kv_writeback_inserted_tokens_total")
        got = mine.ask(lambda prompt, n: turn(prefill, decode, prompt, n))
        assert got == plain.ask(lambda prompt, n: complete(engines["reference"], prompt, n))
        wait_until(
            lambda: counter(prefill, "disagg_kv_writeback_inserted_tokens_total") > inserted,
            "the turn was written back",
            limit=60,
        )

    one_turn()
    for _ in range(2):
        retired = keyring.codec("previous")
        keyring.rotate()
        # At once, while either engine may or may not have looked at the folder.
        one_turn()
        for engine in (prefill, decode):
            # The first question makes an engine look; what it answers to shows which secrets it has now.
            wait_until(lambda engine=engine: answers(engine, keyring.codec("next"), 3), "the new keys", 60)
            assert not answers(engine, retired, 1)
        one_turn()
    assert counter(decode, "disagg_kv_recomputed_requests_total", reason="peer") == unknown
    for engine in (prefill, decode):
        assert counter(engine, "disagg_kv_control_dropped_total", reason="forged") == forged[engine.name]


def test_a_decode_with_another_secret_computes_its_turns_itself(
    engines: dict[str, Engine], model: Path, tmp_path: Path
) -> None:
    prefill, reference = engines["prefill"], engines["reference"]
    other = tmp_path / "keys"
    other.mkdir()
    stranger_spec = spec("decode", model, control_secret_dir=str(Keyring(other).folder))
    dropped = counter(prefill, "disagg_kv_control_dropped_total", reason="unknown_key")
    inserted = counter(prefill, "disagg_kv_writeback_inserted_tokens_total")
    with running(stranger_spec, "stranger", tmp_path) as stranger:
        mine, plain = Conversation(81), Conversation(81)
        for _ in range(2):
            got = mine.ask(lambda prompt, n: turn(prefill, stranger, prompt, n))
            assert got == plain.ask(lambda prompt, n: complete(reference, prompt, n))
        wait_until(
            lambda: counter(prefill, "disagg_kv_control_dropped_total", reason="unknown_key") > dropped,
            "prefill counts what it dropped",
            limit=60,
        )
        assert counter(stranger, "disagg_kv_recomputed_requests_total", reason="peer") == 2
        assert counter(stranger, "disagg_kv_push_tokens_total") == 0
        assert counter(prefill, "disagg_kv_writeback_inserted_tokens_total") == inserted
    wait_until_free(prefill, limit=120)
