"""The connector with a trap door at every phase of a transfer: shows what a SIGKILL there costs.

`MortalConnector` looks for a file `kill-PHASE-ROLE` in the ledger's folder whenever its engine, of role ROLE, passes a
phase; the file holds the process group to kill at that very moment, its own or the peer's. Phases:

* `sent.MESSAGE`, `answered.MESSAGE`: a control message has been handed to the channel; its reply has come, and has not
  been looked at;
* `received.MESSAGE`, `replied.REPLY`: a control message has come, and has not been looked at; a reply has been handed
  to the channel;
* `sending.MESSAGE`: just before `sent.MESSAGE`;
* `posted`: NIXL has been given a write; `arrived`: NIXL has announced one.

A handful of bytes may be in the sockets of the dead; that is the point.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

from connector.tests.engine.checking import CheckingConnector
from disagg_connector.ports import Inbound, Posted, Token
from disagg_connector.protocol import Address, Reply, Request


class MortalConnector(CheckingConnector):
    """Kills where it is told to; see the module's docstring."""

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        super().bind_gpu_block_pool(gpu_block_pool)
        channel: Any = self._s.channel
        request, answer, drain = channel.request, channel.answer, channel.drain

        def mortal_request(
            to: Address,
            message: Request,
            timeout: float,
            on_reply: Callable[[Reply | None], None],
            at_once: Callable[[Reply], None] | None = None,
        ) -> None:
            name = type(message).__name__

            def reply_and_die(reply: Reply | None) -> None:
                if reply is not None:
                    self._pass(f"answered.{name}")
                on_reply(reply)

            self._pass(f"sending.{name}")
            request(to, message, timeout, reply_and_die, at_once)
            self._pass(f"sent.{name}")

        def mortal_answer(token: Token, reply: Reply) -> None:
            answer(token, reply)
            self._pass(f"replied.{type(reply).__name__}")

        def mortal_drain() -> list[Any]:
            events: list[Any] = drain()
            for event in events:
                if isinstance(event, Inbound):
                    self._pass(f"received.{type(event.message).__name__}")
            return events

        channel.request, channel.answer, channel.drain = mortal_request, mortal_answer, mortal_drain

    def register_kv_caches(self, kv_caches: Any) -> None:
        transport = self._w.transport
        post = transport.post

        def mortal_post(*order: Any) -> Posted:
            posted: Posted = post(*order)
            self._pass("posted")
            return posted

        transport.post = mortal_post
        super().register_kv_caches(kv_caches)

    def _arrived(self, xid: str) -> None:
        super()._arrived(xid)
        self._pass("arrived")

    def _pass(self, phase: str) -> None:
        path = self.folder / f"kill-{phase}-{self.engine_role}"
        try:
            group = int(path.read_text())
            path.unlink()
        except FileNotFoundError:
            return
        os.killpg(group, signal.SIGKILL)
