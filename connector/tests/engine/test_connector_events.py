"""Whoever follows prefill's KV events learns of a conversation's written-back blocks, as of the computed ones."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from connector.tests.engine.conversation import (
    BLOCK,
    MOST_TURNS,
    Conversation,
    is_written_back,
    spec,
    turn,
    wait_until,
    within,
)
from e2e.engines import running_all

pytestmark = pytest.mark.engine


class Follower:
    """Subscribes to an engine's KV events; what it was told is stored, by the block's tokens and its parent."""

    def __init__(self, endpoint: str) -> None:
        self.stored: dict[bytes, tuple[bytes | None, list[int]]] = {}
        self._context: Any = zmq.Context()
        self._socket: Any = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._socket.setsockopt(zmq.RCVTIMEO, 200)
        self._socket.connect(endpoint)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self._context.destroy(linger=0)

    def knows(self, tokens: list[int]) -> bool:
        """Whether every full block of these tokens was told of, each on the one before it."""
        parent, stored = None, self.stored.copy()  # the other thread may be told of more meanwhile
        for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
            found = (parent, tokens[start : start + BLOCK])
            parent = next((block_hash for block_hash, told in stored.items() if told == found), None)
            if parent is None:
                return False
        return True

    def _follow(self) -> None:
        while not self._stop.is_set():
            try:
                payload = self._socket.recv_multipart()[-1]
            except zmq.Again:
                continue
            for event in msgspec.msgpack.decode(payload)[1]:
                if event["type"] == "BlockStored":
                    self._take(event)

    def _take(self, event: dict[str, Any]) -> None:
        parent, tokens = event["parent_block_hash"], event["token_ids"]
        for index, block_hash in enumerate(event["block_hashes"]):
            self.stored[block_hash] = (parent, tokens[index * BLOCK : (index + 1) * BLOCK])
            parent = block_hash


def test_a_follower_learns_of_a_conversation_as_if_prefill_had_computed_it(
    model: Path, tmp_path: Path
) -> None:
    endpoint = f"ipc://{tmp_path}/events"
    config = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": endpoint}
    prefill_spec = replace(spec("prefill", model), extra_args=("--kv-events-config", json.dumps(config)))
    follower = Follower(endpoint)
    try:
        with running_all({"prefill": prefill_spec, "decode": spec("decode", model)}, tmp_path) as engines:
            prefill, decode = engines["prefill"], engines["decode"]
            conversation = Conversation(5)

            def one_turn() -> None:
                conversation.ask(lambda prompt, n: turn(prefill, decode, prompt, n))

            for _ in range(2):
                # Of a turn's answer prefill computes nothing: it was not by itself that it had it to tell.
                within(MOST_TURNS, "a turn is written back", lambda: is_written_back(decode, one_turn))
                # The last token was sampled, its KV never computed.
                known = conversation.history[:-1]
                wait_until(partial(follower.knows, known), "all of the conversation is told of")
    finally:
        follower.close()
