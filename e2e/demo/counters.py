"""What the engines counted: their metrics, as tokens, and the difference that one turn made. Pure.

Names are those of docs/wire-contract.md, section 2, and of vLLM.
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Self

from prometheus_client.parser import text_string_to_metric_families

_PROMPT_TOKENS = "vllm:prompt_tokens_by_source_total"
_PUSHED = "disagg_kv_push_tokens_total"
_INSERTED = "disagg_kv_writeback_inserted_tokens_total"
_OFFERS = "disagg_kv_writeback_offers_total"
_PUBLISHED = "disagg_kv_writeback_seconds_count"


@dataclass(frozen=True)
class Counters:
    """Tokens since the engines started (or, as a difference, in one turn), summed over the pods of each role."""

    p_computed: int = 0
    """Prompt tokens that prefill computed."""
    p_hit: int = 0
    """Prompt tokens whose KV prefill had, or was given by decode on demand."""
    p_pushed: int = 0
    """Tokens whose KV prefill wrote to decode."""
    p_inserted: int = 0
    """Tokens written back that are in prefill's prefix cache."""
    d_written_back: int = 0
    """Tokens whose KV decode wrote to prefill."""
    d_offers: int = 0
    """Write-backs of turns' ends that are over: prefill has published them, or was offered them in vain."""

    def __sub__(self, before: Self) -> Self:
        return type(self)(*(getattr(self, f.name) - getattr(before, f.name) for f in fields(self)))


def read_counters(prefill: Iterable[str], decode: Iterable[str]) -> Counters:
    """From the `/metrics` bodies of the pods of each role. A counter that an engine does not have yet counts 0."""
    on_prefill, on_decode = _samples(prefill), _samples(decode)
    return Counters(
        p_computed=_sum(on_prefill, _PROMPT_TOKENS, source="local_compute"),
        p_hit=_sum(on_prefill, _PROMPT_TOKENS, source="local_cache_hit")
        + _sum(on_prefill, _PROMPT_TOKENS, source="external_kv_transfer"),
        p_pushed=_sum(on_prefill, _PUSHED, direction="prefill_to_decode"),
        p_inserted=_sum(on_prefill, _INSERTED),
        d_written_back=_sum(on_decode, _PUSHED, direction="decode_to_prefill"),
        # An offer that is granted is not over: its blocks are still to be written.
        d_offers=_sum(on_decode, _PUBLISHED)
        + _sum(on_decode, _OFFERS)
        - _sum(on_decode, _OFFERS, result="granted"),
    )


def has_settled(turn: Counters, prompt_tokens: int) -> bool:
    """Whether nothing more is expected of a turn whose prompt had `prompt_tokens`.

    The client has its answer before decode writes the turn back, and counters follow one engine step later.
    """
    prefill_is_done = turn.p_computed + turn.p_hit >= prompt_tokens
    write_back_is_over = turn.d_offers >= 1 and turn.p_inserted >= turn.d_written_back
    return prefill_is_done and write_back_is_over


_Sample = tuple[str, dict[str, str], float]


def _samples(bodies: Iterable[str]) -> list[_Sample]:
    wanted = {_PROMPT_TOKENS, _PUSHED, _INSERTED, _OFFERS, _PUBLISHED}
    return [
        (sample.name, sample.labels, sample.value)
        for body in bodies
        for family in text_string_to_metric_families(body)
        for sample in family.samples
        if sample.name in wanted
    ]


def _sum(samples: list[_Sample], name: str, **labels: str) -> int:
    return round(
        sum(value for found, has, value in samples if found == name and labels.items() <= has.items())
    )
