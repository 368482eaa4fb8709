"""The decode engine's half inside vLLM's real scheduler, stepped by hand; the network is a list."""

from __future__ import annotations

import os
import queue
import select
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from disagg_connector import connector as facade
from disagg_connector import sending, streams
from disagg_connector.link import RankLink
from disagg_connector.ports import Outcome, Tally, WorkerReport, WriteJob
from disagg_connector.protocol import (
    WIRE_VERSION,
    Accepted,
    Address,
    Cancel,
    Commit,
    Committed,
    Grant,
    Hello,
    Load,
    Offer,
    Peer,
    Refused,
    Released,
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


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    monkeypatch.setattr(facade, "ControlChannel", Channel)
    made = Engine(os.environ["DISAGG_TEST_MODEL"])
    yield made
    made.scheduler.shutdown()


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


def test_a_load_covers_the_prompt_and_waits(engine: Engine) -> None:
    request, load = loading(engine)
    assert (load.request, load.num_tokens, load.start, len(load.blocks)) == ("cmpl-00-0", len(PROMPT), 0, 4)
    output = engine.step(received=(ID,))
    assert not output.num_scheduled_tokens
    assert engine.step().num_scheduled_tokens == {ID: 1}, "only the last prompt token is computed"
    engine.step()
    engine.step()
    assert request.is_finished()


def test_a_failed_load_is_computed_in_other_blocks(engine: Engine) -> None:
    _, load = loading(engine)
    total = engine.free + len(load.blocks)
    engine.half.scheduler.loads._fail(engine.half.scheduler.loads._turns[ID], "lost")
    output = engine.step(received=(ID,), failed=(ID,))
    assert output.kv_connector_metadata.orders.failed == [ID]
    output = engine.step()
    assert output.num_scheduled_tokens == {ID: len(PROMPT)}
    (new,) = output.scheduled_new_reqs
    assert not set(new.block_ids[0]) & set(load.blocks), "a late write could still hit the old blocks"
    engine.step()
    engine.step()
    deny_offer(engine)
    assert engine.free == total - len(load.blocks), "the old blocks are held"
    cancel, answer = engine.channel.take(Cancel)
    assert cancel == Cancel("prefill-boot", load.xid, "cmpl-00-0")
    answer(Released(wrote=False))
    assert engine.scheduler.has_requests(), "an answer keeps the engine stepping"
    engine.step()
    engine.step()
    assert engine.free == total


def refused_load(engine: Engine) -> Request:
    """A turn whose KV prefill has just refused to bring."""
    request = engine.add(ID, dict(PARAMS))
    engine.step()
    engine.welcome()
    engine.step()
    engine.step()
    _, answer = engine.channel.take(Load)
    answer(Refused("aborted", "prefill-boot"))
    engine.step(received=(ID,), failed=(ID,))
    return request


def test_a_refused_load_goes_on_at_once_and_holds_nothing(engine: Engine) -> None:
    request = refused_load(engine)
    assert engine.step().num_scheduled_tokens == {ID: len(PROMPT)}
    engine.step()
    engine.step()
    assert request.is_finished()
    deny_offer(engine)
    assert engine.free == BLOCKS - 1


def test_an_aborted_load_frees_its_blocks_when_the_writer_is_through(engine: Engine) -> None:
    _, load = loading(engine)
    engine.scheduler.finish_requests(ID, RequestStatus.FINISHED_ABORTED)
    assert engine.step(received=(ID,), failed=(ID,)).kv_connector_metadata.orders.failed == [ID]
    assert not engine.scheduler.requests
    assert engine.free == BLOCKS - 1 - len(load.blocks)
    _, answer = engine.channel.take(Cancel)
    answer(Released(wrote=False))
    engine.step()
    engine.step()
    assert engine.free == BLOCKS - 1


def computed_turn(engine: Engine) -> None:
    """A turn that decode has computed alone has ended, so prefill is taken to lack all of it."""
    refused_load(engine)
    for _ in range(3):
        engine.step()


def test_a_turns_end_is_written_and_committed_between_steps(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sending, "RESERVED_AT_MOST", 0.2)
    monkeypatch.setattr(sending, "RESERVED_SECONDS", 120.0)
    path = engine.step().kv_connector_metadata.orders.link
    orders: queue.Queue[WriteJob] = queue.Queue()
    rank = RankLink(path, 0, lambda job, deadline: orders.put(job))
    engine.channel.hear_ranks_until(lambda: bool(engine.half.link.is_ready))
    computed_turn(engine)
    offer, grant = engine.channel.take(Offer)
    assert engine.free == BLOCKS - 1 - 3, "its blocks are reserved"
    assert not engine.step().kv_connector_metadata.orders.link, "the ranks are there"

    grant(Grant(1, [7, 8], 0, 30.0))
    job = orders.get(timeout=120)
    assert (job.xid, len(job.local), job.remote) == (offer.xid, 2, (7, 8))
    rank.tell(offer.xid, Tally(1, 0, 1, 100, 0.001))
    engine.channel.hear_ranks_until(lambda: any(isinstance(m, Commit) for m, _ in engine.channel.sent))
    commit, answer = engine.channel.take(Commit)
    assert commit == Commit("prefill-boot", 0, offer.xid, True, True)
    answer(Committed(2))

    assert not engine.step().kv_connector_metadata.orders.writes, "it is under way already"
    assert engine.free == BLOCKS - 1 - 2, (
        "what prefill has not granted is free, the rest is until a step tells"
    )
    engine.half.scheduler.reported(WorkerReport(sent={offer.xid: Tally(1, 0, 1, 100, 0.001)}), set(), set())
    assert engine.free == BLOCKS - 1
    assert not any(isinstance(message, Commit) for message, _ in engine.channel.sent)
    rank.close()


def test_what_is_reserved_does_not_keep_a_reset_of_the_cache_from_success(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sending, "RESERVED_AT_MOST", 0.2)
    monkeypatch.setattr(sending, "RESERVED_SECONDS", 120.0)
    rank = RankLink(engine.step().kv_connector_metadata.orders.link, 0, lambda job, deadline: None)
    engine.channel.hear_ranks_until(lambda: bool(engine.half.link.is_ready))
    computed_turn(engine)
    assert engine.free == BLOCKS - 1 - 3
    assert engine.scheduler.reset_prefix_cache()
    assert engine.free == BLOCKS - 1
    rank.close()


def test_an_address_that_cannot_be_resolved_is_waited_for_only_shortly(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.add(ID, dict(PARAMS))
    engine.step()
    _, answer = engine.channel.take(Hello)
    answer(None)
    engine.step()
    assert engine.step().num_scheduled_tokens == {ID: len(PROMPT)}


@pytest.mark.parametrize(
    "params", [{"do_remote_prefill": True}, {"do_remote_decode": True, "disagg": 3}, "text", 5, [1]]
)
def test_malformed_params_are_as_if_absent(engine: Engine, params: Any) -> None:
    engine.add(ID, params)
    assert engine.step().num_scheduled_tokens == {ID: len(PROMPT)}


def test_a_prompt_whose_log_probabilities_are_wanted_is_computed_whole(engine: Engine) -> None:
    engine.add(ID, dict(PARAMS), prompt_logprobs=1)
    assert engine.step().num_scheduled_tokens == {ID: len(PROMPT)}
    assert not engine.channel.sent, "prefill is not asked for it"


def test_blocks_that_were_put_into_the_cache_are_hit_by_the_next_request(engine: Engine) -> None:
    pool = engine.half.scheduler.context.pool
    hashes = Request("other", list(PROMPT), SamplingParams(), None, block_hasher=engine.hasher).block_hashes
    blocks = pool.take(len(hashes), 0)
    for index, block_hash in enumerate(hashes):
        pool.insert(block_hash, blocks[index], (index + 1) * BLOCK)
    pool.unpin(blocks)
    request = engine.add(ID, None)
    assert engine.step().num_scheduled_tokens == {ID: len(PROMPT) - len(hashes) * BLOCK}
    assert engine.scheduler.kv_cache_manager.get_block_ids(request.request_id)[0][: len(hashes)] == blocks


def test_drafts_that_were_rejected_are_not_valid() -> None:
    drafting = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
    with running(speculative_config=drafting) as engine:
        request = engine.add(ID, None)
        request.max_tokens = 20
        engine.step()
        view = engine.half.view(request)
        assert view.num_valid_tokens == len(PROMPT)
        engine.scheduler.update_draft_token_ids(DraftTokenIds([ID], [[1, 2, 3]]))
        output = engine.scheduler.schedule()
        assert output.num_scheduled_tokens == {ID: 4}, "the last token and three drafts"
        assert view.num_valid_tokens == len(PROMPT), "nothing of a step that is in flight"
        engine.process(output, sampled=(1, 9))
        assert request.num_tokens == len(PROMPT) + 3, "one draft was right"
        assert view.num_valid_tokens == request.num_tokens - 1


def test_steps_that_overlap_make_nothing_valid_before_their_time() -> None:
    with running(kind=AsyncScheduler, async_scheduling=True) as engine:
        request = engine.add(ID, None)
        view = engine.half.view(request)
        first = engine.scheduler.schedule()
        second = engine.scheduler.schedule()
        assert first.num_scheduled_tokens == {ID: len(PROMPT)}
        assert second.num_scheduled_tokens == {ID: 1}, "scheduled while the first is in flight"
        assert view.num_valid_tokens == 0
        engine.process(first)
        assert view.num_valid_tokens == len(PROMPT)
        engine.process(second)
        assert view.num_valid_tokens == request.num_tokens - 1 == len(PROMPT) + 1


def test_chunks_of_a_prompt_become_valid_one_by_one() -> None:
    with running(max_num_batched_tokens=32, max_num_seqs=4) as engine:
        view = engine.half.view(engine.add(ID, None))
        for valid in (32, 64, 96):
            engine.step(sampled=())
            assert view.num_valid_tokens == valid
        engine.step()
        assert view.num_valid_tokens == len(PROMPT)


def test_the_fingerprint_says_what_the_kv_depends_on(engine: Engine) -> None:
    parts = engine.half.identity.parts()
    assert "rope_theta" in parts["rope"]
    assert len(parts["weights"]) == 32, "the model's files have been looked at"
    assert parts["generation"] == "boot+0"
    assert "max_model_len" not in parts, "prefill and decode may differ in that"
    config = engine.half.vllm_config
    config.model_config.hf_text_config.rope_parameters = {"rope_theta": 1.0, "rope_type": "default"}
    again = engine.half.compat.fingerprint(config, engine.half.compat.read_checkpoint(config))
    assert again.parts()["rope"] != parts["rope"]


@pytest.mark.parametrize(
    ("method", "part"),
    [("ngram", ""), ("suffix", ""), ("eagle3", "eagle3:drafter:main"), ("mtp", "mtp:drafter:main")],
)
def test_a_drafter_is_in_the_fingerprint_if_its_kv_is_in_the_cache(
    engine: Engine, method: str, part: str
) -> None:
    config = engine.half.vllm_config
    drafter = SimpleNamespace(model="drafter", revision="main")
    config.speculative_config = SimpleNamespace(method=method, draft_model_config=drafter)
    again = engine.half.compat.fingerprint(config, engine.half.compat.read_checkpoint(config))
    assert again.parts()["draft"] == part


def test_an_idle_engine_asks_for_no_steps(engine: Engine) -> None:
    assert not engine.scheduler.has_requests()
    engine.add(ID, None)
    for _ in range(5):
        engine.step()
    assert not engine.scheduler.has_requests()


@pytest.mark.parametrize("state", ["loaded", "local"])
@pytest.mark.parametrize(("kind", "ahead"), [(Scheduler, 0), (AsyncScheduler, 1)], ids=["sync", "async"])
def test_a_stream_brings_only_blocks_of_steps_that_are_over(
    kind: type[Scheduler], ahead: int, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With steps in flight, too: what is offered has been computed, and what is written holds what it is said to."""
    monkeypatch.setattr(streams, "STEPS_APART", 1)
    look_in = streams.Streams._look_in
    monkeypatch.setattr(streams.Streams, "_look_in", lambda self, stream, tokens: look_in(self, stream, 1))
    extra = {"writeback_mode": "streaming", "writeback_batch_blocks": 1}
    with running(kind=kind, extra=extra, async_scheduling=kind is AsyncScheduler) as engine:
        request, _ = loading(engine)
        request.max_tokens = 6 * BLOCK
        if state == "local":
            engine.half.scheduler.loads._fail(engine.half.scheduler.loads._turns[ID], "lost")
        engine.step(received=(ID,), failed=(ID,) if state == "local" else ())
        computed = len(PROMPT) - 1 if state == "loaded" else 0
        offered = written = 0
        in_flight: deque[Any] = deque()
        for _ in range(7 * BLOCK):
            in_flight.append(engine.scheduler.schedule())
            for job in in_flight[-1].kv_connector_metadata.orders.writes:
                own = engine.scheduler.kv_cache_manager.get_block_ids(ID)[0]
                assert job.local == tuple(own[offered - 1 : offered])
                assert offered * BLOCK <= computed
                written += 1
            for message, answer in [sent for sent in engine.channel.sent if isinstance(sent[0], Offer)]:
                engine.channel.sent.remove((message, answer))
                offered = message.skip + len(message.hashes)
                assert offered * BLOCK <= computed, "its last token is computed by a step that is over"
                assert message.hashes == request.block_hashes[message.skip : offered]
                answer(Refused("have", "prefill-boot") if offered < 6 else Grant(message.first, [7], 0, 30.0))
            if written:
                break
            if len(in_flight) > ahead:
                output = in_flight.popleft()
                computed += output.num_scheduled_tokens.get(ID, 0)
                engine.process(output)
    assert written == 1, f"{offered} blocks were offered, {computed} tokens are computed"
