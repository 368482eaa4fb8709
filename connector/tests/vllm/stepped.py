"""vLLM's real scheduler with the connector of a decode engine, stepped by hand; the network is a list."""

from __future__ import annotations

import os
import select
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from disagg_connector import connector as facade
from disagg_connector.ports import Outcome
from disagg_connector.protocol import (
    WIRE_VERSION,
    Accepted,
    Address,
    Hello,
    Load,
    Offer,
    Peer,
    Refused,
    Reply,
    Welcome,
)

BLOCK, BLOCKS = 32, 40
PREFILL = Address("10.0.0.9", 5700)
PROMPT = list(range(5, 95)) + [7] * 10  # three full blocks and a bit


class Channel:
    """Stands in for the control channel: tests answer what was sent."""

    def __init__(self, address: Address, fast: Any, wake: Any, codec: Any) -> None:
        self.fast = fast
        self.sent: list[tuple[Any, Callable[[Reply | None], None]]] = []
        self.at_once: dict[int, Callable[[Reply], None]] = {}
        self.watched: dict[int, Callable[[], None]] = {}
        self.events: list[Any] = []

    def start(self) -> None: ...

    def close(self) -> None: ...

    def watch(self, fd: int, on_readable: Any) -> None:
        self.watched[fd] = on_readable
        if on_readable is None:
            del self.watched[fd]

    def hear_ranks_until(self, what: Callable[[], bool]) -> None:
        """The control thread's part of the link."""
        while not what():
            ready, _, _ = select.select(list(self.watched), [], [], 120)
            assert ready, "no rank says anything"
            for fd in ready:
                self.watched[fd]()

    def request(self, to: Address, message: Any, timeout: float, on_reply: Any, at_once: Any = None) -> None:
        self.sent.append((message, on_reply))
        if at_once is not None:
            self.at_once[id(on_reply)] = at_once

    def answer(self, token: Any, reply: Any) -> None:
        raise AssertionError("nobody has asked anything")

    def probe(self, address: Address, on_refused: Any) -> None: ...

    def drain(self) -> list[Any]:
        events, self.events = self.events, []
        return events

    @property
    def has_events(self) -> bool:
        return bool(self.events)

    def wake_at(self, when: float | None) -> None: ...

    def take(self, kind: type) -> tuple[Any, Callable[[Reply | None], None]]:
        """The first message of a kind that was sent, and how to answer it."""
        index = next(i for i, (message, _) in enumerate(self.sent) if isinstance(message, kind))
        message, on_reply = self.sent.pop(index)

        def answer(reply: Reply | None) -> None:
            if reply is not None and id(on_reply) in self.at_once:
                self.at_once[id(on_reply)](reply)
            self.events.append(Outcome(lambda: on_reply(reply)))

        return message, answer


class Engine:
    """vLLM's scheduler with the connector, and a worker that does nothing by itself."""

    def __init__(
        self, model: str, kind: type[Scheduler] = Scheduler, extra: Any = None, **arguments: Any
    ) -> None:
        transfer = {
            "kv_connector": "BidirectionalPushConnector",
            "kv_connector_module_path": "disagg_connector.connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"role": "decode", "load_timeout_seconds": 60, **(extra or {})},
        }
        plain = {"model": model, "dtype": "float32", "block_size": BLOCK, "max_model_len": 512}
        config = EngineArgs(**plain, kv_transfer_config=transfer, **arguments).create_engine_config()
        config.cache_config.num_gpu_blocks = BLOCKS
        config.cache_config.kv_cache_layout = "LBHNC"
        kv_cache_utils.init_none_hash(get_hash_fn_by_name("sha256"))
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=32, dtype=torch.float32)
        groups = [KVCacheGroupSpec(["layer"], spec)]
        kv_cache = KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=groups)
        self.scheduler = kind(config, kv_cache, StructuredOutputManager(config), BLOCK, log_stats=True)
        self.half: Any = self.scheduler.connector._s
        self.channel: Channel = self.half.channel
        self.hasher = kv_cache_utils.get_request_block_hasher(BLOCK, get_hash_fn_by_name("sha256"))
        self.fingerprint = self.half.identity.peer().fingerprint

    @property
    def free(self) -> int:
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def add(self, request_id: str, params: Any, **options: Any) -> Request:
        extra = {"kv_transfer_params": params}
        sampling = SamplingParams(max_tokens=3, ignore_eos=True, extra_args=extra, **options)
        request = Request(request_id, list(PROMPT), sampling, None, block_hasher=self.hasher)
        self.scheduler.add_request(request)
        return request

    def step(
        self, *, received: tuple[str, ...] = (), failed: tuple[str, ...] = (), sampled: tuple[int, ...] = (1,)
    ) -> Any:
        """One step; returns the scheduler's output. Every scheduled request samples token 1."""
        output = self.scheduler.schedule()
        self.process(output, received, failed, sampled)
        return output

    def process(
        self,
        output: Any,
        received: tuple[str, ...] = (),
        failed: tuple[str, ...] = (),
        sampled: tuple[int, ...] = (1,),
    ) -> None:
        """What the workers make of a step."""
        ids = list(output.num_scheduled_tokens)
        connector_output = KVConnectorOutput(finished_recving=set(received), failed_recving=set(failed))
        result = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
            sampled_token_ids=[list(sampled) for _ in ids],
            kv_connector_output=connector_output,
        )
        self.scheduler.update_from_output(output, result)

    def welcome(self) -> None:
        _, answer = self.channel.take(Hello)
        peer = Peer("prefill-boot", PREFILL, "10.0.0.9", 5600, 1, self.fingerprint)
        answer(Welcome(WIRE_VERSION, "prefill", peer, {}))


def deny_offer(engine: Engine) -> None:
    """The turn's end: prefill has all of it already."""
    _, answer = engine.channel.take(Offer)
    answer(Refused("have", "prefill-boot"))
    engine.step()


PARAMS = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "disagg": {"version": 1, "prefill": {"host": PREFILL.host, "control_port": PREFILL.control_port}},
}
ID = "cmpl-00-0-12345678"


@contextmanager
def running(**arguments: Any) -> Iterator[Engine]:
    """An engine of other settings."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(facade, "ControlChannel", Channel)
        made = Engine(os.environ["DISAGG_TEST_MODEL"], **arguments)
        try:
            yield made
        finally:
            made.scheduler.shutdown()


def loading(engine: Engine) -> tuple[Request, Load]:
    """A request whose blocks prefill has been told to write into."""
    request = engine.add(ID, dict(PARAMS))
    engine.step()
    assert request.status == RequestStatus.WAITING, "the address is not resolved yet"
    engine.welcome()
    # The answer is read while the next step is built, and used in the one after it.
    engine.step()
    engine.step()
    assert request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
    load, answer = engine.channel.take(Load)
    answer(Accepted())
    return request, load
