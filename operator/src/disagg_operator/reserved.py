"""Flags that reach the engine although they are reserved, because the API server did not recognize them. Pure.

vLLM's parser takes an unambiguous beginning of a flag for the flag, which the CRD's rules cannot know. What it makes of
`--flag.key value` it appends to the command line, so such a flag would win over the operator's.
"""

from collections.abc import Sequence

from .api.engine import RESERVED_ARGS
from .api.types import DisaggInferenceSpec

END_OF_FLAGS = "--"


def evasions(spec: DisaggInferenceSpec) -> tuple[str, ...]:
    """What in the extraArgs would set something that is the operator's, each with what to do instead."""
    where = (
        ("engine.extraArgs", spec.engine.extra_args),
        ("prefill.extraArgs", spec.prefill.extra_args),
        ("decode.extraArgs", spec.decode.extra_args),
    )
    return tuple(f"{path}: {why}" for path, args in where for why in _evasions(args))


def _evasions(args: Sequence[str]) -> list[str]:
    found = []
    for arg in args:
        if arg == END_OF_FLAGS:
            found.append("-- would hide the flags after it, also the operator's: remove it")
        elif arg.startswith("-"):
            name = arg.partition("=")[0].partition(".")[0].replace("_", "-")
            full, instead = _abbreviated(name)
            if full:
                found.append(f"{name} is short for {full}: {instead}")
    return found


def _abbreviated(name: str) -> tuple[str, str]:
    """The reserved flag that begins so and what to do instead; empty if there is none."""
    for reserved in RESERVED_ARGS:
        for flag in reserved.flags:
            if flag.startswith(name) and flag != name and len(name) > (2 if flag.startswith("--") else 1):
                return flag, reserved.instead
    return "", ""
