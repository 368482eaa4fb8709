"""The Lease, with a store and a clock in memory."""

import asyncio
import copy
from typing import Any

import pytest

from disagg_operator.errors import UnavailableError
from disagg_operator.lease import LEASE_SECONDS, Lease, LeaseLost


class Store:
    """Keeps one Lease as the API server does: a replace of an older version fails."""

    def __init__(self) -> None:
        self.lease: dict[str, Any] | None = None
        self.version = 0
        self.broken = False
        self.is_silent = False

    async def get(self, kind: str, namespace: str, name: str) -> dict[str, Any] | None:
        self._check()
        if self.is_silent:
            await asyncio.Event().wait()
        return copy.deepcopy(self.lease)

    async def create(self, manifest: dict[str, Any]) -> dict[str, Any]:
        self._check()
        if self.lease is not None:
            raise UnavailableError("create Lease", "already exists", 409)
        return self._put(manifest)

    async def replace(self, manifest: dict[str, Any]) -> dict[str, Any]:
        self._check()
        if (
            self.lease is None
            or manifest["metadata"]["resourceVersion"] != self.lease["metadata"]["resourceVersion"]
        ):
            raise UnavailableError("update Lease", "conflict", 409)
        return self._put(manifest)

    def holder(self) -> str:
        assert self.lease is not None
        return str(self.lease["spec"]["holderIdentity"])

    def _put(self, manifest: dict[str, Any]) -> dict[str, Any]:
        self.version += 1
        self.lease = copy.deepcopy(manifest)
        self.lease["metadata"]["resourceVersion"] = str(self.version)
        return self.lease

    def _check(self) -> None:
        if self.broken:
            raise UnavailableError("reach the API server", "no answer")


class Time:
    """A clock that moves when somebody sleeps, and does what is planned for a moment."""

    def __init__(self) -> None:
        self.now = 0.0
        self.plans: list[tuple[float, Any]] = []

    def monotonic(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds
        for moment, action in [plan for plan in self.plans if plan[0] <= self.now]:
            self.plans.remove((moment, action))
            await action()


def lease(store: Store, time: Time, holder: str) -> Lease:
    return Lease(store, "system", "disagg", holder, time.monotonic, time.sleep)


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def time() -> Time:
    return Time()


async def test_the_first_gets_it_at_once(store: Store, time: Time) -> None:
    await lease(store, time, "a").acquire()
    assert (store.holder(), time.now) == ("a", 0)


async def test_a_restarted_holder_gets_it_at_once(store: Store, time: Time) -> None:
    await lease(store, time, "a").acquire()
    await lease(store, time, "a").acquire()
    assert time.now == 0


async def test_another_waits_until_it_runs_out(store: Store, time: Time) -> None:
    await lease(store, time, "a").acquire()
    await lease(store, time, "b").acquire()
    assert store.holder() == "b"
    assert LEASE_SECONDS < time.now <= LEASE_SECONDS + 4


async def test_another_waits_as_long_as_it_is_renewed(store: Store, time: Time) -> None:
    await lease(store, time, "a").acquire()

    async def renew() -> None:
        current = await store.get("Lease", "", "")
        assert current is not None
        await store.replace(current)

    time.plans = [(moment, renew) for moment in (5.0, 10.0, 15.0, 20.0)]
    await lease(store, time, "b").acquire()
    assert time.now > 20 + LEASE_SECONDS


async def test_a_released_one_is_free_at_once(store: Store, time: Time) -> None:
    first = lease(store, time, "a")
    await first.acquire()
    await first.release()
    await lease(store, time, "b").acquire()
    assert (store.holder(), time.now) == ("b", 0)


async def test_a_holder_that_lost_it_stops(store: Store, time: Time) -> None:
    first = lease(store, time, "a")
    await first.acquire()

    async def steal() -> None:
        assert store.lease is not None
        store.lease["spec"]["holderIdentity"] = "b"

    time.plans = [(20.0, steal)]
    with pytest.raises(LeaseLost, match="no longer ours"):
        await first.keep()
    assert time.now == 20


async def test_a_holder_that_cannot_renew_stops_before_it_runs_out(store: Store, time: Time) -> None:
    first = lease(store, time, "a")
    await first.acquire()
    store.broken = True
    with pytest.raises(LeaseLost, match="could not be renewed"):
        await first.keep()
    assert time.now <= LEASE_SECONDS


async def test_a_holder_that_gets_no_answer_stops_before_it_runs_out(store: Store, time: Time) -> None:
    """A request may take longer than the lease: a connection that was cut without a word is noticed late."""
    first = lease(store, time, "a")
    first.patience = 0.01
    await first.acquire()
    store.is_silent = True
    with pytest.raises(LeaseLost, match="no answer within"):
        await asyncio.wait_for(first.keep(), 60)
    assert time.now <= LEASE_SECONDS


async def test_an_outage_while_waiting_is_waited_out(store: Store, time: Time) -> None:
    store.broken = True

    async def mend() -> None:
        store.broken = False

    time.plans = [(30.0, mend)]
    await lease(store, time, "a").acquire()
    assert store.holder() == "a"
