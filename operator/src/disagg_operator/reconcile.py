"""One pass over one DisaggInference: read everything, decide, act, say what became of it."""

import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from . import autoscale
from .api.status import Condition
from .config import Settings
from .control_secret import KeyPolicy, SecretWrite
from .errors import GoneError, KubeError, UnavailableError
from .events import tell
from .gather import gather
from .kube import Kube
from .mismatch import Standing, is_due, look, resume, targets, unlearn
from .naming import KIND, Manifest
from .observe import Observed
from .pages import Answer, Target
from .plan import (
    Notice,
    Plan,
    Report,
    is_rolling_out,
    make_plan,
    report,
    report_blind,
)
from .scalers import resized, scaler_writes
from .wanted import Wanted, key_of, read
from .writes import status_of

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Key:
    """Which DisaggInference."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


ReadPages = Callable[[Mapping[str, Target]], Awaitable[Mapping[str, Answer]]]
"""What is wanted of each pod in, what each had to say out; `scrape.read_pages` is one."""


@dataclass(frozen=True)
class Reconciler:
    """Passes over DisaggInferences. Remembers nothing between them but what was seen of pods' metrics, and what autoscaling made of
    it."""

    kube: Kube
    settings: Settings
    clock: Callable[[], datetime]
    random: Callable[[int], bytes]
    """So many random bytes, for keys."""
    on_conditions: Callable[[Key, tuple[Condition, ...]], None]
    """Told the conditions after each pass, none when the object is gone."""
    read_pages: ReadPages
    even_clock: Callable[[], float]
    """Seconds that nobody sets: load is a matter of how much time went by."""
    on_course: Callable[[Key, autoscale.Course | None], None] = lambda key, course: None
    """Told the autoscaling after each pass, None if there is none."""
    _standings: dict[Key, Standing] = field(default_factory=dict)
    _courses: dict[Key, autoscale.Course] = field(default_factory=dict)

    async def reconcile(self, key: Key) -> float | None:
        """Makes the cluster what the object asks for, as far as one pass can.

        Returns in how many seconds to look again, None if the object is gone. Raises the first failure, after everything
        else was tried and the status was written.
        """
        resource = await self.kube.get(KIND, key.namespace, key.name)
        if resource is None or "deletionTimestamp" in resource["metadata"]:
            self.on_conditions(key, ())
            self._standings.pop(key, None)
            self._forget_course(key)
            return None  # the garbage collector takes the children
        wanted = read(resource, self.settings)
        said, failures = await self._act(key, resource, wanted)
        await self._say(resource, said)
        self.on_conditions(key, said.status.conditions)
        if failures:
            raise failures[0]
        return min(self._waits(key, said))

    def _waits(self, key: Key, said: Report) -> Iterator[float]:
        """Seconds until there is something to do again."""
        yield self.settings.resync_seconds
        if said.look_again_after is not None:
            yield said.look_again_after
        if key in self._courses:
            yield autoscale.rest(self._courses[key], self.even_clock())

    async def _act(self, key: Key, resource: Manifest, wanted: Wanted) -> tuple[Report, list[Exception]]:
        policy = KeyPolicy(timedelta(days=self.settings.rotate_days), self.random)
        try:
            observed = await gather(self.kube, wanted)
            plan = make_plan(wanted, observed, self.clock(), policy)
        except UnavailableError:
            raise  # nothing is known: the old status is as good as any
        except Exception as error:
            return report_blind(wanted, error, self.clock()), [error]
        failures = await self._carry_out(key, resource, plan)
        engines = await self._look(key, wanted, observed)
        try:
            course = await self._autoscale(key, wanted, observed, plan, failures)
        except Exception as error:  # a fault of ours there must not keep the rest from being told
            failures.append(error)
            self._forget_course(key)
            course = None
        return report(wanted, observed, plan, failures, self.clock(), engines, course), failures

    async def _autoscale(
        self, key: Key, wanted: Wanted, observed: Observed, plan: Plan, failures: list[Exception]
    ) -> autoscale.Course | None:
        """What becomes of the sizes; a scaler that is written here makes a pass of its own."""
        spec, serving = wanted.spec, plan.step.serving
        if spec is None or not autoscale.is_active(spec) or wanted.refusal is not None:
            self._forget_course(key)
            return None
        course = self._courses.get(key)
        if course is None or (course.uid, course.revision) != (wanted.owner.uid, serving):
            course = autoscale.begin(wanted.owner.uid, wanted.previous, serving)
        if autoscale.is_due(course, self.even_clock()):
            pages = await self.read_pages(autoscale.targets(observed, key.namespace, serving))
            now, rolling_out = self.clock(), is_rolling_out(wanted, observed, plan)
            hold = autoscale.why_held(key.name, spec, observed, rolling_out=rolling_out)
            full, even = autoscale.why_full(observed, now), self.even_clock()
            course = autoscale.look(course, spec, observed, plan.pools, pages, hold, full, even, now)
            for role, manifest in scaler_writes(wanted, observed, course).items():
                why = await self._resize(key, manifest, observed, failures)
                course = autoscale.undone(course, role, why) if why else course
        self._courses[key] = course
        self.on_course(key, course)
        return course

    async def _resize(
        self, key: Key, manifest: Manifest, observed: Observed, failures: list[Exception]
    ) -> str:
        """Why the scaler was not given its new number; empty if it was. It is read once more: to look takes seconds."""
        kind, name = key_of(manifest)
        try:
            live = await self.kube.get(kind, key.namespace, name)
        except KubeError as error:
            failures.append(error)
            return str(error)
        write = resized(manifest, observed.live[kind, name], live)
        if write is None:
            return f"{kind} {name} was changed by somebody else meanwhile"
        return "" if await self._apply(key, write, failures) else str(failures[-1])

    def _forget_course(self, key: Key) -> None:
        self._courses.pop(key, None)
        self.on_course(key, None)

    async def _look(self, key: Key, wanted: Wanted, observed: Observed) -> Standing:
        """What engines refuse of each other; they are looked at last, so that nothing waits for it."""
        standing, now = self._standings.get(key), self.clock()
        if standing is None or standing.uid != wanted.owner.uid:
            standing = resume(wanted.owner.uid, wanted.previous.conditions, now)
        if is_due(standing, now):
            pages = await self.read_pages(targets(observed, key.namespace))
            standing = look(standing, observed, pages, now)
        else:
            standing = unlearn(standing, observed)
        self._standings[key] = standing
        return standing

    async def _carry_out(self, key: Key, resource: Manifest, plan: Plan) -> list[Exception]:
        """Everything in the plan; one failure does not keep the rest from being tried."""
        failures: list[Exception] = []
        if plan.secret is not None:
            try:
                await self._write_secret(key, resource, plan.secret)
            except KubeError as error:
                failures.append(error)
        for manifest in plan.apply:
            await self._apply(key, manifest, failures)
        for manifest in plan.statuses:
            await self._apply(key, manifest, failures, status=True)
        for item in plan.prune:
            kind, name = key_of(item)
            try:
                await self.kube.delete(kind, key.namespace, name, item["metadata"]["uid"])
                _log.info("%s: deleted %s %s", key, kind, name)
            except KubeError as error:
                failures.append(error)
        return failures

    async def _apply(
        self, key: Key, manifest: Manifest, failures: list[Exception], *, status: bool = False
    ) -> bool:
        """Whether it was applied; if not, why is the last of `failures`."""
        try:
            await self.kube.apply(manifest, status=status)
        except KubeError as error:
            failures.append(error)
            return False
        if not status:
            _log.info("%s: applied %s %s", key, *key_of(manifest))
        return True

    async def _write_secret(self, key: Key, resource: Manifest, write: SecretWrite) -> None:
        await (self.kube.replace if write.exists else self.kube.create)(write.manifest)
        _log.info("%s: %s", key, write.message)
        notice = Notice("Warning" if write.is_repair else "Normal", write.reason, write.message)
        await tell(self.kube, resource, [notice], self.clock())

    async def _say(self, resource: Manifest, said: Report) -> None:
        """The status, if it changed, and events about what changed in it."""
        status = said.status.to_wire()
        if status == resource.get("status"):
            return
        try:
            await self.kube.apply(status_of(resource, status), status=True)
        except GoneError:
            return
        await tell(self.kube, resource, said.notices, self.clock())
