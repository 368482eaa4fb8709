"""The engine bundle and the models that run on it, made once and cached.

    python -m e2e.images.engine bundle            # prints the bundle's folder
    python -m e2e.images.engine model tiny-qwen3  # prints the model's folder
    python -m e2e.images.engine next              # prints the folder with the next vLLM's Python files

Progress goes to standard error, the path to standard output.
"""

import sys
from pathlib import Path
from typing import Annotated

import typer

from e2e.images import engine_bundle, engine_models, engine_next
from e2e.images.engine_bundle import EngineError
from e2e.images.engine_cache import Say, build_once, cache_root, say

__all__ = ["MODELS", "EngineError", "ensure_bundle", "ensure_model", "ensure_next", "vllm_cache"]

MODELS = tuple(engine_models.RECIPES)


def ensure_bundle(report: Say = say) -> Path:
    """The folder of the engine bundle, built first where it is missing.

    Its interpreter is `bin/python3`, its command `bin/vllm`; it works from any mount point.

    Raises:
        EngineError: it cannot be built.
    """
    python = engine_bundle.find_interpreter()
    return build_once(
        _bundle_of(python), lambda folder: engine_bundle.build_bundle(folder, python, report), report
    )


def vllm_cache() -> Path:
    """What the bundle brings for $VLLM_CACHE_ROOT. Builds nothing."""
    return _bundle_of(engine_bundle.find_interpreter()) / engine_bundle.VLLM_CACHE


def _bundle_of(python: engine_bundle.Interpreter) -> Path:
    return cache_root() / engine_bundle.current_bundle_name(python)


def ensure_model(name: str, report: Say = say) -> Path:
    """The folder of a model in Hugging Face's layout (safetensors, tokenizer, chat template), made where missing.

    `smollm2-135m` is SmolLM2-135M-Instruct in bfloat16; `tiny-qwen3` has random weights in float32 from a fixed seed,
    for comparisons bit by bit and for tensor parallelism; `tiny-qwen3-mqa` is the same with one KV head, which every
    tensor parallel rank holds.

    Raises:
        EngineError: there is no such model, or it cannot be made.
    """
    if name not in engine_models.RECIPES:
        raise EngineError(f"There is no model recipe {name!r}; there are {', '.join(MODELS)}.")
    bundle = ensure_bundle(report)
    target = cache_root() / engine_models.model_folder_name(name)
    return build_once(target, lambda folder: engine_models.build_model(name, folder, bundle, report), report)


def ensure_next(report: Say = say) -> Path:
    """The folder with the next vLLM's Python files, for PYTHONPATH of the bundle's interpreter, made where missing.

    Raises:
        EngineError: it cannot be made.
    """
    target = cache_root() / engine_next.next_name(engine_next.LOCK_FILE.read_bytes())
    return build_once(target, lambda folder: engine_next.build_next(folder, report), report)


_cli = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__)


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@_cli.command()
def bundle() -> None:
    """Build the engine bundle if it is missing and print its folder."""
    print(ensure_bundle(_to_stderr))


@_cli.command()
def model(name: Annotated[str, typer.Argument(help=f"one of {', '.join(MODELS)}")]) -> None:
    """Make the model if it is missing and print its folder."""
    print(ensure_model(name, _to_stderr))


@_cli.command(name="next")
def next_vllm() -> None:
    """Take the Python files out of the next vLLM's wheel if that has not been done, and print their folder."""
    print(ensure_next(_to_stderr))


def main() -> None:
    """Run the command line; an EngineError ends it with its text and exit status 1."""
    try:
        _cli()
    except EngineError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
