"""The conversation: each turn carries what was said, and waits for its counters."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from openai import OpenAI

from e2e.demo.conversation import hold_conversation, settled
from e2e.demo.counters import Counters

FINAL = Counters(p_computed=20, p_pushed=20, d_offers=1, d_written_back=32, p_inserted=32)


def _event(**fields: object) -> str:
    chunk = {
        "id": "x",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "m",
        "choices": [],
        **fields,
    }
    return f"data: {json.dumps(chunk)}\n\n"


def _piece(text: str) -> str:
    return _event(choices=[{"index": 0, "delta": {"content": text}, "finish_reason": None}])


class FakeServer:
    """Answers every turn with `The sights.` in two pieces and 20 prompt tokens; remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[dict[str, object]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                outer.asked.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
                usage = {"prompt_tokens": 20, "completion_tokens": 61, "total_tokens": 81}
                self.send_response(200)
                self.send_header("content-type", "text/event-stream")
                self.end_headers()
                for event in (_piece("The "), _piece("sights."), _event(usage=usage), "data: [DONE]\n\n"):
                    self.wfile.write(event.encode())

            def log_message(self, format: str, *args: object) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.client = OpenAI(base_url=f"http://127.0.0.1:{self._server.server_port}/v1", api_key="none")

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def server() -> Iterator[FakeServer]:
    fake = FakeServer()
    yield fake
    fake.client.close()
    fake.close()


def _readings(*readings: Counters) -> Iterator[Counters]:
    yield from readings


def test_each_turn_sends_what_was_said_and_tells_what_it_moved(server: FakeServer) -> None:
    readings = _readings(Counters(), FINAL, FINAL, Counters(40, 0, 40, 64, 64, 2))
    shown: list[str] = []

    turns = list(
        hold_conversation(server.client, "m", ["One?", "Two?"], lambda: next(readings), shown.append)
    )

    assert [turn.answer for turn in turns] == ["The sights.", "The sights."]
    assert [turn.counted for turn in turns] == [FINAL, FINAL]
    assert (turns[0].prompt_tokens, turns[0].answer_tokens) == (20, 61)
    assert shown == ["The ", "sights."] * 2
    assert server.asked[1]["messages"] == [
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "The sights."},
        {"role": "user", "content": "Two?"},
    ]
    assert all(asked["stream"] for asked in server.asked)


class FakeClock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_counters_that_come_late_are_waited_for() -> None:
    clock = FakeClock()
    readings = _readings(
        Counters(p_computed=20), Counters(p_computed=20, d_offers=1, d_written_back=32), FINAL
    )
    turn = settled(lambda: next(readings), Counters(), 20, clock=clock, sleep=clock.sleep)
    assert turn == FINAL


def test_counters_that_never_come_end_the_wait_with_what_there_is() -> None:
    clock = FakeClock()
    stuck = Counters(p_computed=20)
    assert settled(lambda: stuck, Counters(), 20, limit_seconds=5, clock=clock, sleep=clock.sleep) == stuck
    assert 5 <= clock.now < 6
