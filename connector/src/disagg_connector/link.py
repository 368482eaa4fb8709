"""The way between an engine's control thread and its ranks' writer threads that does not wait for engine steps.

A Unix socket of the kind that keeps messages apart, in a folder that only this user may enter: the scheduler's side
listens, and tells the ranks with a step's orders where. A rank says its number and then its reports, and is sent
orders. What `direct` decides with it works without it too, so whatever goes wrong here closes it for good, and the
engine's steps carry everything from then on: also when ranks are on another machine and cannot come.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Protocol

import msgspec

from disagg_connector.ports import Tally, WriteJob

logger = logging.getLogger(__name__)

# An order for `sending.RESERVED_AT_ONCE` blocks and more. The kernel keeps a few for a rank that is slow to read.
MAX_MESSAGE_BYTES = 128 * 1024
BUFFER_BYTES = 1024 * 1024

Told = Callable[[int, str, Tally], None]
"""A rank, the transfer that it is through with, and how."""

_rank = msgspec.msgpack.Decoder(int)
_report = msgspec.msgpack.Decoder(tuple[str, Tally])
_order = msgspec.msgpack.Decoder(tuple[WriteJob, float])


class Watch(Protocol):
    """The control thread, as far as it is used here; see `control.ControlChannel.watch`."""

    def watch(self, fd: int, on_readable: Callable[[], None] | None) -> None: ...


class LinkServer:
    """The scheduler's end: a `direct.Link`. Everything but the properties happens on the control thread."""

    def __init__(self, ranks: int, watch: Watch) -> None:
        """Listen. Raises `OSError` where that is impossible."""
        self._ranks = ranks
        self._watch = watch
        self._told: Told = lambda rank, xid, tally: None
        self._connections: dict[int, socket.socket] = {}
        self._strangers: set[socket.socket] = set()
        self._lost = False
        self._listener = _socket()
        self._folder = tempfile.mkdtemp(prefix="disagg-")  # for this user alone
        self.path = str(Path(self._folder) / "link")
        try:
            self._listener.bind(self.path)
            self._listener.listen(ranks)
        except OSError:
            self._listener.close()
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        self._listener.setblocking(False)

    def serve(self, told: Told) -> None:
        """Hear the ranks from here on. Before the control thread starts."""
        self._told = told
        self._watch.watch(self._listener.fileno(), self._accept)

    @property
    def is_ready(self) -> bool:
        return len(self._connections) == self._ranks

    @property
    def is_lost(self) -> bool:
        return self._lost

    def write(self, job: WriteJob, deadline: float) -> None:
        order = msgspec.msgpack.encode((job, deadline))
        for rank, connection in list(self._connections.items()):
            try:
                connection.send(order)
            except OSError as error:
                self._lose(f"rank {rank} takes no orders: {error}")
                return

    def close(self) -> None:
        """After the control thread has ended."""
        for each in (self._listener, *self._connections.values(), *self._strangers):
            each.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as error:
            # Else the control thread would be called for it over and over.
            self._watch.watch(self._listener.fileno(), None)
            logger.warning("Writes wait for engine steps, no rank can come to %s: %s", self.path, error)
            return
        connection.setblocking(False)
        _buffer(connection)
        self._strangers.add(connection)
        self._watch.watch(connection.fileno(), partial(self._introduced, connection))

    def _introduced(self, connection: socket.socket) -> None:
        try:
            rank = _rank.decode(connection.recv(MAX_MESSAGE_BYTES))
        except BlockingIOError:
            return
        except (OSError, msgspec.MsgspecError) as error:
            logger.warning("Somebody who is no rank has come to %s: %s", self.path, error)
            rank = -1
        self._strangers.discard(connection)
        self._watch.watch(connection.fileno(), None)
        if not 0 <= rank < self._ranks or rank in self._connections or self._lost:
            logger.warning("Rank %d is not expected at %s", rank, self.path)
            connection.close()
            return
        self._connections[rank] = connection
        self._watch.watch(connection.fileno(), partial(self._reported, rank, connection))

    def _reported(self, rank: int, connection: socket.socket) -> None:
        try:
            data = connection.recv(MAX_MESSAGE_BYTES)
            if not data:
                # Also when the engine shuts down.
                self._lose(f"rank {rank} has closed its end", logging.INFO)
                return
            xid, tally = _report.decode(data)
        except BlockingIOError:
            return
        except (OSError, msgspec.MsgspecError) as error:
            self._lose(f"rank {rank}: {error}")
            return
        self._told(rank, xid, tally)

    def _lose(self, why: str, level: int = logging.WARNING) -> None:
        self._lost = True
        logger.log(level, "Writes wait for engine steps from here on: %s", why)
        for connection in self._connections.values():
            self._watch.watch(connection.fileno(), None)
            connection.close()
        self._connections = {}


class RankLink:
    """A rank's end. Orders are taken by a thread of its own; `tell` is the writer thread's."""

    def __init__(self, path: str, rank: int, take: Callable[[WriteJob, float], None]) -> None:
        self._path = path
        self._rank = rank
        self._take = take
        self._socket = _socket()
        _buffer(self._socket)
        self._open = False
        threading.Thread(target=self._run, name="disagg-link", daemon=True).start()

    def tell(self, xid: str, tally: Tally) -> None:
        """This rank is through with a transfer. It is told with a step's report, too."""
        if not self._open:
            return
        try:
            self._socket.send(msgspec.msgpack.encode((xid, tally)), socket.MSG_DONTWAIT)
        except OSError as error:
            logger.warning("Rank %d cannot report over %s: %s", self._rank, self._path, error)
            self.close()

    def close(self) -> None:
        self._open = False
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # ends the thread

    def _run(self) -> None:
        with self._socket:
            try:
                self._socket.connect(self._path)
                self._socket.send(msgspec.msgpack.encode(self._rank))
                self._open = True
                while data := self._socket.recv(MAX_MESSAGE_BYTES):
                    self._take(*_order.decode(data))
            except (OSError, msgspec.MsgspecError) as error:
                logger.warning(
                    "Rank %d is ordered by engine steps only, not over %s: %s", self._rank, self._path, error
                )
            finally:
                self._open = False


def join(path: str, rank: int, take: Callable[[WriteJob, float], None]) -> RankLink | None:
    """A rank's end, or None if there is none to be had; the engine's steps order everything then."""
    try:
        return RankLink(path, rank, take)
    except (OSError, RuntimeError) as error:  # out of file descriptors, or of threads
        logger.warning("Rank %d is ordered by engine steps only, not over %s: %s", rank, path, error)
        return None


def _buffer(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)


def _socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
