"""Reading the engines' metrics, and telling when a turn's counters are final."""

import pytest

from e2e.demo.counters import Counters, has_settled, read_counters

ENGINE = 'engine="0",model_name="smollm2"'
PREFILL = f"""\
# HELP vllm:prompt_tokens_by_source_total Number of prompt tokens by source.
# TYPE vllm:prompt_tokens_by_source_total counter
vllm:prompt_tokens_by_source_total{{{ENGINE},source="local_compute"}} 86.0
vllm:prompt_tokens_by_source_total{{{ENGINE},source="local_cache_hit"}} 160.0
vllm:prompt_tokens_by_source_total{{{ENGINE},source="external_kv_transfer"}} 32.0
# TYPE disagg_kv_push_tokens_total counter
disagg_kv_push_tokens_total{{{ENGINE},direction="prefill_to_decode"}} 192.0
disagg_kv_push_tokens_total{{{ENGINE},direction="decode_to_prefill"}} 7.0
# TYPE disagg_kv_writeback_inserted_tokens_total counter
disagg_kv_writeback_inserted_tokens_total{{{ENGINE}}} 96.0
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{{{ENGINE}}} 246.0
"""
DECODE = f"""\
# TYPE vllm:prompt_tokens_by_source_total counter
vllm:prompt_tokens_by_source_total{{{ENGINE},source="external_kv_transfer"}} 246.0
# TYPE disagg_kv_push_tokens_total counter
disagg_kv_push_tokens_total{{{ENGINE},direction="decode_to_prefill"}} 96.0
# TYPE disagg_kv_writeback_offers_total counter
disagg_kv_writeback_offers_total{{{ENGINE},result="granted"}} 1.0
disagg_kv_writeback_offers_total{{{ENGINE},result="have"}} 2.0
"""
PUBLISHED = f"""\
# TYPE disagg_kv_writeback_seconds histogram
disagg_kv_writeback_seconds_bucket{{{ENGINE},le="+Inf"}} 1.0
disagg_kv_writeback_seconds_count{{{ENGINE}}} 1.0
disagg_kv_writeback_seconds_sum{{{ENGINE}}} 0.25
"""


def test_each_counter_is_read_on_the_role_that_counts_it() -> None:
    assert read_counters([PREFILL], [DECODE + PUBLISHED]) == Counters(
        p_computed=86, p_hit=192, p_pushed=192, p_inserted=96, d_written_back=96, d_offers=3
    )


def test_an_offer_that_is_granted_is_not_over_before_it_is_published() -> None:
    assert read_counters([], [DECODE]).d_offers == 2


def test_pods_of_a_role_are_summed() -> None:
    two = read_counters([PREFILL, PREFILL], [DECODE, DECODE])
    assert (two.p_computed, two.d_written_back) == (172, 192)


def test_an_engine_that_has_counted_nothing_counts_zero() -> None:
    assert read_counters([""], [""]) == Counters()


def test_a_turn_is_a_difference() -> None:
    before, after = Counters(p_computed=10, d_offers=1), Counters(p_computed=45, p_hit=32, d_offers=2)
    assert after - before == Counters(p_computed=35, p_hit=32, d_offers=1)


@pytest.mark.parametrize(
    ("turn", "settled"),
    [
        (Counters(p_computed=40, p_hit=160, d_offers=1, d_written_back=96, p_inserted=96), True),
        (Counters(p_computed=40, p_hit=160, d_offers=1), True),  # offered, and prefill wanted nothing
        (Counters(p_computed=40, p_hit=160, d_offers=0), False),
        (Counters(p_computed=40, p_hit=160, d_offers=1, d_written_back=96, p_inserted=64), False),
        (Counters(p_computed=39, p_hit=160, d_offers=1, d_written_back=96, p_inserted=96), False),
    ],
)
def test_a_turn_is_final_when_the_prompt_is_accounted_for_and_the_write_back_is_over(
    turn: Counters, settled: bool
) -> None:
    assert has_settled(turn, prompt_tokens=200) is settled
