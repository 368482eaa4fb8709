"""No handle is given out twice or late, whatever replicas see of each other and whatever a network does to their messages."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disagg_router.backends import Backend
from disagg_router.handles import Handle, Handles
from disagg_router.http1 import Address
from disagg_router.legs import handback
from disagg_router.ownership import Hello, Owner, Peers, Put, Take
from disagg_router.replicas import Replica, Replicas, replicas_in
from disagg_router.seal import Channel, Secrets

SECRETS = Secrets(b"s" * 32)
DECODE = Backend("d-0", "decode", "rev1", Address("10.0.0.2", 8000), 5700)
RETENTION = 100.0
NAMES = ("r-0", "r-1", "r-2")


def handle(number: int) -> Handle:
    params = msgspec.Raw(b'{"remote_block_ids": [[%d]]}' % number)
    return Handle(DECODE, handback.Handback(params, 1, handback.digest([number])))


class Node:
    """A replica's process: what it keeps and what it says. Its clock is its own."""

    def __init__(self, world: World, name: str, boot: int) -> None:
        self._world, self._zero = world, 1000.0 * boot
        self.dropped: Counter[str] = Counter()
        channel = Channel(lambda: SECRETS, b"%16d" % boot)
        self.store = Handles(self.clock, RETENTION)
        self.peers = Peers(channel, self.clock)
        self.view = Replicas(name)
        self.owner = Owner(
            self.store, channel, b"boot%12d" % boot, self.clock, lambda why: self.dropped.update([why])
        )

    def clock(self) -> float:
        return self._world.now - self._zero


class World:
    def __init__(self) -> None:
        self.now = 0.0
        self.boots = 0
        self.nodes = {name: self.start(name) for name in NAMES}
        self.made: list[float] = []
        self.given_out: list[int] = []
        self.sent: list[tuple[str, bytes]] = []

    def start(self, name: str) -> Node:
        self.boots += 1
        node = Node(self, name, self.boots)
        node.view.ready = tuple(Replica(n, Address(n, 1)) for n in NAMES)
        return node

    def see(self, at: str, names: frozenset[str]) -> None:
        self.nodes[at].view.ready = tuple(Replica(n, Address(n, 1)) for n in sorted(names))

    def greet(self, node: Node, name: str) -> None:
        if node.peers.find(name) is None:
            number, message = node.peers.ask(Hello())
            answer = self.nodes[name].owner.answer(message)
            assert answer is not None
            node.peers.heard(name, number, answer)

    def put(self, at: str, key: bytes) -> None:
        """A turn ends at a replica. What that sends is under way until it is delivered, once, often or never."""
        node, new = self.nodes[at], handle(len(self.made))
        self.made.append(self.now)
        owner = node.view.owner(key)
        if owner is None:
            node.store.put(key, new)
            return
        self.greet(node, owner.name)
        peer = node.peers.find(owner.name)
        assert peer is not None
        until = node.clock() + node.store.seconds + peer.ahead
        self.sent.append((owner.name, node.peers.ask(Put(peer.boot, key, until, new))[1]))

    def take(self, at: str, key: bytes) -> None:
        """A turn begins at a replica."""
        node = self.nodes[at]
        owner = node.view.owner(key)
        if owner is None:
            self.give_out(node.store.take(key))
            return
        self.greet(node, owner.name)
        peer = node.peers.find(owner.name)
        assert peer is not None
        number, message = node.peers.ask(Take(peer.boot, key))
        self.sent.append((owner.name, message))
        answer = self.nodes[owner.name].owner.answer(message)
        assert answer is not None
        said = node.peers.heard(owner.name, number, answer)
        self.give_out(said.handle if said is not None else None)

    def give_out(self, taken: Handle | None) -> None:
        if taken is None:
            return
        [[number]] = msgspec.json.decode(taken.kv.params)["remote_block_ids"]
        assert self.now - self.made[number] < 0.75 * RETENTION + 1e-6, (
            "by the time that it was made, not that it came"
        )
        self.given_out.append(number)

    def deliver(self, index: int, to: str | None) -> None:
        """A message, or one that was recorded, reaches the replica it was meant for, or another."""
        if self.sent:
            meant_for, message = self.sent[index % len(self.sent)]
            self.nodes[to or meant_for].owner.answer(message)

    def restart(self, name: str) -> None:
        self.nodes[name] = self.start(name)


AT, KEYS = st.sampled_from(NAMES), st.sampled_from([b"a" * 16, b"b" * 16])
STEPS = st.one_of(
    st.tuples(st.just("put"), AT, KEYS),
    st.tuples(st.just("take"), AT, KEYS),
    st.tuples(st.just("deliver"), st.integers(0, 20), st.one_of(st.none(), AT)),
    st.tuples(st.just("deliver"), st.integers(0, 20), st.none()),
    st.tuples(st.just("see"), AT, st.frozensets(AT)),
    st.tuples(st.just("restart"), AT),
    st.tuples(st.just("wait"), st.floats(0, 40)),
)


@settings(max_examples=300)
@given(steps=st.lists(STEPS, max_size=50))
def test_no_handle_is_used_twice_or_late(steps: list[tuple[Any, ...]]) -> None:
    world = World()
    for what, *arguments in steps:
        if what == "wait":
            world.now += arguments[0]
        else:
            getattr(world, what)(*arguments)
    assert len(world.given_out) == len(set(world.given_out)), "once"


def elsewhere(world: World, at: str) -> tuple[bytes, str]:
    """A conversation whose owner is another replica than `at`, and that owner."""
    for number in range(100):
        owner = world.nodes[at].view.owner(b"%16d" % number)
        if owner is not None:
            return b"%16d" % number, owner.name
    raise AssertionError


def test_any_replica_finds_what_another_made() -> None:
    world = World()
    key, owner = elsewhere(world, "r-0")
    world.put("r-0", key)
    world.deliver(0, None)
    other = next(name for name in NAMES if name not in ("r-0", owner))
    world.take(other, key)
    world.take(owner, key)
    world.take("r-0", key)
    assert world.given_out == [0]


def test_a_put_that_comes_again_after_its_handle_was_used_is_refused() -> None:
    world = World()
    key, owner = elsewhere(world, "r-0")
    world.put("r-0", key)
    world.deliver(0, None)
    world.take(owner, key)
    world.deliver(0, None)
    world.take(owner, key)
    assert world.given_out == [0]
    assert world.nodes[owner].dropped == {"replayed": 1}


def test_a_put_that_was_recorded_before_its_owner_restarted_is_refused() -> None:
    world = World()
    key, owner = elsewhere(world, "r-0")
    world.put("r-0", key)
    world.deliver(0, None)
    world.take(owner, key)
    world.restart(owner)
    world.deliver(0, None)
    world.take(owner, key)
    assert world.given_out == [0]
    assert world.nodes[owner].dropped == {"not_for_us": 1}


def test_a_put_for_one_replica_is_refused_by_another() -> None:
    world = World()
    key, owner = elsewhere(world, "r-0")
    world.put("r-0", key)
    other = next(name for name in NAMES if name not in ("r-0", owner))
    world.deliver(0, other)
    assert len(world.nodes[other].store) == 0
    assert world.nodes[other].dropped == {"not_for_us": 1}


def test_a_take_that_comes_again_takes_nothing() -> None:
    world = World()
    key, owner = elsewhere(world, "r-0")
    world.take("r-0", key)  # recorded
    world.put("r-0", key)
    world.deliver(1, None)
    world.deliver(0, None)
    assert len(world.nodes[owner].store) == 1


@pytest.mark.parametrize(("held_up", "kept"), [(74.9, 1), (75.1, 0)])
def test_a_put_that_was_held_up_ends_no_later(held_up: float, kept: int) -> None:
    """Three quarters of 100 s, though the two clocks differ by a thousand."""
    world = World()
    key, owner = elsewhere(world, "r-0")
    world.put("r-0", key)
    world.now += held_up
    world.deliver(0, None)
    assert len(world.nodes[owner].store) == kept
    assert world.nodes[owner].dropped == ({} if kept else {"late": 1})
    world.now += 1.0
    world.take(owner, key)
    assert world.given_out == []


def test_an_answer_that_was_held_up_makes_a_handle_end_earlier_not_later() -> None:
    world = World()
    key, owner = elsewhere(world, "r-0")
    node = world.nodes["r-0"]
    number, message = node.peers.ask(Hello())
    answer = world.nodes[owner].owner.answer(message)
    assert answer is not None
    world.now += 20
    node.peers.heard(owner, number, answer)
    world.put("r-0", key)
    world.deliver(0, None)
    world.now += 60
    world.take(owner, key)
    assert world.given_out == []


def test_what_another_clock_showed_long_ago_does_not_count() -> None:
    world = World()
    _, owner = elsewhere(world, "r-0")
    node = world.nodes["r-0"]
    world.greet(node, owner)
    world.now += 59
    assert node.peers.find(owner) is not None
    world.now += 1
    assert node.peers.find(owner) is None


def test_what_is_no_answer_makes_a_replica_unknown() -> None:
    world = World()
    _, owner = elsewhere(world, "r-0")
    node = world.nodes["r-0"]
    world.greet(node, owner)
    number, _ = node.peers.ask(Hello())
    assert node.peers.heard(owner, number, b"garbage") is None
    assert node.peers.find(owner) is None


def test_a_replica_keeps_nothing_longer_than_its_own_settings_say() -> None:
    """While a shorter retention is rolled out, others still ask for more."""
    world = World()
    key, owner = elsewhere(world, "r-0")
    node = world.nodes["r-0"]
    world.greet(node, owner)
    peer = node.peers.find(owner)
    assert peer is not None
    put = Put(peer.boot, key, node.clock() + 10 * RETENTION + peer.ahead, handle(0))
    world.nodes[owner].owner.answer(node.peers.ask(put)[1])
    world.now += 0.75 * RETENTION
    assert world.nodes[owner].store.take(key) is None


def test_an_unknown_question_is_dropped() -> None:
    world = World()
    channel = Channel(lambda: SECRETS, b"x" * 16)
    for payload in (b"", b"{}", b'{"kind":"steal"}', b'{"kind":"take"}', b"[" * 100_000):
        assert world.nodes["r-0"].owner.answer(channel.ask(payload)[1]) is None
    assert world.nodes["r-0"].dropped == {"malformed": 5}


# -- who owns ------------------------------------------------------------------------------------------------


@given(
    key=st.binary(min_size=16, max_size=16),
    names=st.sets(st.text(min_size=1, max_size=8), min_size=1, max_size=6),
)
def test_all_replicas_that_see_the_same_name_the_same_owner_and_losing_another_moves_nothing(
    key: bytes, names: set[str]
) -> None:
    ready = tuple(Replica(name, Address(name, 1)) for name in sorted(names))

    def owner(me: str, ready: tuple[Replica, ...]) -> str:
        view = Replicas(me)
        view.publish(ready)
        found = view.owner(key)
        return me if found is None else found.name

    [first] = {owner(name, ready) for name in names}
    for lost in names - {first}:
        assert owner(first, tuple(r for r in ready if r.name != lost)) == first


def test_a_replica_that_knows_of_none_keeps_what_it_makes() -> None:
    assert Replicas("r-0").owner(b"a") is None


def piece(role: str, family: str, *endpoints: dict[str, Any]) -> dict[str, Any]:
    return {
        "metadata": {"labels": {"inference.disagg.dev/role": role}},
        "addressType": family,
        "endpoints": list(endpoints),
    }


def pod(name: str, address: str, **conditions: bool) -> dict[str, Any]:
    return {"addresses": [address], "conditions": conditions, "targetRef": {"kind": "Pod", "name": name}}


def test_replicas_are_the_ready_pods_of_the_routers_own_service() -> None:
    slices = [
        piece("router", "IPv6", pod("r-0", "fd00::1", ready=True)),
        piece(
            "router",
            "IPv4",
            pod("r-0", "10.0.0.1", ready=True),
            pod("r-1", "10.0.0.2"),
            pod("r-2", "10.0.0.3", ready=False),
            pod("r-3", "10.0.0.4", ready=True, terminating=True),
            {"addresses": ["10.0.0.5"]},
            {"addresses": [], "targetRef": {"name": "r-5"}},
        ),
        piece("decode", "IPv4", pod("d-0", "10.0.0.9", ready=True)),
        piece("router", "FQDN", pod("r-6", "example.org")),
        {},
    ]
    assert replicas_in(slices, 8001) == (
        Replica("r-0", Address("10.0.0.1", 8001)),
        Replica("r-1", Address("10.0.0.2", 8001)),
    )
