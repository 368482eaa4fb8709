"""What engines can be asked or set to do beside plain turns, on real engines, compared with a plain one bit for bit.

One pair for all of it: prompts take several steps on both sides, decode drafts, LoRA is on, and prefill admits shorter
prompts than decode.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from connector.tests.engine.adapter import write_adapter
from connector.tests.engine.conversation import (
    BLOCK,
    INSERTED,
    MOST_TURNS,
    RECOMPUTED,
    Conversation,
    becomes,
    body,
    complete,
    counter,
    decode_params,
    is_written_back,
    post,
    prefill_params,
    tokens_of,
    turn,
    wait_until_free,
    within,
)
from connector.tests.engine.conversation import spec as connector_spec
from e2e.engines import Engine, EngineSpec, running_all

pytestmark = pytest.mark.engine

Trio = dict[str, Engine]
STEP_TOKENS = 96
DRAFTING = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}


@pytest.fixture(scope="module")
def trio(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trio]:
    folder = tmp_path_factory.mktemp("coverage")
    adapter = write_adapter(folder / "adapter")
    lora = ("--enable-lora", "--max-lora-rank", "8", "--lora-modules", f"adapted={adapter}")
    told = ("--enable-prompt-tokens-details",)
    several_steps = ("--max-num-batched-tokens", str(STEP_TOKENS))
    drafting = ("--speculative-config", json.dumps(DRAFTING))
    prefill, decode = connector_spec("prefill", model), connector_spec("decode", model)
    specs = {
        "prefill": replace(prefill, max_model_len=1536, extra_args=(*lora, *several_steps, *told)),
        "decode": replace(decode, extra_args=(*lora, *several_steps, *drafting)),
        "plain": EngineSpec(model=model, kv_blocks=1024, extra_args=lora),
    }
    with running_all(specs, folder) as engines:
        yield engines


def answer(trio: Trio, asked: dict[str, Any]) -> dict[str, Any]:
    """Both legs of a turn; decode's answer."""
    request_id = uuid.uuid4().hex
    first = {**asked, "max_tokens": 1, "kv_transfer_params": prefill_params(trio["decode"])}
    second = {**asked, "kv_transfer_params": decode_params(trio["prefill"])}
    with ThreadPoolExecutor(2) as legs:
        leg = legs.submit(post, trio["prefill"], first, request_id)
        answered = legs.submit(post, trio["decode"], second, request_id).result()
        leg.result()
    return answered


def plainly(trio: Trio, asked: dict[str, Any]) -> dict[str, Any]:
    return post(trio["plain"], asked, uuid.uuid4().hex)


def test_prompts_of_several_steps_and_answers_that_were_drafted(trio: Trio) -> None:
    prefill, decode = trio["prefill"], trio["decode"]
    mine, plain = Conversation(60, system_tokens=400), Conversation(60, system_tokens=400)

    def one_turn() -> None:
        got = mine.ask(lambda prompt, n: turn(prefill, decode, prompt, n))
        assert got == plain.ask(lambda prompt, n: complete(trio["plain"], prompt, n))

    def exchanges() -> bool:
        recomputed = counter(decode, RECOMPUTED)
        return is_written_back(decode, one_turn) and counter(decode, RECOMPUTED) == recomputed

    for _ in range(3):
        one_turn()
    within(MOST_TURNS, "a turn is pushed and written back", exchanges)
    assert hits(prefill, mine.history) == whole_blocks(mine.history)
    drafted = counter(decode, "vllm:spec_decode_num_draft_tokens_total")
    accepted = counter(decode, "vllm:spec_decode_num_accepted_tokens_total")
    assert 0 < accepted < drafted, "some drafts were right and some wrong"
    assert len(mine.history) > 6 * STEP_TOKENS
    assert complete(prefill, mine.history, 20) == complete(trio["plain"], mine.history, 20)


def whole_blocks(history: list[int]) -> int:
    """Tokens of a finished turn that can be written back: its last token's KV was never computed."""
    return (len(history) - 1) // BLOCK * BLOCK


def hits(engine: Engine, prompt: list[int], **options: Any) -> int:
    """How many tokens of a prompt the engine had cached, as it says itself; now it has all of them."""
    answered = post(engine, {**body(prompt, 1), **options}, uuid.uuid4().hex)
    return int(answered["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_what_was_written_back_under_one_salt_is_not_hit_under_another(trio: Trio) -> None:
    prompt = Conversation(61).history
    asked = {**body(prompt, 70), "cache_salt": "tenant-a"}
    said = tokens_of(plainly(trio, asked))
    before = counter(trio["prefill"], INSERTED)

    def is_inserted() -> bool:
        assert tokens_of(answer(trio, asked)) == said
        return becomes(lambda: counter(trio["prefill"], INSERTED) >= before + 2 * BLOCK)

    within(MOST_TURNS, "the answer is written back", is_inserted)
    history = prompt + said
    assert hits(trio["prefill"], history, cache_salt="tenant-b") == 0
    assert hits(trio["prefill"], history) == 0
    assert hits(trio["prefill"], history, cache_salt="tenant-a") == whole_blocks(history)


def test_several_answers_to_one_prompt(engines: dict[str, Engine]) -> None:
    """By the engines without drafting: with it, vLLM's sampler on CPU does not know `top_k`."""
    # Not greedy for vLLM, which refuses several greedy answers, and yet with one outcome.
    asked = {**body(Conversation(62).history, 40), "n": 2, "temperature": 1, "top_k": 1}
    got, want = answer(engines, asked), post(engines["reference"], asked, uuid.uuid4().hex)
    assert len(got["choices"]) == 2
    for choice, expected in zip(got["choices"], want["choices"], strict=True):
        assert choice["token_ids"] == expected["token_ids"]


def test_an_adapter_is_never_mixed_with_the_model_below_it(trio: Trio) -> None:
    conversation = Conversation(63)
    said = {}
    for name in ("adapted", "test", "adapted"):
        asked = {**body(conversation.history, 70), "model": name}
        said[name] = tokens_of(answer(trio, asked))
        assert said[name] == tokens_of(plainly(trio, asked)), name
    assert said["adapted"] != said["test"], "the adapter changes nothing, so this proves nothing"
    for name, answered in said.items():
        asked = {**body(conversation.history + answered, 20), "model": name}
        assert tokens_of(answer(trio, asked)) == tokens_of(plainly(trio, asked)), name


def test_log_probabilities_of_the_prompt_are_of_this_prompt(trio: Trio) -> None:
    asked = {**body(Conversation(64).history, 4), "prompt_logprobs": 1}
    got, want = (
        each["choices"][0]["prompt_logprobs"] for each in (answer(trio, asked), plainly(trio, asked))
    )
    assert len(got) == len(want)
    for mine, plain in zip(got[1:], want[1:], strict=True):
        assert mine.keys() == plain.keys()
        assert all(mine[key]["logprob"] == pytest.approx(plain[key]["logprob"], abs=1e-3) for key in mine)


def test_answers_of_a_given_form(trio: Trio) -> None:
    asked = {**body(Conversation(65).history, 40), "structured_outputs": {"regex": "[0-9]{64}"}}
    got = answer(trio, asked)["choices"][0]
    assert got["token_ids"] == plainly(trio, asked)["choices"][0]["token_ids"]
    assert got["text"].isdigit()


def test_nothing_is_held_afterwards(trio: Trio) -> None:
    wait_until_free(trio["prefill"])
    wait_until_free(trio["decode"])
