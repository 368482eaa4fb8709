"""Pools that nobody resizes."""

from dataclasses import dataclass

from bench.autoscaling.rules import Seen
from disagg_operator.scaling.inputs import Sizes


@dataclass
class Fixed:
    """These sizes."""

    wanted: Sizes
    period: float = 15.0

    def sizes(self, seen: Seen) -> Sizes:
        """Always the same."""
        return self.wanted
