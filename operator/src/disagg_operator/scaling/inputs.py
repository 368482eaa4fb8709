"""What a decision on the pools' sizes rests on, and what it is bound by. Pure data.

Tokens are prompt tokens unless it says otherwise, rates are per second, shares are between 0 and 1. A number that nobody
could measure is None, never 0.
"""

from dataclasses import dataclass, replace

from ..naming import Component


@dataclass(frozen=True, slots=True)
class Sizes:
    """Pods of each role."""

    prefill: int
    decode: int

    def of(self, role: Component) -> int:
        """Of one role."""
        return self.prefill if role is Component.PREFILL else self.decode

    def with_size(self, role: Component, size: int) -> "Sizes":
        """With one changed."""
        return replace(self, prefill=size) if role is Component.PREFILL else replace(self, decode=size)


@dataclass(frozen=True, slots=True)
class Reuse:
    """Which shares of the prompt tokens prefill did not have to compute."""

    local: float = 0.0
    """Found in prefill's own prefix cache, put there by prefill."""
    remote: float = 0.0
    """Brought by decode: written back after the turn before, pushed when asked, or read."""

    @property
    def total(self) -> float:
        """Both."""
        return self.local + self.remote

    def scaled(self, total: float) -> "Reuse":
        """The same proportion with another total, which is not above this one's."""
        if self.total <= 0:
            return Reuse()
        factor = total / self.total
        return Reuse(self.local * factor, self.remote * factor)


@dataclass(frozen=True, slots=True)
class PrefillLoad:
    """Prefill's pods over one window."""

    offered: float
    """Prompt tokens per second that routers sent, whether or not prefill kept up."""
    tokens: float
    """Prompt tokens that prefill finished within the window: how much the reuse below rests on."""
    reuse: Reuse
    backlog: float
    """Prompt tokens of requests that wait, in prefill's queues and the routers'."""
    written_back: float = 0.0
    """Tokens whose KV decode put into prefill's prefix cache within the window."""
    latest_tokens: float = 0.0
    """Prompt tokens that prefill finished between the last two looks."""
    latest_reuse: float = 0.0
    """The share of those that it did not have to compute."""


@dataclass(frozen=True, slots=True)
class DecodeLoad:
    """Decode's pods, now."""

    pods: int
    """Those that the figures stand for: ready ones, which may be fewer than were decided on."""
    kv_usage: float
    """Share of the KV cache in use; of several engines, the mean of the fuller half, so that a full one is not hidden."""
    fullest: float
    """That of the fullest engine."""
    running: float
    """Requests that are being generated."""
    waiting: float
    """Requests that wait for a place."""
    mean_usage: float | None = None
    """Mean of all engines' KV usage; None: `kv_usage`."""
    retained: float | None = None
    """Share of the KV cache kept for prefill to read (mode BidirectionalPull); None if the mode keeps nothing."""


@dataclass(frozen=True, slots=True)
class Learned:
    """What the engines' own figures say of their speed."""

    tokens_per_second: float | None = None
    """Prompt tokens that one prefill pod computes per second."""
    remote_cost: float | None = None
    """Cost of a token that decode brought, as a share of a computed one's."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """Everything measured that a decision rests on."""

    prefill: PrefillLoad | None
    """None if too little of prefill or the routers could be read."""
    decode: DecodeLoad | None
    """None if too little of decode could be read."""
    missing: tuple[str, ...] = ()
    """Pods whose page could not be read or used, each with why."""
    learned: Learned = Learned()
    failed_share: float = 0.0
    """Transfers that failed or came too late, by turn."""
    ttft_p95: float | None = None
    """Seconds; None without enough turns."""
    itl_p95: float | None = None
    """Seconds; None without enough tokens."""


@dataclass(frozen=True, slots=True)
class RoleLimits:
    """What bounds one role."""

    least: int
    most: int
    devices: int = 1
    """GPUs of a pod, for the budget."""
    engines: int = 1
    """Engines of a pod: its data parallel size."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What the spec asks of a decision; docs/autoscaling.md explains each number."""

    prefill: RoleLimits
    decode: RoleLimits
    window: float = 60.0
    """Seconds over which the load is measured."""
    utilization: float = 0.6
    drain_seconds: float = 30.0
    """Within what time a backlog is to be worked off."""
    kv_usage: float = 0.80
    running: float = 0.85
    sequences: int | None = None
    """--max-num-seqs of one decode engine; None if nobody set it."""
    tokens_per_second: float | None = None
    """Overrides what is learned, as does the next one."""
    remote_cost: float | None = None
    ttft_target: float | None = None
    itl_target: float | None = None
    ratio_least: float = 0.1
    ratio_most: float = 4.0
    tolerance: float = 0.10
    up_window: float = 0.0
    up_pods: int = 4
    """Added to a role within a minute."""
    down_window: float = 300.0
    down_pods: int = 2
    """Taken from a role within down_window."""
    max_devices: int | None = None
    pod_start_seconds: float = 0.0
    """How long a pod takes to become ready, as seen lately; the trend of the load is followed so far ahead."""
    decode_holds_reuse: bool = False
    """Reuse is read from decode's memory when the turn comes (mode BidirectionalPull), so a decode pod takes its share away."""
