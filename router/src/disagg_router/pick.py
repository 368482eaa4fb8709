"""Where a turn goes. Pure.

Every router replica has to choose alike without talking to the others, and a restarted one as before. So a conversation's
name ranks the engines (rendezvous hashing: adding or removing one engine moves only its own conversations), and the
first in that order that is not overloaded is taken ("consistent hashing with bounded loads"). Load is the number of
turns in flight that this replica has there. A replica that remembers the conversation's last turn prefers the pods
of that turn, which hold its KV. Engines that are leaving get turns only where there is no other.

That is the policy SessionAffinity. LeastLoaded and RoundRobin choose without regard to where KV is: prefill has to ask for it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Literal

from disagg_router.backends import Backend, staying
from disagg_router.config import Policy
from disagg_router.session import Placement, Session

Reason = Literal["session", "home", "spill", "moved", "policy", "none"]


@dataclass(frozen=True, slots=True)
class _Bound:
    """An engine is overloaded from max(floor, factor x the mean load) turns in flight on."""

    factor: float
    floor: int


# A new conversation has no KV anywhere: spread it tightly. An old one pays for every move: keep it longer.
_NEW = _Bound(factor=1.25, floor=1)
_KNOWN = _Bound(factor=1.5, floor=8)


@dataclass(frozen=True, slots=True)
class Load:
    """What a replica knows of its engines: turns in flight by pod, and pods that its breakers keep turns away from."""

    inflight: Mapping[str, int]
    suspects: Collection[str] = ()


@dataclass(frozen=True, slots=True)
class Choice:
    """Where a turn goes.

    `prefill` is None if no prefill engine can be paired with `decode`. `holder` is the decode engine that is believed to
    hold the conversation's KV, for prefill to ask; None in a first turn. The reasons, one for each role:

    - `session`: the pod of the conversation's last turn
    - `home`: first in the conversation's order
    - `spill`: the pods before it are overloaded
    - `moved`: the last turn's pod is leaving, or does not take turns any more (or did before this turn's first attempt)
    - `policy`: by a policy that does not look at conversations
    - `none`: there is no such engine
    """

    decode: Backend
    prefill: Backend | None
    holder: Backend | None
    decode_reason: Reason
    prefill_reason: Reason


def choose(
    backends: Sequence[Backend],
    session: Session,
    last: Placement | None,
    load: Load,
    avoid: Collection[str] = (),
    policy: Policy = "SessionAffinity",
    number: int = 0,
) -> Choice | None:
    """Pick the engines for a turn, or None if no decode engine is ready.

    `last` is the conversation's remembered placement. Pods in `avoid` have already failed this very turn and are not
    taken; suspects are taken only if there is no other decode engine, and never for prefill. Engines that are leaving are
    taken only if all others are suspects. `number` counts this replica's turns, for RoundRobin.
    """
    ready = [b for b in backends if b.takes_turns and b.name not in avoid]
    prefills = [b for b in ready if b.role == "prefill" and b.name not in load.suspects]
    decodes = [b for b in ready if b.role == "decode"]

    def pick(among: Sequence[Backend], wanted: str | None) -> tuple[Backend, Reason]:
        if policy == "LeastLoaded":
            return _least_loaded(among, session.key, load), "policy"
        if policy == "RoundRobin":
            return _in_turn(among, number), "policy"
        bound = _KNOWN if last is not None or session.earlier_turn else _NEW
        return _pick(among, session.key, load, bound, wanted)

    affine = policy == "SessionAffinity"
    candidates = _decode_candidates(decodes, prefills, last)
    candidates = [b for b in candidates if b.name not in load.suspects] or candidates
    if not candidates:
        return None
    decode, decode_reason = pick(staying(candidates), last.decode if last else None)
    partners = staying([b for b in prefills if b.revision == decode.revision])
    prefill: Backend | None = None
    prefill_reason: Reason = "none"
    if partners:
        wanted = last.prefill if last is not None else None
        if not (affine and any(b.name == wanted for b in partners)):
            partners = [b for b in partners if b.zone == decode.zone] or partners
        prefill, prefill_reason = pick(partners, wanted)
    holder = _holder(backends, candidates if affine else (), session, last)
    if holder is not None and holder.revision != decode.revision:
        holder = None  # KV of another revision is of no use
    return Choice(decode, prefill, holder, decode_reason, prefill_reason)


def any_engine(backends: Sequence[Backend], load: Load, avoid: Collection[str] = ()) -> Backend | None:
    """The ready engine of either role with the fewest turns in flight; suspects only if there is no other."""
    ready = [b for b in backends if b.takes_turns and b.name not in avoid]
    candidates = staying([b for b in ready if b.name not in load.suspects] or ready)
    return min(candidates, key=lambda b: (load.inflight.get(b.name, 0), b.name), default=None)


def _decode_candidates(
    decodes: Sequence[Backend], prefills: Sequence[Backend], last: Placement | None
) -> Sequence[Backend]:
    """The decode engines that may be taken, by revision. Of these, those that are leaving are only asked for KV if there are others.

    A conversation stays on its revision while that has a ready decode engine that stays. A new one goes to any revision with
    both roles ready, so that each revision gets new conversations in proportion to its decode engines; only if there is
    no such revision, to a decode engine without prefill.
    """
    if last is not None and any(b.revision == last.revision for b in staying(decodes)):
        return [b for b in decodes if b.revision == last.revision]
    paired = {b.revision for b in staying(prefills)}
    return [b for b in decodes if b.revision in paired] or decodes


def _pick(
    candidates: Sequence[Backend], key: bytes, load: Load, bound: _Bound, wanted: str | None
) -> tuple[Backend, Reason]:
    total = sum(load.inflight.get(b.name, 0) for b in candidates)
    limit = max(bound.floor, ceil(bound.factor * (total + 1) / len(candidates)))
    order = sorted(candidates, key=lambda b: rank(key, b.name), reverse=True)
    kept = [b for b in order if b.name == wanted]
    order = kept + [b for b in order if b.name != wanted]
    # One engine at least is below the limit, which is above the mean.
    chosen = next(b for b in order if load.inflight.get(b.name, 0) < limit)
    if chosen is not order[0]:
        return chosen, "spill"
    if kept:
        return chosen, "session"
    return chosen, "home" if wanted is None else "moved"


def _least_loaded(candidates: Sequence[Backend], key: bytes, load: Load) -> Backend:
    """The one with the fewest turns in flight; of several the first in the conversation's order, so that replicas with nothing
    to do do not all take the same."""
    return max(candidates, key=lambda b: (-load.inflight.get(b.name, 0), rank(key, b.name)))


def _in_turn(candidates: Sequence[Backend], number: int) -> Backend:
    return sorted(candidates, key=lambda b: b.name)[number % len(candidates)]


def rank(key: bytes, name: str) -> bytes:
    """The weight of an engine for a conversation; the highest is its home."""
    return hashlib.blake2b(name.encode(), key=key, digest_size=8).digest()


def _holder(
    backends: Sequence[Backend], homes: Sequence[Backend], session: Session, last: Placement | None
) -> Backend | None:
    """The decode engine of the last turn, also while it is leaving or terminates. If this replica does not remember that turn,
    the conversation's home among `homes`, those that are leaving too: where any replica would first have looked."""
    if last is not None:
        return next((b for b in backends if b.name == last.decode), None)
    if session.earlier_turn:
        return max(homes, key=lambda b: rank(session.key, b.name), default=None)
    return None
