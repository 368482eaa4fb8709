"""Every transfer mode, as the operator renders it: real engines on CPU behind the real router.

Conversations of four turns are answered as one plain engine answers them, the engines' own counters show that KV moved and in
which direction, and without its prefill engine a turn is computed. DISAGG_MODE_CONVERSATIONS says how many conversations.
"""

from __future__ import annotations

import http.client
import itertools
import json
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from connector.tests.engine.conversation import Conversation, body, count, counter, differs, wait_until
from disagg_operator.api.types import DisaggInferenceSpec
from disagg_operator.build.engine import engine_arguments, kv_transfer_config
from disagg_operator.build.router import router_config
from disagg_operator.control_secret import KEY_BYTES
from disagg_operator.naming import CONTROL_KEYS, Component
from e2e.contract.harness import (
    CHAT,
    CONNECTOR,
    MODEL,
    TEXT,
    RouterPorts,
    prompt,
    read_stream,
    read_whole,
    running_router,
)
from e2e.engines import Engine, EngineSpec, Ports, live_members, running_all
from e2e.images.engine import ensure_model
from e2e.ports import HOST

pytestmark = pytest.mark.engine

CONVERSATIONS = int(os.environ.get("DISAGG_MODE_CONVERSATIONS", "4"))
MANY = 200
TURNS = 4
MODES: dict[str, dict[str, Any]] = {
    "Pull": {},
    "Push": {},
    # vLLM has prefill compute what is less than 64 tokens; these turns are short.
    "BidirectionalPull": {"decodeRetentionSeconds": 60, "extraConfig": {"kv_recompute_threshold": 0}},
    "BidirectionalPush": {},
}


def spec_of(mode: str) -> DisaggInferenceSpec:
    return DisaggInferenceSpec.model_validate(
        {
            "model": {"uri": "file:///model", "name": MODEL},
            "engine": {"image": "x", "device": "CPU"},
            "kvTransfer": {"mode": mode, **MODES[mode]},
        }
    )


def engine_spec(mode: str, component: Component, model: Path) -> EngineSpec:
    spec = spec_of(mode)
    role = spec.prefill if component is Component.PREFILL else spec.decode
    flags = [flag for flag in engine_arguments(spec, role, component, "m") if flag == "--enable-scale-out"]
    return EngineSpec(
        model,
        _rendered(spec, component),
        kv_blocks=2048,
        extra_args=tuple(flags),
        python_path=(CONNECTOR,),
    )


def _rendered(spec: DisaggInferenceSpec, component: Component) -> Callable[[Ports], Mapping[str, Any]]:
    """What the operator renders, but for what is the pod's: its ports, and the keys that are mounted there."""

    def transfer(ports: Ports) -> Mapping[str, Any]:
        config = kv_transfer_config(spec, component)
        extra = config["kv_connector_extra_config"]
        if "control_port" in extra:
            extra = {k: v for k, v in extra.items() if k != "control_secret_dir"}
            extra["control_port"] = ports.control
        return {**config, "kv_connector_extra_config": extra}

    return transfer


@dataclass
class Served:
    """A prefill and a decode engine in one mode behind a router, and a plain engine that says what is right."""

    mode: str
    router: RouterPorts
    prefill: Engine
    decode: Engine
    plain: Engine
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    """Of conversations."""

    def post(
        self, content: Mapping[str, Any], path: str, port: int | None = None, session: str = ""
    ) -> bytes:
        connection = http.client.HTTPConnection(HOST, port or self.router.http, timeout=300)
        try:
            headers = {"Content-Type": "application/json", **({"X-Session-Id": session} if session else {})}
            connection.request("POST", path, json.dumps(content), headers)
            answer = connection.getresponse()
            text = answer.read()
            assert answer.status == 200, text[:500]
            return text
        finally:
            connection.close()

    def converse(self, turns: int = TURNS, *, stream: bool = False) -> None:
        """Turns of a conversation of token ids that no other has, each compared with the plain engine's."""
        number = next(self.numbers)
        session, said = f"conversation {number}", Conversation(number)

        def answer(history: list[int], tokens: int) -> list[int]:
            content = {**body(history, tokens), "stream": stream}
            text = self.post(content, TEXT, session=session)
            got = _streamed_tokens(text) if stream else json.loads(text)["choices"][0]["token_ids"]
            assert len(got) == tokens
            difference = differs(self.plain, history, got)
            assert not difference, f"{self.mode}, {session}: {difference}"
            return list(got)

        for _ in range(turns):
            said.ask(answer)

    def counted(self, name: str, **labels: str) -> float:
        """By the router."""
        with urlopen(self.router.admin_url + "/metrics", timeout=60) as page:
            return count(page.read().decode(), name, **labels)

    def local(self) -> float:
        return self.counted("disagg_router_turns_total", prefill="local")


def _streamed_tokens(text: bytes) -> list[int]:
    chunks = [json.loads(line[6:]) for line in text.decode().split("\n\n") if line.startswith("data: {")]
    return [token for chunk in chunks for choice in chunk["choices"] for token in choice["token_ids"]]


@pytest.fixture(scope="module")
def model() -> Path:
    return ensure_model("tiny-qwen3")


@pytest.fixture(scope="module")
def plain(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """Starts while those of the first mode do."""
    with Engine(EngineSpec(model, kv_blocks=2048), "plain", tmp_path_factory.mktemp("plain")) as engine:
        yield engine


@contextmanager
def serving(mode: str, model: Path, plain: Engine, folder: Path) -> Iterator[Served]:
    specs = {str(role): engine_spec(mode, role, model) for role in (Component.PREFILL, Component.DECODE)}
    with running_all(specs, folder=folder) as engines:
        plain.wait_ready()
        for engine in engines.values():
            _let_run_everywhere(engine)
        config = router_config("modes", "default", spec_of(mode))
        if "handles" in config:
            config["handles"] = {"secretDir": str(_secrets(folder / "secrets"))}
        with running_router(folder, engines, config) as router:
            yield Served(mode, router, engines["prefill"], engines["decode"], plain)


def _secrets(folder: Path) -> Path:
    """As the operator's Secret is mounted."""
    folder.mkdir()
    for key in CONTROL_KEYS:
        (folder / key).write_bytes(os.urandom(KEY_BYTES))
    return folder


def _let_run_everywhere(engine: Engine) -> None:
    """vLLM's NIXL connectors bind a worker on CPU to the machine's last core, where both engines would be in each other's
    way."""
    for process in live_members(engine.pid):
        for thread in Path(f"/proc/{process}/task").iterdir():
            os.sched_setaffinity(int(thread.name), os.sched_getaffinity(0))


@pytest.fixture(
    scope="module",
    params=[pytest.param(m, marks=[pytest.mark.thorough] if m == "BidirectionalPush" else []) for m in MODES],
)
def served(
    request: pytest.FixtureRequest, model: Path, plain: Engine, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """The mode that this project's own connector serves has test files of its own."""
    with serving(request.param, model, plain, tmp_path_factory.mktemp(request.param)) as made:
        yield made


def external(engine: Engine) -> float:
    """Prompt tokens that the engine took from its peer instead of computing them."""
    return counter(engine, "vllm:prompt_tokens_by_source_total", source="external_kv_transfer")


def moved_bytes(engine: Engine) -> float:
    """Bytes that the engine read or wrote, whichever the mode has it do."""
    return counter(engine, "vllm:nixl_bytes_transferred_sum")


def converse_and_count(served: Served, conversations: int, at_once: int = 1) -> None:
    """Every fourth conversation is streamed."""
    prefill, decode = served.prefill, served.decode
    before = {engine.name: (external(engine), moved_bytes(engine)) for engine in (prefill, decode)}
    used = served.counted("disagg_router_handles_total", result="used")
    local = served.local()
    with ThreadPoolExecutor(at_once) as clients:
        held = [clients.submit(served.converse, stream=number % 4 == 3) for number in range(conversations)]
        for conversation in held:
            conversation.result()
    turns = TURNS * conversations
    assert served.local() == local, "no turn was computed by decode"

    def grown(engine: Engine, least_tokens: int) -> tuple[bool, bool]:
        tokens, size = before[engine.name]
        return external(engine) - tokens >= least_tokens, moved_bytes(engine) > size

    # In every turn decode lacks the user's part, of 37 tokens, and the block that it begins in at most; its counters may
    # lag by a step.
    wait_until(lambda: grown(decode, 5 * turns)[0], "decode got prompts from prefill")
    if served.mode == "BidirectionalPush":
        return
    who_moved = (grown(prefill, 0)[1], grown(decode, 0)[1])
    assert (
        who_moved
        == {"Pull": (False, True), "Push": (True, False), "BidirectionalPull": (True, True)}[served.mode]
    )
    for engine in (prefill, decode):
        assert counter(engine, "vllm:nixl_num_notifications_after_expiry_total") == 0
    if served.mode == "BidirectionalPull":
        continued = (TURNS - 1) * (conversations - conversations // 4)
        assert served.counted("disagg_router_handles_total", result="used") - used == continued
        # An answer of 60 tokens, of which prefill lacks more than a block.
        wait_until(lambda: grown(prefill, 32 * continued)[0], "prefill read what decode had made")


def test_conversations_are_those_of_a_plain_engine_and_kv_moves(served: Served) -> None:
    converse_and_count(served, CONVERSATIONS)


@pytest.mark.thorough
@pytest.mark.timeout(3600)
def test_many_conversations(served: Served) -> None:
    converse_and_count(served, MANY, at_once=8)


@pytest.mark.parametrize("stream", [False, True])
def test_chats_are_those_of_a_plain_engine(served: Served, stream: bool) -> None:
    """Texts may be cut into other tokens than the model wrote: KV of those must not be used."""
    messages = [{"role": "system", "content": prompt(3 + stream, 60)}]
    read = read_stream if stream else read_whole
    for turn in range(TURNS):
        messages.append({"role": "user", "content": prompt(200 + 10 * stream + turn, 20)})
        said = {"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": 40, "stream": stream}
        routed = read(served.post(said, CHAT))
        assert routed == read(served.post(said, CHAT, served.plain.ports.http))
        messages.append({"role": "assistant", "content": routed["text"]})
    known = sum(served.counted("disagg_router_handles_total", result=r) for r in ("used", "other_prompt"))
    assert served.counted("disagg_router_handles_total", result="unread") == 0
    assert stream or (known > 0) == (served.mode == "BidirectionalPull")


def test_without_its_prefill_engine_a_turn_is_computed(served: Served) -> None:
    """The last test of a mode: its prefill engine is gone afterwards."""
    served.converse(1)
    local = served.local()
    served.prefill.kill()
    served.converse(2)
    # A turn is counted when it is over, which is a moment after its answer has come.
    wait_until(lambda: served.local() >= local + 2, "both turns are counted")
    assert served.local() == local + 2
