"""Starting engines on loopback: what they are given, and a real one."""

import json
import os
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.engines import Engine, EngineSpec, Ports, live_members, running
from e2e.images.engine import ensure_model
from e2e.images.engine_bundle import EngineError
from e2e.ports import ReservedPorts

PORTS = Ports(http=21001, side_channel=21002, control=21003)


def test_the_transfer_config_may_name_the_engines_own_ports() -> None:
    spec = EngineSpec(Path("/m"), kv_transfer_config=lambda ports: {"control_port": ports.control})
    arguments = spec.arguments(PORTS)
    assert json.loads(arguments[arguments.index("--kv-transfer-config") + 1]) == {"control_port": 21003}


def test_without_a_transfer_config_there_is_no_connector() -> None:
    assert "--kv-transfer-config" not in EngineSpec(Path("/m")).arguments(PORTS)


def test_the_environment_is_the_profiles_and_the_specs_own_values_win(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("VLLM_PORT", "1")
    spec = EngineSpec(Path("/m"), env={"UCX_TLS": "tcp"}, python_path=(Path("/a"), Path("/b")))
    environment = spec.environment(PORTS, tmp_path)
    assert "VLLM_PORT" not in environment
    assert environment["UCX_TLS"] == "tcp"
    assert environment["PYTHONPATH"] == "/a:/b"
    assert environment["VLLM_NIXL_SIDE_CHANNEL_PORT"] == "21002"


def test_ports_are_not_given_out_twice() -> None:
    first, second = ReservedPorts(20), ReservedPorts(20)
    assert len({*first.numbers, *second.numbers}) == 40
    first.release()
    second.release()


@pytest.mark.engine
def test_an_engine_that_cannot_start_is_told_with_its_log(tmp_path: Path) -> None:
    spec = EngineSpec(tmp_path / "no-model")
    with (
        pytest.raises(EngineError, match=r"(?s)exited with .*Last lines of .*no-model"),
        running(spec, "broken"),
    ):
        pytest.fail("it started")


@pytest.mark.engine
def test_a_forked_engine_is_told_of_like_a_process_of_ones_own(tmp_path: Path) -> None:
    spec = EngineSpec(ensure_model("tiny-qwen3"), env={"OF_THIS_ENGINE": "1"})
    with running(spec, "forked", tmp_path) as engine:
        environment = Path(f"/proc/{engine.pid}/environ").read_bytes()
        assert engine.process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            engine.process.wait(0.01)
        os.killpg(engine.pid, signal.SIGKILL)
        assert engine.process.wait(60) == -signal.SIGKILL
    assert b"OF_THIS_ENGINE" not in environment, "the kernel tells the parent's; this was a fork"
    assert live_members(engine.pid) == []


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """Not forked: `vllm serve` as users call it."""
    with running(EngineSpec(ensure_model("tiny-qwen3"), forked=False), "plain") as ready:
        assert len(live_members(ready.pid)) >= 2
        yield ready
    assert live_members(ready.pid) == []


def _ask(engine: Engine, path: str, body: dict[str, object]) -> dict[str, object]:
    request = urllib.request.Request(
        f"{engine.url}{path}", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        return dict(json.load(answer))


def _complete(engine: Engine, prompt: str, max_tokens: int = 48) -> str:
    body = {"model": "test", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    (choice,) = _ask(engine, "/v1/completions", body)["choices"]  # type: ignore[misc]
    assert choice["finish_reason"] == "length"  # type: ignore[has-type]
    return str(choice["text"])  # type: ignore[has-type]


@pytest.mark.engine
def test_answers_depend_on_the_whole_prompt_and_keep_varying(engine: Engine) -> None:
    middle = "the same words in between " * 4
    one, other = _complete(engine, f"a {middle}"), _complete(engine, f"b {middle}")
    assert one != other
    assert len(set(one[-16:])) > 3


@pytest.mark.engine
def test_an_answer_sent_back_as_text_is_the_tokens_that_were_generated(engine: Engine) -> None:
    text = _complete(engine, "hello")
    assert len(text) == 48
    assert _ask(engine, "/tokenize", {"model": "test", "prompt": text})["count"] == 48


@pytest.mark.engine
def test_the_chat_template_is_there(engine: Engine) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    body = {"model": "test", "messages": messages, "max_tokens": 8, "temperature": 0}
    assert _ask(engine, "/v1/chat/completions", body)["usage"]["completion_tokens"] == 8  # type: ignore[index]


@pytest.mark.engine
def test_metrics_are_readable(engine: Engine) -> None:
    assert "vllm:prompt_tokens_by_source_total" in engine.metrics_text()
