"""The router as a process: started by its command line, ended by a signal."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import ssl
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from router.tests.certificates import Authority
from router.tests.collector import Collector
from router.tests.fake_engine import FakeEngine, Seen, sse, start_stream
from router.tests.wire import connect

CONFIG = {
    "version": 1,
    "namespace": "default",
    "name": "demo",
    "model": {"name": "m"},
    "ports": {"http": 0, "admin": 0},
}
SECONDS = 120.0


class Process:
    """A router process; its log is read line by line."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.log: list[dict[str, Any]] = []

    async def logged(self, message: str) -> dict[str, Any]:
        """Wait for a log line whose message starts with `message`."""
        assert self.process.stderr is not None
        async with asyncio.timeout(SECONDS):
            while True:
                line = await self.process.stderr.readline()
                assert line, f"the router ended before it logged {message!r}: {self.log}"
                self.log.append(json.loads(line))
                if self.log[-1]["message"].startswith(message):
                    return self.log[-1]

    async def ended(self) -> int:
        async with asyncio.timeout(SECONDS):
            return await self.process.wait()


@asynccontextmanager
async def router(tmp_path: Path, *arguments: str, config: Any = CONFIG) -> AsyncIterator[Process]:
    file = tmp_path / "router.json"
    file.write_text(json.dumps(config))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "disagg_router", "--config", str(file), "--host", "127.0.0.1", *arguments),
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "KUBECONFIG": "/nowhere", "KUBERNETES_SERVICE_HOST": ""},
    )
    try:
        yield Process(process)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@asynccontextmanager
async def serving(
    tmp_path: Path, *arguments: str, config: Any = CONFIG
) -> AsyncIterator[tuple[Process, FakeEngine, str]]:
    prefill, decode = await FakeEngine().start(), await FakeEngine().start()
    engines = f"prefill={prefill.url},decode={decode.url}"
    try:
        async with router(tmp_path, "--engines", engines, *arguments, config=config) as process:
            line = await process.logged("serving")
            yield process, decode, f"http://127.0.0.1:{line['port']}"
    finally:
        await prefill.stop()
        await decode.stop()


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}


async def test_sigterm_lets_a_stream_finish_and_exits_with_0(tmp_path: Path) -> None:
    go_on = asyncio.Event()

    async def slow(engine: FakeEngine, request: web.Request, seen: Seen) -> web.StreamResponse:
        response = await start_stream(request)
        await response.write(sse("one"))
        await go_on.wait()
        await response.write(sse("two") + b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    async with (
        serving(tmp_path, "--drain-delay", "0") as (process, decode, url),
        aiohttp.ClientSession() as client,
    ):
        decode.decode = slow
        async with client.post(url + "/v1/chat/completions", json=chat(stream=True)) as response:
            assert await response.content.readuntil(b"\n\n")
            process.process.send_signal(signal.SIGTERM)
            await process.logged("SIGTERM")
            await process.logged("not listening")
            with pytest.raises(aiohttp.ClientConnectorError):
                await client.get(url + "/health")
            go_on.set()
            assert (await response.read()).endswith(b"data: [DONE]\n\n")
        assert await process.ended() == 0


async def test_sigterm_cuts_what_is_still_open_after_the_grace(tmp_path: Path) -> None:
    async def forever(engine: FakeEngine, request: web.Request, seen: Seen) -> web.StreamResponse:
        response = await start_stream(request)
        await response.write(sse("one"))
        await asyncio.Event().wait()
        raise AssertionError

    arguments = ("--drain-delay", "0", "--grace", "0.1")
    async with serving(tmp_path, *arguments) as (process, decode, url), aiohttp.ClientSession() as client:
        decode.decode = forever
        async with client.post(url + "/v1/chat/completions", json=chat(stream=True)) as response:
            await response.content.readuntil(b"\n\n")
            process.process.send_signal(signal.SIGTERM)
            with pytest.raises(aiohttp.ClientError):
                await response.read()
        assert (await process.logged("stopped"))["cut"] == 1
        assert await process.ended() == 0


async def test_while_draining_the_router_serves_on_but_is_not_ready(tmp_path: Path) -> None:
    async with (
        serving(tmp_path, "--drain-delay", "60") as (process, _, url),
        aiohttp.ClientSession() as client,
    ):
        admin = f"http://127.0.0.1:{process.log[-1]['admin_port']}"
        process.process.send_signal(signal.SIGTERM)
        await process.logged("SIGTERM")
        async with client.get(admin + "/readyz") as response:
            assert response.status == 503
        async with client.post(url + "/v1/chat/completions", json=chat()) as response:
            assert response.status == 200
            assert response.headers["connection"] == "close"  # the client is to come back elsewhere
        process.process.send_signal(signal.SIGTERM)  # a second one does not wait
        assert await process.ended() == -signal.SIGTERM


async def test_a_turn_is_one_structured_log_line(tmp_path: Path) -> None:
    async with serving(tmp_path) as (process, _, url), aiohttp.ClientSession() as client:
        headers = {"X-Session-Id": "s", "X-Request-Id": "mine"}
        async with client.post(url + "/v1/chat/completions", json=chat(), headers=headers) as response:
            assert response.status == 200
        line = await process.logged("turn")
        assert len(line["request_id"]) == 32
        expected = {
            "client_request_id": "mine",
            "status": 200,
            "session_by": "header",
            "attempts": 1,
            "level": "info",
        }
        assert expected.items() <= line.items()
        process.process.send_signal(signal.SIGINT)
        assert await process.ended() == 0


async def test_a_collector_that_hangs_does_not_keep_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1000")
    collector = await Collector().start()
    collector.answers.clear()
    config = {**CONFIG, "tracing": {"endpoint": collector.url}}
    try:
        async with (
            serving(tmp_path, "--drain-delay", "0", config=config) as (process, _, url),
            aiohttp.ClientSession() as client,
        ):
            async with client.post(url + "/v1/chat/completions", json=chat()) as response:
                assert response.status == 200
            process.process.send_signal(signal.SIGTERM)
            assert (await process.logged("the last spans"))["level"] == "warning"
            assert await process.ended() == 0
            assert not collector.answers.is_set()
    finally:
        await collector.stop()


async def test_what_cannot_be_read_of_the_environment_is_said_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "1")
    config = {**CONFIG, "tracing": {"endpoint": "http://127.0.0.1:1"}}
    async with router(tmp_path, "--engines", "decode=http://a:1", config=config) as process:
        _, error = await asyncio.wait_for(process.process.communicate(), SECONDS)
        assert process.process.returncode == 2
        [line] = error.decode().splitlines()
        assert line.startswith("disagg_router: tracing: ")
        assert "OTEL_" in line


def publish_keys(folder: Path, version: str, text: str) -> None:
    """Write keys as the kubelet updates a mounted Secret: into a new folder, to which a link then points."""
    (folder / version).mkdir()
    (folder / version / "api-keys").write_text(text)
    (folder / "next").symlink_to(version)
    (folder / "next").rename(folder / "current")
    if not (folder / "api-keys").is_symlink():
        (folder / "api-keys").symlink_to("current/api-keys")


async def test_what_no_code_can_catch_is_a_structured_log_line_too(tmp_path: Path) -> None:
    """Python asks for a server's name in ASCII, inside OpenSSL's handshake."""
    authority = Authority()
    certificate, key = authority.pair().write(tmp_path)
    tls = {"certificateFile": str(certificate), "keyFile": str(key)}
    sent = ssl.MemoryBIO()
    client = authority.client().wrap_bio(ssl.MemoryBIO(), sent, server_hostname="localhost")
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    async with router(
        tmp_path, "--engines", "decode=http://127.0.0.1:1", config={**CONFIG, "tls": tls}
    ) as process:
        port = (await process.logged("serving"))["port"]
        async with connect(port) as odd:
            await odd.send(sent.read().replace(b"localhost", b"\xff" * 9))
            assert b"HTTP/" not in await odd.rest()
        assert "UnicodeDecodeError" in (await process.logged("ignored"))["exception"]


async def test_api_keys_are_exchanged_while_the_router_serves(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    folder.mkdir()
    publish_keys(folder, "v1", "key-one\nkey-two\n")
    config = {**CONFIG, "auth": {"apiKeysFile": str(folder / "api-keys")}}
    async with (
        serving(tmp_path, "--log-level", "debug", config=config) as (process, decode, url),
        aiohttp.ClientSession() as client,
    ):

        async def status(key: str) -> int:
            headers = {"Authorization": f"Bearer {key}"}
            async with client.post(url + "/v1/chat/completions", json=chat(), headers=headers) as response:
                return response.status

        assert [await status(key) for key in ("key-one", "key-two", "key-three")] == [200, 200, 401]
        publish_keys(folder, "v2", "key-two\nkey-three\n")
        assert (await process.logged("API keys changed"))["keys"] == 2
        assert [await status(key) for key in ("key-one", "key-two", "key-three")] == [401, 200, 200]
        publish_keys(folder, "v3", "")
        assert (await process.logged("API keys changed"))["level"] == "error"
        assert [await status(key) for key in ("key-two", "key-three", "")] == [401, 401, 401]
        async with client.get(url + "/health") as response:
            assert response.status == 200
        process.process.send_signal(signal.SIGINT)
        _, rest = await asyncio.wait_for(process.process.communicate(), SECONDS)
        assert process.process.returncode == 0
        assert "key-" not in json.dumps(process.log) + rest.decode()
        assert not any("authorization" in seen.headers for seen in decode.seen)


@pytest.mark.parametrize(
    ("config", "arguments", "words"),
    [
        (
            {**CONFIG, "auth": {"apiKeysFile": "/nowhere/keys"}},
            ("--engines", "decode=http://a:1"),
            "api keys",
        ),
        (
            {**CONFIG, "tls": {"certificateFile": "/nowhere/tls.crt", "keyFile": "/nowhere/tls.key"}},
            ("--engines", "decode=http://a:1"),
            "/nowhere/tls.crt: tls certificate and key cannot be read",
        ),
        (
            {**CONFIG, "tls": {"certificateFile": "/dev/null", "keyFile": "/dev/null"}},
            ("--engines", "decode=http://a:1"),
            "/dev/null, /dev/null: not a certificate with its key",
        ),
        (
            {**CONFIG, "handles": {"secretDir": "/nowhere"}},
            ("--engines", "prefill=http://127.0.0.1:1,decode=http://127.0.0.1:2"),
            "/nowhere/current: replicas' secrets cannot be read",
        ),
        ({**CONFIG, "mode": "Teleport"}, (), "mode"),
        ({**CONFIG, "tracing": {"endpoint": "collector:4318"}}, (), "tracing.endpoint"),
        (
            {**CONFIG, "tracing": {"endpoint": "http://collector:43l8"}},
            ("--engines", "decode=http://a:1"),
            "tracing.endpoint: http://collector:43l8: port",
        ),
        (CONFIG, ("--engines", "prefill=nonsense"), "--engines"),
        (CONFIG, (), "kubeconfig"),
    ],
)
async def test_what_cannot_work_is_said_in_one_line(
    tmp_path: Path, config: Any, arguments: tuple[str, ...], words: str
) -> None:
    async with router(tmp_path, *arguments, config=config) as process:
        _, error = await asyncio.wait_for(process.process.communicate(), SECONDS)
        assert process.process.returncode == 2
        *log, last = error.decode().splitlines()
        assert last.startswith("disagg_router: ")
        assert words in last.lower()
        assert all(json.loads(line)["level"] == "warning" for line in log)  # the Kubernetes client's own


async def test_a_taken_port_is_said_in_one_line(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, decode, url):
        port = url.rpartition(":")[2]
        async with router(tmp_path, "--engines", f"decode={decode.url}", "--port", port) as second:
            _, error = await asyncio.wait_for(second.process.communicate(), SECONDS)
            assert second.process.returncode == 2
            assert port in error.decode()
            assert "Traceback" not in error.decode()
