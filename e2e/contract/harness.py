"""Real engines on CPU behind the router's process, and what a client makes of their answers."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from connector.tests.engine.conversation import TIE
from e2e.engines import Engine, Ports
from e2e.ports import HOST

MODEL = "test"
# For the connector, which engines import.
CONNECTOR = Path(__file__).parents[2] / "connector" / "src"
CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
# For the router's process to start, and to end.
ROUTER_SECONDS = 120.0
WORDS = [
    "river",
    "stone",
    "lamp",
    "cloud",
    "paper",
    "engine",
    "window",
    "garden",
    "silver",
    "north",
    "winter",
    "bread",
    "letter",
]


@dataclass(frozen=True)
class RouterPorts:
    """Where a router's process serves."""

    http: int
    admin: int

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.http}"

    @property
    def admin_url(self) -> str:
        return f"http://{HOST}:{self.admin}"


@contextmanager
def running_router(
    folder: Path, engines: Mapping[str, Engine], config: Mapping[str, Any]
) -> Iterator[RouterPorts]:
    """A router's process in front of the engines `prefill` and `decode`, on ports of its choice.

    Its configuration and log are in `folder`. It has to end cleanly.
    """
    (folder / "router.json").write_text(json.dumps({**config, "ports": {"http": 0, "admin": 0}}))
    listed = ",".join(
        f"{role}={engines[role].url}/#{engines[role].ports.control}" for role in ("prefill", "decode")
    )
    command = [sys.executable, "-m", "disagg_router", "--host", HOST, "--drain-delay", "0"]
    command += ["--config", str(folder / "router.json"), "--engines", listed]
    with (folder / "router.log").open("w+") as log, subprocess.Popen(command, stderr=log) as process:
        try:
            said = _first_line(folder / "router.log")
            yield RouterPorts(said["port"], said["admin_port"])
        finally:
            process.terminate()
            try:
                status = process.wait(ROUTER_SECONDS)
            finally:
                process.kill()  # or leaving would wait for it without a limit
            assert status == 0, f"the router's last words:\n{(folder / 'router.log').read_text()[-2000:]}"


def _first_line(log: Path) -> dict[str, Any]:
    deadline = time.monotonic() + ROUTER_SECONDS
    while "\n" not in log.read_text():
        assert time.monotonic() < deadline, f"the router has not started within {ROUTER_SECONDS} s"
        time.sleep(0.05)
    line: dict[str, Any] = json.loads(log.read_text().splitlines()[0])
    return line


def transfer(role: str) -> Callable[[Ports], Mapping[str, Any]]:
    """This connector's configuration of an engine, by its ports."""

    def config(ports: Ports) -> Mapping[str, Any]:
        return {
            "kv_connector": "BidirectionalPushConnector",
            "kv_connector_module_path": "disagg_connector.connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"role": role, "control_port": ports.control},
        }

    return config


@dataclass(frozen=True)
class Running:
    """Two engines behind a router, and a plain one that says what is right."""

    router: str
    admin: str
    prefill: Engine
    decode: Engine
    plain: Engine


@dataclass
class Asker:
    """Asks the router and the plain engine the same things."""

    running: Running
    client: aiohttp.ClientSession

    async def post(self, url: str, path: str, body: Mapping[str, Any]) -> tuple[int, str, bytes]:
        async with self.client.post(url + path, json=body) as response:
            return response.status, response.content_type, await response.read()

    async def both(self, path: str, body: Mapping[str, Any]) -> tuple[Any, Any]:
        """The two answers, as what a client makes of them."""
        answers = []
        for url in (self.running.router, self.running.plain.url):
            status, _, content = await self.post(url, path, body)
            assert status == 200, content
            answers.append(read_stream(content) if body.get("stream") else read_whole(content))
        return answers[0], answers[1]

    async def moved(self) -> float:
        """Prompt tokens that decode received from prefill so far."""
        return await self.metric(
            self.running.decode.url, "vllm:prompt_tokens_by_source_total", "external_kv_transfer"
        )

    async def idle(self) -> bool:
        """Nothing runs or waits on either engine, and the router counts nothing."""
        counts = [
            await self.metric(engine.url, f"vllm:num_requests_{state}")
            for engine in (self.running.prefill, self.running.decode)
            for state in ("running", "waiting")
        ]
        return sum(counts) + await self.metric(self.running.admin, "disagg_router_inflight_legs") == 0

    async def metric(self, url: str, name: str, label: str = "") -> float:
        async with self.client.get(url + "/metrics") as response:
            text = await response.text()
        lines = [
            line for line in text.splitlines() if re.match(rf"{re.escape(name)}[ {{]", line) and label in line
        ]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def alike(one: Any, other: Any) -> bool:
    """Whether two values of JSON are equal, but for the rounding of log probabilities.

    That depends on how many tokens an engine computes in a step. Another KV makes other numbers from the first digits on.
    """
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(alike, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) < TIE
    return bool(one == other)


def read_whole(content: bytes) -> dict[str, Any]:
    answer = json.loads(content)
    if answer["object"] == "response":
        return read_response(answer)
    choice = answer["choices"][0]
    text = choice["message"]["content"] if "message" in choice else choice["text"]
    return {
        "text": text,
        "finish": choice["finish_reason"],
        "logprobs": choice.get("logprobs"),
        "tokens": answer["usage"]["completion_tokens"],
    }


def read_stream(content: bytes) -> dict[str, Any]:
    events = [line.removeprefix("data: ") for line in content.decode().split("\n\n") if line]
    if events[0].startswith("event: response.created"):
        return read_response_events(events)
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    text = "".join((c["delta"].get("content") or "") if "delta" in c else c["text"] for c in choices)
    return {"text": text, "finish": choices[-1]["finish_reason"], "usage": chunks[-1].get("usage")}


def read_response(answer: dict[str, Any]) -> dict[str, Any]:
    [message] = answer["output"]
    usage = {name: answer["usage"][name] for name in ("input_tokens", "output_tokens")}
    return {"text": message["content"][0]["text"], "status": answer["status"], "usage": usage}


def read_response_events(events: list[str]) -> dict[str, Any]:
    said = [json.loads(event.partition("\ndata: ")[2]) for event in events]
    assert [event["type"] for event in said[:2]] == ["response.created", "response.in_progress"]
    assert [event["sequence_number"] for event in said] == list(range(len(said)))
    read = read_response(said[-1]["response"])
    deltas = [event["delta"] for event in said if event["type"] == "response.output_text.delta"]
    assert "".join(deltas) == read["text"]
    return read


def prompt(number: int, words: int = 120) -> str:
    """A text that no other test sends."""
    return (
        " ".join(WORDS[(number * 31 + i * i + i * number) % len(WORDS)] for i in range(words)) + f" {number}"
    )


def request(path: str, number: int, /, **fields: Any) -> dict[str, Any]:
    said = (
        {"messages": [{"role": "user", "content": prompt(number)}]}
        if path == CHAT
        else {"prompt": prompt(number)}
    )
    return {"model": MODEL, "temperature": 0, "max_tokens": 40, "ignore_eos": True, **said, **fields}


async def becomes(holds: Callable[[], Awaitable[bool]], seconds: float) -> bool:
    for _ in range(int(seconds / 0.1)):
        if await holds():
            return True
        await asyncio.sleep(0.1)
    return False


async def until(holds: Callable[[], Awaitable[bool]], what: str, seconds: float = 120.0) -> None:
    assert await becomes(holds, seconds), f"not within {seconds} s: {what}"
