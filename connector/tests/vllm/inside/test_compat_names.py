"""The private names of vLLM do what the connector takes them for."""

from __future__ import annotations

import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm
from vllm import SamplingParams
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.lora.request import LoRARequest
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.request import Request, RequestStatus

import disagg_connector
from disagg_connector.compat import SUPPORTED, load
from disagg_connector.connector import BidirectionalPushConnector

BLOCK = 16
compat = load()


@pytest.fixture(autouse=True)
def hash_seed() -> None:
    kv_cache_utils.init_none_hash(get_hash_fn_by_name("sha256"))


def request(
    tokens: list[int], request_id: str = "r", sampling: SamplingParams | None = None, **options: Any
) -> Request:
    hasher = kv_cache_utils.get_request_block_hasher(BLOCK, get_hash_fn_by_name("sha256"))
    sampling = sampling or SamplingParams(max_tokens=4)
    return Request(request_id, tokens, sampling, None, block_hasher=hasher, **options)


def view(*args: Any, **options: Any) -> Any:
    return compat.EngineRequest(request(*args, **options), BLOCK)


def test_the_vllm_that_is_tested_is_the_one_that_was_meant() -> None:
    series = os.environ["DISAGG_TEST_VLLM"]
    assert vllm.__version__.startswith(f"{series}.")
    assert compat.__name__ == f"disagg_connector.compat.{SUPPORTED[series]}"


def test_every_name_that_the_connector_asks_for_is_there() -> None:
    package = Path(disagg_connector.__file__).parent
    asked = set()
    for path in package.glob("*.py"):
        asked |= set(re.findall(r"(?:\bcompat|\bload\(\))\.([A-Za-z]\w*)\b", path.read_text()))
    asked.discard("refusals")
    assert len(asked) > 10
    assert not {name for name in asked if not hasattr(compat, name)}


# --- The block pool -------------------------------------------------------------------------------


def test_taken_blocks_are_owned_until_unpinned() -> None:
    pool = compat.EnginePool(BlockPool(10, True, BLOCK))
    assert (pool.total, pool.free()) == (9, 9)
    taken = pool.take(4, 0)
    assert pool.free() == 5
    pool.pin(taken[:1])
    pool.unpin(taken)
    assert pool.free() == 8, "one is still pinned"
    pool.unpin(taken[:1])
    assert pool.free() == 9


def test_inserted_blocks_are_hit_by_vllm_and_evicted_from_their_tail() -> None:
    block_pool = BlockPool(10, True, BLOCK)
    pool = compat.EnginePool(block_pool)
    hashes = view(list(range(64))).hashes
    blocks = pool.take(4, 0)
    for index, block_hash in enumerate(hashes):
        pool.insert(block_hash, blocks[index], (index + 1) * BLOCK)
    pool.unpin(blocks)
    assert [pool.find(block_hash) for block_hash in hashes] == blocks
    for block_hash, block in zip(hashes, blocks, strict=True):
        hit = block_pool.get_cached_block(block_hash, [0])
        assert hit is not None
        assert hit[0].block_id == block
    pool.take(6, 0)
    found = [pool.find(block_hash) for block_hash in hashes]
    assert found == [*blocks[:3], None], "the tail goes first, the prefix stays reachable"


def test_pinned_blocks_are_not_evicted() -> None:
    pool = compat.EnginePool(BlockPool(4, True, BLOCK))
    block_hash = view(list(range(16))).hashes[0]
    (block,) = pool.take(1, 0)
    pool.insert(block_hash, block, BLOCK)
    pool.unpin([block])
    pool.pin([block])
    with pytest.raises(ValueError, match="Cannot get 3 free blocks"):
        pool.take(3, 0)
    assert pool.find(block_hash) == block


def test_a_stamp_tells_one_publication_of_a_block_from_another() -> None:
    block_pool = BlockPool(2, True, BLOCK)  # one block besides the null block
    pool = compat.EnginePool(block_pool)
    block_hash = view(list(range(16))).hashes[0]
    (block,) = pool.take(1, 0)
    assert pool.stamps([block]) == [None]
    pool.insert(block_hash, block, BLOCK)
    ((stamp,), (held,)) = pool.stamps([block]), pool.held([block_hash])[1]
    assert stamp is held is not None
    pool.unpin([block])
    pool.pin([block])
    pool.unpin([block])
    assert pool.stamps([block])[0] is stamp, "cached all the time"
    assert pool.take(1, 0) == [block]
    assert pool.stamps([block]) == [None]
    pool.insert(block_hash, block, BLOCK)
    assert pool.find(block_hash) == block
    assert pool.stamps([block])[0] is not stamp, "the same hash in the same block, but another time"
    pool.unpin([block])
    (later,) = pool.stamps([block])
    block_pool.reset_prefix_cache()
    assert pool.stamps([block])[0] is not later


def test_a_cache_reset_is_announced_before_it_is_tried_and_after_it_is_done() -> None:
    block_pool = BlockPool(10, True, BLOCK)
    pool = compat.EnginePool(block_pool)
    reserve, request = pool.take(3, 0), pool.take(1, 0)
    done: list[bool] = []

    def give_back() -> None:
        pool.unpin(reserve)
        reserve.clear()

    compat.on_cache_reset(block_pool, give_back, lambda: done.append(True))
    assert not block_pool.reset_prefix_cache(), "a request holds a block"
    assert not done
    pool.unpin(request)
    assert block_pool.reset_prefix_cache(), "blocks that the hook gave back must not make it fail"
    assert done


def test_a_pool_is_pristine_while_nothing_is_used_or_cached() -> None:
    pool = compat.EnginePool(BlockPool(10, True, BLOCK))
    assert pool.pristine
    (block,) = pool.take(1, 0)
    assert not pool.pristine
    pool.insert(view(list(range(16))).hashes[0], block, BLOCK)
    pool.unpin([block])
    assert not pool.pristine, "it can be hit"


# --- Requests -------------------------------------------------------------------------------------


def test_a_prompts_digest_is_the_same_for_the_same_prompt_alone() -> None:
    prompt = list(range(40))
    digest = view(prompt).prompt_digest()
    assert len(digest) == 32
    assert view(prompt, request_id="other").prompt_digest() == digest
    assert view([*prompt[:-1], 99]).prompt_digest() != digest, "the partial block counts"
    assert view([99, *prompt[1:]]).prompt_digest() != digest
    assert view(prompt[:-1]).prompt_digest() != digest
    assert view(prompt, cache_salt="s").prompt_digest() != digest


def test_a_prompt_shorter_than_a_block_has_a_digest_with_its_salt() -> None:
    assert view([1, 2], cache_salt="s").prompt_digest() != view([1, 2]).prompt_digest()


def test_generated_tokens_do_not_change_the_prompts_digest() -> None:
    made = request(list(range(40)))
    digest = compat.EngineRequest(made, BLOCK).prompt_digest()
    made.append_output_token_ids([5] * 20)
    assert compat.EngineRequest(made, BLOCK).prompt_digest() == digest


def test_tokens_in_flight_are_not_valid() -> None:
    made = request(list(range(40)))
    made.num_computed_tokens, made.num_in_flight_tokens = 33, 1
    assert compat.EngineRequest(made, BLOCK).num_valid_tokens == 32


def test_loras_are_not_exchanged() -> None:
    assert compat.is_exchangeable(request([1]))
    assert not compat.is_exchangeable(request([1], lora_request=LoRARequest("l", 1, "/l")))


def test_prompt_embeddings_are_not_exchanged() -> None:
    assert not compat.is_exchangeable(request([1, 2], prompt_embeds=torch.zeros(2, 4)))


def test_what_wants_to_know_about_every_prompt_token_is_computed() -> None:
    asked = request([1, 2], sampling=SamplingParams(prompt_logprobs=1))
    assert not compat.is_exchangeable(asked), "KV that came from elsewhere has no log probabilities"


def test_prompts_that_are_not_complete_are_not_exchanged() -> None:
    assert not compat.is_exchangeable(request([1], resumable=True))


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (RequestStatus.FINISHED_STOPPED, "complete"),
        (RequestStatus.FINISHED_LENGTH_CAPPED, "complete"),
        (RequestStatus.FINISHED_ABORTED, "aborted"),
        (RequestStatus.FINISHED_ERROR, "other"),
    ],
)
def test_how_a_request_ended(status: RequestStatus, kind: str) -> None:
    assert compat.finish_kind(SimpleNamespace(status=status)) == kind


# --- Start ----------------------------------------------------------------------------------------


def test_the_waker_finds_the_engine_that_constructs_it() -> None:
    class EngineCoreProc:
        def __init__(self) -> None:
            self.received: list[Any] = []
            self.input_queue = SimpleNamespace(put_nowait=self.received.append)
            self.wake = self.make()

        def make(self) -> Any:
            return compat.find_waker()

    engine = EngineCoreProc()
    engine.wake()
    (entry,) = engine.received
    assert entry[0].name == "WAKEUP"


def test_an_engine_without_an_input_queue_has_no_waker() -> None:
    assert compat.find_waker() is None


def test_nothing_of_the_connectors_interface_is_left_abstract() -> None:
    assert issubclass(BidirectionalPushConnector, KVConnectorBase_V1)
    assert not BidirectionalPushConnector.__abstractmethods__
