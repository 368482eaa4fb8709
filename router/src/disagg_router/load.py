"""What this replica has in flight on each engine, and which engines it keeps turns away from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from disagg_router.backends import Backend, Role
from disagg_router.backlog import Backlog, Work
from disagg_router.breaker import Blame, Breaker, State
from disagg_router.http1.message import Address
from disagg_router.pick import Load

_Pod = tuple[str, Address]


class LoadTable:
    """Counts by pod name, and a breaker for every pod that has failed.

    A pod that is replaced keeps its name but not its address, and its predecessor's failures are not its own. A breaker is
    forgotten when its pod does not take turns any more, so there are never more than engines.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._inflight: dict[str, int] = {}
        self._breakers: dict[_Pod, Breaker] = {}
        self.backlog = Backlog(clock)
        """What engines have yet to compute, as far as that was said of the legs on them."""
        self.opened: Counter[tuple[Role, str]] = Counter()
        """How often breakers have opened, by role and what was the last straw."""

    def hold(self, backend: Backend, tokens: int = 0) -> Hold:
        """Count one leg on the pod until the hold is given back, which leaving its context does.

        `tokens` of its prompt are for the pod to compute.
        """
        self._inflight[backend.name] = self._inflight.get(backend.name, 0) + 1
        pod = _pod(backend)
        breaker, probe = self._breakers.get(pod, Breaker()).begin(self._clock())
        if probe:
            self._breakers[pod] = breaker
        return Hold(self, backend, probe, self.backlog.add(backend.name, tokens) if tokens else None)

    @property
    def inflight(self) -> dict[str, int]:
        return self._inflight

    def state(self, backend: Backend) -> State:
        return self._breakers.get(_pod(backend), Breaker()).state(self._clock())

    def snapshot(self, backends: Iterable[Backend]) -> Load:
        """What choosing among `backends`, all that there are, has to know."""
        if not self._breakers:
            return Load(self._inflight)
        present = {_pod(b): b for b in backends if b.takes_turns}
        for pod in self._breakers.keys() - present.keys():
            del self._breakers[pod]
        now = self._clock()
        return Load(self._inflight, {name for (name, _), b in self._breakers.items() if b.avoided(now)})

    # -- for Hold --------------------------------------------------------------------------------------------

    def give_back(self, hold: Hold) -> None:
        hold.computed()
        left = self._inflight[hold.backend.name] - 1
        if left:
            self._inflight[hold.backend.name] = left
        else:
            del self._inflight[hold.backend.name]
        breaker = self._breakers.get(_pod(hold.backend))
        if hold.probe and breaker is not None:
            self._breakers[_pod(hold.backend)] = breaker.end_probe()

    def succeeded(self, hold: Hold) -> None:
        self._breakers.pop(_pod(hold.backend), None)

    def failed(self, hold: Hold, blame: Blame, reason: str) -> None:
        pod = _pod(hold.backend)
        before = self._breakers.get(pod, Breaker())
        after = before.fail(blame, self._clock(), probe=hold.probe)
        if after != Breaker():
            self._breakers[pod] = after
        if after.opened > before.opened:
            self.opened[hold.backend.role, reason] += 1


class Hold:
    """One leg's place on a pod. A context, so that a count is always given back; giving back twice is one."""

    __slots__ = ("_backlog", "_loads", "_work", "backend", "probe")

    def __init__(self, loads: LoadTable, backend: Backend, probe: bool, work: Work | None = None) -> None:
        self._loads: LoadTable | None = loads
        self._backlog = loads.backlog
        self._work = work
        self.backend = backend
        self.probe = probe

    def computed(self) -> None:
        """The pod has computed what it had to of the prompt."""
        if self._work is not None:
            self._backlog.done(self._work)
            self._work = None

    def succeeded(self) -> None:
        """The pod has answered."""
        if self._loads is not None:
            self._loads.succeeded(self)
            self.probe = False

    def failed(self, blame: Blame, reason: str) -> None:
        """The leg has failed. Once that has been said of a probe, whatever follows is not one."""
        if self._loads is not None:
            self._loads.failed(self, blame, reason)
            self.probe = self.probe and blame is Blame.NONE

    def give_back(self) -> None:
        if self._loads is not None:
            loads, self._loads = self._loads, None
            loads.give_back(self)

    def __enter__(self) -> Hold:
        return self

    def __exit__(self, *exc: object) -> None:
        self.give_back()


def _pod(backend: Backend) -> _Pod:
    return backend.name, backend.address
