"""Starts vLLM servers as forks of one process that has imported vLLM. Runs on the engine bundle's interpreter.

Importing vLLM is fifteen seconds of CPU in each of a server's processes; a test run starts a hundred of them. Here it is
paid once. What runs in a fork is `vllm serve` all the same, with arguments, environment, folder and log of its own.

    python3 -P e2e/engine_parent.py SOCKET     # prints "ready", ends when standard input does

A connection on SOCKET is one server: it sends `Order` as a line of JSON, is told the server's process as a line, and at
the server's end its exit status (negative: the signal) as another.
"""

import contextlib
import importlib
import json
import multiprocessing.context
import os
import select
import signal
import socket
import sys
from typing import TypedDict

IMPORTED = (
    "transformers.models.auto.tokenization_auto",
    "vllm.entrypoints.cli.main",
    "vllm.entrypoints.cli.serve",
    "vllm.entrypoints.openai.api_server",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.models.qwen3",
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker",
)


class Order(TypedDict):
    """What a server is given."""

    arguments: list[str]
    """Of the vllm command, from `serve` on."""
    environment: dict[str, str]
    """All of it. What an interpreter reads when it starts (PYTHONHASHSEED) is the parent's."""
    folder: str
    log: str


def main() -> None:
    """Import, then fork a server for each connection until standard input ends."""
    for module in IMPORTED:
        importlib.import_module(module)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how a keeper ended
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(sys.argv[1])
        listener.listen()
        print("ready", flush=True)
        while True:
            readable, _, _ = select.select([listener, sys.stdin], [], [])
            if sys.stdin in readable:
                return
            connection, _ = listener.accept()
            with connection:
                if os.fork() == 0:
                    listener.close()
                    _keep(connection)


def _keep(connection: socket.socket) -> None:
    """In a process between the parent and the server: start it, wait for it, tell its status."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    order: Order = json.loads(connection.makefile().readline())
    server = os.fork()
    if server == 0:
        _serve(order, connection)
    status = os.waitstatus_to_exitcode(os.waitpid(server, 0)[1])
    with contextlib.suppress(OSError):  # the harness may be gone
        connection.sendall(f"{status}\n".encode())
    os._exit(0)


def _serve(order: Order, connection: socket.socket) -> None:
    os.setsid()
    os.chdir(order["folder"])
    log = os.open(order["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.close(log)
    os.close(nothing)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    os.environ.clear()
    os.environ.update(order["environment"])
    sys.path[:0] = filter(None, order["environment"].get("PYTHONPATH", "").split(os.pathsep))
    sys.argv = ["vllm", *order["arguments"]]
    # vLLM asks for `spawn` on CPU, which would import everything again in the processes below; on GPUs it forks.
    contexts = multiprocessing.context._concrete_contexts  # type: ignore[attr-defined]
    contexts["spawn"] = contexts["fork"]
    connection.sendall(f"{os.getpid()}\n".encode())
    connection.close()

    from vllm.entrypoints.cli.main import main as vllm

    vllm()
    sys.exit()  # not back into the parent's loop


if __name__ == "__main__":
    main()
