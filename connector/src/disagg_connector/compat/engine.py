"""The engine that is constructing the connector: waking it, and noticing new weights, pauses and sleep.

vLLM tells a connector nothing of these. All of them are calls of methods of its `EngineCore`, on its own thread,
so the ones that matter are wrapped on the instance that is found on the constructor's stack. Written against
0.32.x; 0.33.x has the same methods.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from disagg_connector.lifecycle import Lifecycle

logger = logging.getLogger(__name__)

# What workers can be told over `collective_rpc` without their weights being others afterwards. Whatever is not
# listed, a function that is passed included, counts as a change of weights.
HARMLESS = frozenset(
    {
        "add_lora", "check_health", "compute_weight_checksums", "get_cache_block_size_bytes", "get_kv_cache_spec",
        "init_weight_transfer_engine", "list_loras", "pin_lora", "profile", "remove_lora", "reset_encoder_cache",
        "reset_mm_cache", "save_sharded_state", "save_tensorized_model", "shutdown_weight_transfer_engine",
        "synchronize_device",
    }
)  # fmt: skip
# An update is a session: begun, brought in pieces, finished.
BEGIN = frozenset({"start_weight_update", "start_draft_weight_update"})
PIECE = "update_weights"
FINISH = "finish_weight_update"


def find_waker() -> Callable[[], None] | None:
    """How to wake an engine that waits for requests, or None in an engine without an input queue.

    There is no connector API for it. The engine's queue is found on the stack of the constructor that is
    running now, and an entry that means nothing is put in, as vLLM itself does at shutdown.
    """
    from vllm.v1.engine import EngineCoreRequestType

    frame: FrameType | None = sys._getframe()
    while frame is not None:
        owner = frame.f_locals.get("self")
        inbox = getattr(owner, "input_queue", None)
        if inbox is not None and hasattr(inbox, "put_nowait"):
            return lambda: inbox.put_nowait((EngineCoreRequestType.WAKEUP, None))
        frame = frame.f_back
    return None


def watch_engine(lifecycle: Lifecycle) -> bool:
    """Have `lifecycle` told of what is done to the engine that is being constructed; False if there is none."""
    from vllm.v1.engine.core import EngineCore

    frame: FrameType | None = sys._getframe()
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, EngineCore):
            watch(owner, lifecycle)
            return True
        frame = frame.f_back
    return False


def watch(engine: Any, lifecycle: Lifecycle) -> None:
    """Wrap the methods of this engine."""
    _wrap(engine, "collective_rpc", functools.partial(_call_workers, lifecycle))
    _wrap(engine, "set_weight_version", functools.partial(_name_weights, lifecycle))
    _wrap(engine, "pause_scheduler", functools.partial(_pause, lifecycle))
    _wrap(engine, "resume_scheduler", functools.partial(_resume, lifecycle))


def _wrap(engine: Any, name: str, around: Callable[..., Any]) -> None:
    method = getattr(engine, name)
    parameters = inspect.signature(method)

    @functools.wraps(method)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        call = parameters.bind(*args, **kwargs)
        call.apply_defaults()
        return around(lambda: method(*args, **kwargs), call.arguments)

    setattr(engine, name, wrapper)


def _call_workers(lifecycle: Lifecycle, proceed: Callable[[], Any], arguments: dict[str, Any]) -> Any:
    method = arguments["method"]
    if method in HARMLESS or method == PIECE:
        return proceed()
    if method != FINISH:
        # If it fails, the weights may be anything: the engine stays closed until a change has succeeded.
        lifecycle.changing_weights()
    result = proceed()
    if method not in BEGIN:
        lifecycle.changed_weights()
    return result


def _name_weights(lifecycle: Lifecycle, proceed: Callable[[], Any], arguments: dict[str, Any]) -> Any:
    result = proceed()
    lifecycle.named_weights(str(arguments["weight_version"]))
    return result


def _pause(lifecycle: Lifecycle, proceed: Callable[[], Any], arguments: dict[str, Any]) -> Any:
    # A pause that keeps the cache keeps the transfers too. Sleep is a pause that does not.
    if arguments["clear_cache"]:
        lifecycle.pausing()
    return proceed()


def _resume(lifecycle: Lifecycle, proceed: Callable[[], Any], arguments: dict[str, Any]) -> Any:
    result = proceed()
    lifecycle.resumed()
    return result
