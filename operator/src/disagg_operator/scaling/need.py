"""How many pods a load needs, before any bound or damping. Pure arithmetic; docs/autoscaling.md has it with numbers put in."""

from dataclasses import dataclass

from .inputs import DecodeLoad, Limits, PrefillLoad, Reuse

DEFAULT_REMOTE_COST = 0.5
"""Until it is configured or learned: the upper end of what was derived for real models (0.04 to 0.5). Too high makes prefill
too large, which costs money; too low would cost latency."""
FULL = 0.95
"""KV usage that the fuller half of decode's engines may come to: above, requests wait there while others have room."""
MOST_WAITING = 2.0
"""Requests that wait for decode count at most like so many times those that run: a burst must not ask for the moon."""


@dataclass(frozen=True, slots=True)
class Speed:
    """What one prefill pod can do."""

    tokens_per_second: float
    remote_cost: float


@dataclass(frozen=True, slots=True)
class PrefillNeed:
    """The terms of prefill's need, in computed tokens per second."""

    computed: float
    """What has to be computed of what is offered."""
    brought: float
    """What handling the tokens costs that decode brought, at the price of computed ones."""
    draining: float
    """What has to be computed of the backlog."""
    capacity: float
    """What one pod is planned for."""

    @property
    def pods(self) -> float:
        """The need."""
        return (self.computed + self.brought + self.draining) / self.capacity


@dataclass(frozen=True, slots=True)
class DecodeNeed:
    """Pods by each of decode's bounds; None where the bound is not known."""

    memory: float
    sequences: float | None
    without_retained: float | None
    """By memory, if nothing were kept for prefill to read."""

    @property
    def pods(self) -> float:
        """The need: the greatest."""
        return max(self.memory, self.sequences or 0.0)


def prefill_need(
    load: PrefillLoad, offered: float, reuse: Reuse, speed: Speed, limits: Limits
) -> PrefillNeed:
    """(A (1 - rho) + kappa A rho_remote + B (1 - rho) / tau) / (V eta), with the reuse that is to be counted on."""
    new = max(0.0, 1.0 - reuse.total)
    return PrefillNeed(
        computed=offered * new,
        brought=speed.remote_cost * offered * reuse.remote,
        draining=load.backlog * new / limits.drain_seconds,
        capacity=speed.tokens_per_second * limits.utilization,
    )


def decode_need(load: DecodeLoad, limits: Limits) -> DecodeNeed:
    """What keeps the KV cache and the running batch of the pods below their targets.

    Requests that wait hold no KV yet; each is counted like one that runs.
    """
    waiting = min(load.waiting / max(load.running, 1.0), MOST_WAITING)
    usage = load.kv_usage if load.mean_usage is None else load.mean_usage
    memory = load.pods * max(usage / limits.kv_usage, load.kv_usage / FULL) * (1.0 + waiting)
    sequences = None
    if limits.sequences is not None:
        places = limits.sequences * limits.decode.engines * limits.running
        sequences = (load.running + load.waiting) / places
    without = None
    if load.retained is not None:
        free = max(0.0, usage - load.retained)
        without = load.pods * free * (1.0 + waiting) / limits.kv_usage
    return DecodeNeed(memory, sequences, without)
