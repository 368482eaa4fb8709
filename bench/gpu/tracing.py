"""BidirectionalPush that writes down when its messages and writes pass, for the latency of a write-back.

One JSON line an event, with the wall clock of the host that both engines share, in the file that BENCH_TRACE names.
Only the connector's seams are listened to: the control channel and the worker's transport.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from typing import Any

from bench.gpu import TRACE_FILE
from disagg_connector.connector import BidirectionalPushConnector
from disagg_connector.ports import Inbound
from disagg_connector.protocol import Commit, Committed, Grant, Load, Offer


class Trace:
    """Appends events to this process's file."""

    def __init__(self) -> None:
        self._file = open(f"{os.environ[TRACE_FILE]}.{os.getpid()}", "a", buffering=1)  # noqa: SIM115

    def __call__(self, event: str, xid: str, **more: Any) -> None:
        self._file.write(json.dumps({"t": time.time(), "event": event, "xid": xid, **more}) + "\n")


def _listen_to_channel(channel: Any, trace: Trace) -> None:
    """Offers, grants and commits as they are sent, taken from the inbox, and answered."""
    request, answer, drain = channel.request, channel.answer, channel.drain
    asked: dict[Any, tuple[str, str]] = {}

    def traced_request(
        to: Any,
        message: Any,
        timeout: float,
        on_reply: Callable[[Any], None],
        at_once: Callable[[Any], None] | None = None,
    ) -> None:
        if not isinstance(message, Offer | Commit | Load):
            request(to, message, timeout, on_reply, at_once)
            return
        kind = type(message).__name__.lower()
        trace(f"{kind}_sent", message.xid)

        def replied(reply: Any) -> None:
            trace(f"{kind}_answered", message.xid, reply=type(reply).__name__)
            on_reply(reply)

        def arrived(reply: Any) -> None:
            trace(f"{kind}_answer_arrived", message.xid, reply=type(reply).__name__)
            if at_once is not None:
                at_once(reply)

        request(to, message, timeout, replied, arrived)

    def traced_drain() -> Any:
        events = drain()
        for event in events:
            if isinstance(event, Inbound) and isinstance(event.message, Offer | Commit | Load):
                kind = type(event.message).__name__.lower()
                asked[event.token] = (kind, event.message.xid)
                trace(f"{kind}_taken", event.message.xid)
        return events

    def traced_answer(token: Any, reply: Any) -> None:
        kind, xid = asked.pop(token, ("", ""))
        if xid:
            more = {"blocks": len(reply.blocks)} if isinstance(reply, Grant) else {}
            inserted = isinstance(reply, Committed) and reply.inserted > 0 if kind == "commit" else False
            trace("inserted" if inserted else f"{kind}_replied", xid, reply=type(reply).__name__, **more)
        answer(token, reply)

    channel.request, channel.answer, channel.drain = traced_request, traced_answer, traced_drain


def _listen_to_transport(transport: Any, trace: Trace) -> None:
    """Writes as they are posted and found done, and announcements."""
    post, poll, notifications = transport.post, transport.poll, transport.notifications
    posted: dict[Any, str] = {}

    def traced_post(job: Any) -> Any:
        trace("write_taken", job.xid, blocks=len(job.local))
        taken = post(job)
        trace("write_posted", job.xid)
        posted.update(dict.fromkeys(map(id, taken.handles), job.xid))
        return taken

    def traced_poll(handle: Any) -> Any:
        state = poll(handle)
        if state != "pending" and (xid := posted.pop(id(handle), "")):
            trace("write_over", xid, state=state)
        return state

    def traced_notifications() -> Any:
        notes = notifications()
        for note in notes:
            trace("announced", note.decode("utf-8", "replace").rpartition(":")[0])
        return notes

    transport.post, transport.poll, transport.notifications = traced_post, traced_poll, traced_notifications


def note_start(trace: Trace, vllm_config: Any) -> None:
    """What a reader of results must know of the engine and its log does not say."""
    trace(
        "started",
        "",
        async_scheduling=vllm_config.scheduler_config.async_scheduling,
        executor=str(vllm_config.parallel_config.distributed_executor_backend),
        v2_model_runner=vllm_config.use_v2_model_runner,
        block_size=vllm_config.cache_config.block_size,
    )


class TracingConnector(BidirectionalPushConnector):
    """The connector, listened to."""

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        trace = Trace()
        note_start(trace, self._s.vllm_config)
        _listen_to_channel(self._s.channel, trace)
        super().bind_gpu_block_pool(gpu_block_pool)

    def register_kv_caches(self, kv_caches: Any) -> None:
        _listen_to_transport(self._w.transport, Trace())
        super().register_kv_caches(kv_caches)
