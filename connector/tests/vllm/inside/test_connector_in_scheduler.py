"""A turn of the decode engine inside vLLM's real scheduler: its load, its end, what it holds."""

from __future__ import annotations

import queue
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.v1.request import Request, RequestStatus

from connector.tests.vllm.stepped import (
    BLOCK,
    BLOCKS,
    ID,
    PARAMS,
    PROMPT,
    Engine,
    deny_offer,
    loading,
)
from disagg_connector import sending
from disagg_connector.link import RankLink
from disagg_connector.ports import Tally, WorkerReport, WriteJob
from disagg_connector.protocol import (
    Cancel,
    Commit,
    Committed,
    Grant,
    Hello,
    Load,
    Offer,
    Refused,
    Released,
)


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


def test_an_idle_engine_asks_for_no_steps(engine: Engine) -> None:
    assert not engine.scheduler.has_requests()
    engine.add(ID, None)
    for _ in range(5):
        engine.step()
    assert not engine.scheduler.has_requests()
