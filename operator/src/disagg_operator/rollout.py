"""The next step of a rollout: numbers in, which revisions stay and which go out. Pure, and knows no Kubernetes.

Paired: the new revision's prefill and decode come up in full beside the old ones; when both are complete the old ones
go. Nothing is remembered between steps, so a step taken twice, or by another operator, is the same step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime


@dataclass(frozen=True)
class RevisionState:
    """One revision's engines."""

    revision: str
    created: datetime
    prefill_ready: int
    decode_ready: int
    complete: bool
    """Both roles have every pod they should have, ready and of the present template."""

    @property
    def strength(self) -> tuple[int, int]:
        """How well it can serve. Decode alone still answers, computing prompts itself; prefill alone does not."""
        return min(self.prefill_ready, self.decode_ready), self.decode_ready


@dataclass(frozen=True)
class Step:
    """What to do now. Engines of any revision but the target and `keep` go."""

    serving: str
    """The revision that conversations mainly run on."""
    keep: str | None
    """An older revision whose engines stay as they are, to serve until the target is complete."""


def next_step(target: str, revisions: Sequence[RevisionState], served: str | None = None) -> Step:
    """The step towards `target`, from the revisions that exist.

    At most one other revision is kept, the one that serves best, the older of two equals. If none can answer, it is `served`,
    the one that could until a moment ago and may again: a decode pod that is being replaced is no reason to give up
    the only engines that work. A revision that never came up gives its devices back as soon as the spec moves on.
    """
    aim = next((state for state in revisions if state.revision == target), None)
    if aim is not None and aim.complete:
        return Step(target, None)
    others = [state for state in revisions if state is not aim]
    able = sorted(
        (state for state in others if state.decode_ready > 0),
        key=lambda state: ([-n for n in state.strength], state.created, state.revision),
    )
    kept = next(iter([*able, *(state for state in others if state.revision == served)]), None)
    if kept is None:
        return Step(target, None)
    ahead = aim is not None and aim.strength > kept.strength
    return Step(target if ahead else kept.revision, kept.revision)
