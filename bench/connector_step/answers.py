"""Runs in an engine's interpreter: how soon `FastAnswers` answers while the engine thread is busy; prints JSON.

The real control channel over loopback. The asking process is another one. Engine threads: idle; computing in
Python without a pause, which is the worst that the interpreter's lock allows; and like an engine, with pieces of
Python between waits for the device.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from bench.connector_step.engines import fingerprint
from disagg_connector.auth import PlainCodec
from disagg_connector.config import ConnectorConfig
from disagg_connector.context import Board
from disagg_connector.control import ControlChannel
from disagg_connector.protocol import Address, Hello, Peer
from disagg_connector.scheduler import FastAnswers, Identity
from e2e.ports import free_port

QUESTIONS = 300
INTERVAL = 0.01
LIMIT = 10.0


def ask(address: Address, told: Connection) -> None:
    """Another process: one question at a time; sends the milliseconds that each answer took."""
    import zmq

    codec = PlainCodec()
    client: Any = zmq.Context().socket(zmq.DEALER)
    client.connect(f"tcp://{address.host}:{address.control_port}")
    took = []
    for number in range(QUESTIONS + 1):
        start = time.perf_counter()
        client.send(codec.write_request(number + 1, Hello(2)))
        if not client.poll(LIMIT * 1000):
            raise TimeoutError(f"question {number} was not answered within {LIMIT} s")
        client.recv_multipart()
        took.append((time.perf_counter() - start) * 1000)
        time.sleep(INTERVAL)
    # The first one includes the connection.
    told.send(took[1:])


def idle(until: Callable[[], bool]) -> None:
    while not until():
        time.sleep(0.002)


def computing(until: Callable[[], bool]) -> None:
    number = 0
    while number % 100_000 or not until():
        number += 1


def stepping(until: Callable[[], bool]) -> None:
    """Steps of 10 ms: 3 ms of Python (scheduling, sampling), the rest outside the interpreter's lock."""
    while not until():
        end = time.perf_counter() + 0.003
        while time.perf_counter() < end:
            pass
        end = time.perf_counter() + 0.007
        while time.perf_counter() < end:
            hashlib.sha256(b"x" * 200_000)


LOADS: dict[str, Callable[[Callable[[], bool]], None]] = {
    "waits": idle,
    "steps of 10 ms, 3 of them Python": stepping,
    "is in Python all the time": computing,
}


def measure(load: str) -> dict[str, Any]:
    address = Address("127.0.0.1", free_port())
    made = fingerprint()
    identity = Identity(lambda: made, lambda digest: Peer("e", address, "127.0.0.1", 5600, 1, digest))
    fast = FastAnswers(ConnectorConfig(role="prefill"), "e", identity, Board(time.monotonic))
    assert identity.ready
    channel = ControlChannel(address, fast, lambda: None, PlainCodec())
    channel.start()
    here, there = multiprocessing.Pipe()
    asking = multiprocessing.get_context("spawn").Process(target=ask, args=(address, there))
    asking.start()
    there.close()
    LOADS[load](lambda: here.poll() or not asking.is_alive())
    try:
        took = sorted(here.recv())
    finally:
        asking.join(LIMIT)
        channel.close()
    return {
        "load": load,
        "median_ms": round(statistics.median(took), 3),
        "p99_ms": round(took[int(len(took) * 0.99)], 3),
        "max_ms": round(took[-1], 3),
    }


def main() -> None:
    print(json.dumps({"questions": QUESTIONS, "runs": [measure(load) for load in LOADS]}))


if __name__ == "__main__":
    main()
