"""What becomes of transfers when an engine's cache is reset, its weights are changed, or it is paused.

Pure. `compat` calls this from vLLM's engine, before and after; everything is on the engine thread.

Whether KV of older weights is left is seen from the block pool alone: after a change of weights an engine is
*stale* unless no block was used or cached then, and until a reset of the prefix cache has succeeded, which vLLM
allows only when no block is in use. So it does not matter in which order resets, pauses and changes come.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from disagg_connector.context import Context

logger = logging.getLogger(__name__)

# How long a pause waits for blocks that peers may still write into. Longer than a write takes to settle; a peer
# that is lost holds them longer, and then vLLM's reset of the cache fails, as it must.
DRAIN_LIMIT = 15.0


class Lifecycle:
    """Engine thread only. `void` calls off everything that was agreed on with peers."""

    def __init__(self, context: Context, void: Callable[[], None]) -> None:
        self._context = context
        self._void = void
        self._drain_until: float | None = None

    @property
    def is_draining(self) -> bool:
        """Whether a pause waits for blocks to come back, so that the engine must go on stepping."""
        if self._drain_until is None or self._context.held.empty:
            return False
        return self._context.clock() < self._drain_until

    # --- The prefix cache -------------------------------------------------------------------------

    def resetting(self) -> None:
        """The prefix cache is about to be reset, because its content is no longer true or no longer wanted."""
        self._context.epochs.advance()
        self._void()

    def was_reset(self) -> None:
        """It has been: no block was in use, and none is cached now."""
        self._drain_until = None
        self._context.epochs.open("stale")

    # --- Weights ----------------------------------------------------------------------------------

    def changing_weights(self) -> None:
        """From here on the weights are neither the old nor the new ones."""
        self._context.epochs.close("updating")
        self._context.epochs.changed()
        self._renew("the weights are being changed")

    def changed_weights(self) -> None:
        """The weights are whole again."""
        context = self._context
        if not context.pool.pristine:
            context.epochs.close("stale")
            logger.warning(
                "The weights were changed while KV of the old ones was there: this engine exchanges none until "
                "its prefix cache has been reset"
            )
        context.epochs.open("updating")

    def named_weights(self, version: str) -> None:
        """vLLM was told what the weights are."""
        self._context.epochs.named(version)
        self._renew(f"the weights are {version!r}")

    # --- Pauses -----------------------------------------------------------------------------------

    def pausing(self) -> None:
        """The engine stops taking requests up, and will reset its cache when nothing runs any more."""
        context = self._context
        if "paused" not in context.epochs.now.closed:
            context.epochs.close("paused")
            context.epochs.advance()
            self._void()
        self._drain_until = context.clock() + DRAIN_LIMIT

    def resumed(self) -> None:
        self._drain_until = None
        self._context.epochs.open("paused")

    # --- Inside -----------------------------------------------------------------------------------

    def _renew(self, why: str) -> None:
        logger.info("KV of generation %s from here on: %s", self._context.epochs.now.generation, why)
        self._void()
        self._context.peers.reconsider()
