"""What makes KV cache compatible, and the eight digits that stand for it. Pure.

Engines exchange KV only within a revision. The revision hashes everything that decides whether a block of KV that one
engine wrote means the same to another: image, model, connector, transfer mode, parallelism, and those engine flags that
change KV's layout or the tokens it belongs to. What does not (memory, batch sizes, context length) is changed in place.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .api.types import DisaggInferenceSpec, Role

MUST_MATCH = (
    "dtype",
    "kv-cache-dtype",
    "kv-cache-dtype-skip-layers",
    "block-size",
    "quantization",
    "quantization-config",
    "load-format",
    "hf-overrides",
    "hf-config-path",
    "config-format",
    "code-revision",
    "disable-sliding-window",
    "disable-hybrid-kv-cache-manager",
    "kv-sharing-fast-prefill",
    "decode-context-parallel-size",
    "prefill-context-parallel-size",
    "dcp-kv-cache-interleave-size",
    "cp-kv-cache-interleave-size",
    "mamba-cache-dtype",
    "mamba-ssm-cache-dtype",
    "mamba-block-size",
    "mamba-cache-mode",
    "enable-lora",
    # Block hashes and the tokens they are made of.
    "enable-prefix-caching",
    "prefix-caching-hash-algo",
    "tokenizer",
    "tokenizer-mode",
    "tokenizer-revision",
    "chat-template",
    "chat-template-content-format",
    "default-chat-template-kwargs",
)
"""Flags of `vllm serve` whose values must be the same for prefill and decode, or KV would be misread."""

ALSO_HASHED = (
    "attention-backend",
    "attention-config",
    "speculative-config",
    "spec-method",
    "spec-model",
    "spec-tokens",
)
"""Flags that may differ between the roles (decode alone may speculate) but make another revision when they change."""

_SYNONYMS = {"half": "float16", "float": "float32", "": "true"}
_SHORT = {
    "-q": "quantization",
    "-dcp": "decode-context-parallel-size",
    "-pcp": "prefill-context-parallel-size",
}


@dataclass(frozen=True)
class Difference:
    """A flag that would give the roles different KV. A value is None where the flag is not given."""

    flag: str
    prefill: str | None
    decode: str | None

    def __str__(self) -> str:
        def shown(value: str | None) -> str:
            return "not set" if value is None else value

        return f"--{self.flag} is {shown(self.prefill)} for prefill and {shown(self.decode)} for decode"


def revision(spec: DisaggInferenceSpec, connector_image: str) -> str:
    """Eight hexadecimal digits for what `spec` says about KV compatibility."""
    facts: dict[str, Any] = {
        "image": spec.engine.image,
        "connector": connector_image,
        "model": [spec.model.uri, spec.model.served_name, spec.model.revision],
        "transfer": [spec.kv_transfer.mode, spec.backend],
    }
    if spec.model.uri.startswith("file://"):
        facts["files"] = (
            spec.model.storage.to_wire()
        )  # the same path, mounted from elsewhere, is another model
    for name, role in (("prefill", spec.prefill), ("decode", spec.decode)):
        parallelism = role.parallelism
        facts[name] = {
            "parallelism": [parallelism.tensor, parallelism.pipeline, parallelism.data],
            "flags": kv_flags(spec, role, MUST_MATCH + ALSO_HASHED),
        }
    text = json.dumps(facts, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def differences(spec: DisaggInferenceSpec) -> tuple[Difference, ...]:
    """The flags of MUST_MATCH in which the roles differ."""
    prefill, decode = kv_flags(spec, spec.prefill), kv_flags(spec, spec.decode)
    return tuple(
        Difference(flag, prefill.get(flag), decode.get(flag))
        for flag in MUST_MATCH
        if prefill.get(flag) != decode.get(flag)
    )


def kv_flags(spec: DisaggInferenceSpec, role: Role, names: Sequence[str] = MUST_MATCH) -> dict[str, str]:
    """Those flags among `names` that a role's engines run with, and their values in a normal form."""
    given = parse_flags((*spec.engine.extra_args, *role.extra_args), known=(*MUST_MATCH, *ALSO_HASHED))
    return {name: given[name] for name in names if name in given}


def parse_flags(args: Sequence[str], known: Sequence[str] = ()) -> dict[str, str]:
    """Flag to value, the later of two winning, as vLLM's parser reads them.

    It takes `_` for `-`, `--flag=value`, `--no-flag` for a false `--flag`, `--flag.key value` for a part of a JSON flag,
    and an unambiguous beginning of a flag for the flag; such beginnings are completed from `known`.
    """
    flags: dict[str, str] = {}
    position = 0
    while position < len(args):
        token = args[position]
        position += 1
        if not _is_flag(token):
            continue
        name, separator, value = token.partition("=")
        if not separator and position < len(args) and not _is_flag(args[position]):
            value = args[position]
            position += 1
        name, _, part = _full_name(name, known).partition(".")
        if name.startswith("no-") and not value:
            name, value = name.removeprefix("no-"), "false"
        value = _SYNONYMS.get(value.lower(), value)
        if part:
            flags[name] = ",".join(filter(None, (flags.get(name), f"{part}={value}")))
        else:
            flags[name] = _canonical_json(value)
    return flags


def _is_flag(token: str) -> bool:
    return token.startswith("-") and not token.lstrip("-").replace(".", "", 1).isdigit()


def _full_name(token: str, known: Sequence[str], short: Mapping[str, str] = _SHORT) -> str:
    if token in short:
        return short[token]
    name = token.lstrip("-").replace("_", "-")
    if name not in known:
        completed = [flag for flag in known if name and flag.startswith(name)]
        if len(completed) == 1:
            return completed[0]
    return name


def _canonical_json(value: str) -> str:
    if not value.startswith("{"):
        return value
    try:
        return json.dumps(json.loads(value), sort_keys=True, separators=(",", ":"))
    except ValueError:
        return value
