"""Which of a request's tokens have KV that may be used, and which engines may use it, inside vLLM's real scheduler."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import DraftTokenIds

from connector.tests.vllm.stepped import (
    BLOCK,
    ID,
    PARAMS,
    PROMPT,
    Engine,
    loading,
    running,
)
from disagg_connector import streams
from disagg_connector.protocol import (
    Grant,
    Offer,
    Refused,
)


def test_a_prompt_whose_log_probabilities_are_wanted_is_computed_whole(engine: Engine) -> None:
    engine.add(ID, dict(PARAMS), prompt_logprobs=1)
    assert engine.step().num_scheduled_tokens == {ID: len(PROMPT)}
    assert not engine.channel.sent, "prefill is not asked for it"


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
