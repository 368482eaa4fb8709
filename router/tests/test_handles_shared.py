"""Several router replicas on real sockets: what a turn at one leaves behind is found by a turn at another, and used once."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from disagg_router.config import HandleSharing
from disagg_router.discovery import FixedSource
from disagg_router.http1 import Address
from disagg_router.ownership import MESSAGE_BYTES
from disagg_router.replicas import Replica
from disagg_router.server import Router
from disagg_router.sharing import PATH
from router.tests.conftest import MODEL, Stack, backend, make_config, until
from router.tests.fake_engine import FakeEngine, Seen
from router.tests.fake_upstream import World


@dataclass
class Between:
    """Stands between replicas and one of them: records what they send it, and answers when a test lets it."""

    to: int = 0
    port: int = 0
    holds: set[str] = field(default_factory=set)
    """Kinds of message whose answers are held back."""
    seen: list[tuple[str, bytes]] = field(default_factory=list)
    answered: Counter[str] = field(default_factory=Counter)
    go: asyncio.Event = field(default_factory=asyncio.Event)
    _runner: web.AppRunner | None = None

    async def start(self) -> Between:
        app = web.Application(client_max_size=2 * MESSAGE_BYTES)
        app.router.add_post(PATH, self._pass_on)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.port = self._runner.addresses[0][1]
        return self

    async def stop(self) -> None:
        self.go.set()
        if self._runner is not None:
            await self._runner.cleanup()

    async def _pass_on(self, request: web.Request) -> web.Response:
        message = await request.read()
        kind = next(kind for kind in ("hello", "put", "take") if b'"kind":"%s"' % kind.encode() in message)
        self.seen.append((kind, message))
        status, answer = await say(self.to, message)
        self.answered[kind] += 1
        if kind in self.holds:
            await self.go.wait()
        return web.Response(status=status, body=answer)

    def recorded(self, kind: str) -> list[bytes]:
        return [message for k, message in self.seen if k == kind]


async def say(port: int, message: bytes) -> tuple[int, bytes]:
    """Say something to a replica."""
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"http://127.0.0.1:{port}{PATH}", data=message) as answer,
    ):
        return answer.status, await answer.read()


@dataclass
class Team:
    """Replicas in front of one prefill and one decode engine; the turns of a conversation go wherever a test sends them."""

    stacks: list[Stack]
    world: World
    between: list[Between]
    messages: list[dict[str, str]] = field(default_factory=list)
    turns: int = 0

    @property
    def routers(self) -> list[Router]:
        return [stack.router for stack in self.stacks]

    def see(self, at: int, *others: int) -> None:
        """What a replica knows of replicas."""
        self.routers[at].replicas.publish(
            tuple(Replica(f"router-{i}", Address("127.0.0.1", self.between[i].port)) for i in others)
        )

    async def turn(self, at: int, text: str = "and?") -> None:
        """The conversation's next turn, at that replica; its handle is where it belongs when this returns."""
        answer = await self.ask(at, text)
        self.messages += [{"role": "user", "content": text}, answer["choices"][0]["message"]]
        await self.all_put()

    async def ask(self, at: int, text: str) -> Any:
        """A turn that no other follows."""
        said = [*self.messages, {"role": "user", "content": text}]
        status, answer = await self.stacks[at].post({"model": MODEL, "messages": said})
        assert status == 200, answer
        self.turns += 1
        return answer

    async def all_put(self) -> None:
        await until(lambda: self.count("kept") + self.count("not_kept") == self.turns, "all handles were put")

    def count(self, result: str) -> float:
        return sum(stack.metric("disagg_router_handles_total", result=result) for stack in self.stacks)

    def dropped(self, at: int) -> dict[str, float]:
        name = "disagg_router_handle_messages_dropped_total"
        reasons = ("malformed", "unknown_key", "forged", "replayed", "not_for_us", "late", "too_large")
        counts = {why: self.stacks[at].metric(name, reason=why) for why in reasons}
        return {why: count for why, count in counts.items() if count}

    def ahead(self, seconds: float) -> None:
        """Time passes, for all of them."""
        for stack in self.stacks:
            stack.ahead += seconds

    async def first_turn(self, at: int, owner: int) -> None:
        """Begin a conversation, at one replica, which another one is the owner of."""
        for number in range(200):
            before = len(self.between[owner].recorded("put"))
            self.messages = []
            await self.turn(at, f"question {number}")
            if len(self.between[owner].recorded("put")) > before:
                return
        raise AssertionError

    def used_well(self, times: int) -> bool:
        assert (self.world.wrong, self.world.dead) == ([], [])
        return self.world.read_back == times


MakeTeam = Callable[..., Awaitable[Team]]


def write_secrets(folder: Path, *secrets: int) -> str:
    folder.mkdir(exist_ok=True)
    for name, number in zip(("previous", "current", "next"), secrets, strict=True):
        (folder / name).write_bytes(bytes([number]) * 32)
    return str(folder)


@pytest.fixture
async def make_team(tmp_path: Path) -> AsyncIterator[MakeTeam]:
    teams: list[Team] = []

    async def make(replicas: int = 3, ask_seconds: float = 60.0, **changes: Any) -> Team:
        prefill, decode = await FakeEngine().start(), await FakeEngine().start()
        backends = (backend("prefill", 0, prefill.port), backend("decode", 0, decode.port))
        stacks: list[Stack] = []
        sharing = HandleSharing(write_secrets(tmp_path / "secrets", 1, 2, 3), ask_seconds)
        config = make_config(**{"mode": "BidirectionalPull", "handles": sharing, **changes})
        for number in range(replicas):
            # No two clocks show the same.
            stacks.append(
                Stack(None, aiohttp.ClientSession(), [prefill], [decode], backends, ahead=1e6 * number)  # type: ignore[arg-type]
            )
            stack = stacks[-1]
            stack.router = Router(
                config,
                "127.0.0.1",
                lambda stack=stack: stack.ahead,
                f"router-{number}",  # type: ignore[misc]
            )
            await stack.router.start(FixedSource(backends))
        between = [await Between(stack.router.admin.port).start() for stack in stacks]
        team = Team(stacks, World("pull", back=True), between)
        team.world.install(stacks[0])
        teams.append(team)
        for number in range(replicas):
            team.see(number, *range(replicas))
            await until(lambda: all(r.fleet.synced for r in team.routers), "the replicas have their engines")
        return team

    yield make
    for team in teams:
        for between in team.between:
            await between.stop()
        for stack in team.stacks:
            await stack.client.close()
            await stack.router.stop()
        for engine in (team.stacks[0].prefill, team.stacks[0].decode):
            await engine.stop()


@pytest.mark.parametrize("replicas", [2, 3])
async def test_every_turn_finds_what_the_turn_before_left_at_another_replica(
    make_team: MakeTeam, replicas: int
) -> None:
    team = await make_team(replicas)
    for number in range(3 * replicas):
        await team.turn(number % replicas)
    assert team.used_well(3 * replicas - 1)
    assert (team.count("kept"), team.count("no_answer"), team.count("not_kept")) == (3 * replicas, 0, 0)
    assert all(team.dropped(i) == {} for i in range(replicas))


async def test_each_handle_is_counted_by_one_replica(make_team: MakeTeam) -> None:
    team = await make_team()
    for conversation in range(6):
        team.messages = []
        await team.turn(conversation % 3, f"question {conversation}")

    def counted() -> float:
        return sum(stack.metric("disagg_router_retained_kv_blocks") for stack in team.stacks)

    assert counted() == 6 * team.world.blocks
    await team.turn(0)
    assert counted() == 6 * team.world.blocks, "one was read, and a newer one has come"
    team.ahead(1e5)
    assert counted() == 0


async def test_a_handle_is_used_once_by_turns_at_all_replicas_at_the_same_time(make_team: MakeTeam) -> None:
    team = await make_team()
    await team.turn(0)
    await asyncio.gather(*(team.ask(number % 3, f"and {number}?") for number in range(9)))
    assert team.used_well(1)


async def test_a_first_turn_asks_nobody(make_team: MakeTeam) -> None:
    team = await make_team()
    await team.first_turn(0, owner=1)
    assert Counter(kind for between in team.between for kind, _ in between.seen)["take"] == 0


async def test_an_owner_that_is_dead_costs_a_computed_turn(make_team: MakeTeam) -> None:
    team = await make_team()
    await team.first_turn(0, owner=1)
    await team.between[1].stop()
    await team.turn(2)
    assert team.used_well(0)
    assert (team.count("no_answer"), team.count("not_kept")) == (1, 1)
    for at in (0, 2):
        team.see(at, 0, 2)
    await team.turn(0)
    await team.turn(2)
    assert team.used_well(1)


async def test_an_owner_that_is_slow_costs_a_computed_turn_and_what_it_gave_out_is_used_by_nobody(
    make_team: MakeTeam,
) -> None:
    team = await make_team(ask_seconds=3.0)
    await team.first_turn(0, owner=1)
    slow = team.between[1]
    slow.holds = {"take"}
    await team.ask(2, "and?")
    assert team.count("no_answer") == 1
    await until(lambda: slow.answered["take"] == 1, "it was given out")
    slow.holds = set()
    slow.go.set()
    await team.ask(1, "and?")
    assert team.used_well(0)


async def test_a_put_that_nobody_heard_of_is_not_sent_again_and_nobody_else_keeps_it(
    make_team: MakeTeam,
) -> None:
    """It may have arrived, so a copy kept by its sender could be a second use."""
    team = await make_team(ask_seconds=0.1)
    team.between[1].holds = {"put"}
    await team.first_turn(0, owner=1)
    assert team.count("not_kept") >= 1
    assert len(team.between[1].recorded("put")) == 1
    team.between[1].go.set()
    team.see(0, 0)
    team.see(1, 1)
    team.see(2, 2)
    await asyncio.gather(*(team.ask(number % 3, f"and {number}?") for number in range(6)))
    assert team.used_well(1), "it had arrived"


async def test_what_was_recorded_cannot_be_played_again(make_team: MakeTeam) -> None:
    team = await make_team()
    await team.first_turn(0, owner=1)
    await team.turn(2)
    assert team.used_well(1)
    owner = team.routers[1].admin.port
    [*_, take] = team.between[1].recorded("take")
    for put in team.between[1].recorded("put"):
        assert await say(owner, put) == (403, b"")
    assert await say(owner, take) == (403, b""), "the newer handle stays"
    assert team.dropped(1) == {"replayed": len(team.between[1].recorded("put")) + 1}
    await team.turn(0)
    assert team.used_well(2)


async def test_what_was_recorded_is_worth_nothing_to_the_owners_successor(make_team: MakeTeam) -> None:
    team = await make_team()
    await team.first_turn(0, owner=1)
    recorded = team.between[1].recorded("put")[-1]
    await team.turn(2)
    stack = team.stacks[1]
    await stack.router.stop()
    stack.router = Router(stack.router.config, "127.0.0.1", lambda: stack.ahead, "router-1")
    await stack.router.start(FixedSource(stack.backends))
    team.between[1].to = stack.router.admin.port
    status, _ = await say(stack.router.admin.port, recorded)
    assert (status, team.dropped(1)) == (200, {"not_for_us": 1})
    await team.turn(0)
    await team.turn(2)
    await team.turn(0)
    assert team.used_well(2), "the first turn after the restart is computed, later ones are not"


async def test_garbage_forgeries_and_what_is_too_large_are_refused_and_nothing_comes_of_them(
    make_team: MakeTeam,
) -> None:
    team = await make_team()
    await team.first_turn(0, owner=1)
    owner = team.routers[1].admin.port
    forged = bytearray(team.between[1].recorded("put")[-1])
    forged[-40] ^= 1
    for message, status in (
        (b"", 403),
        (b"{}", 403),
        (bytes(forged), 403),
        (b"x" * (MESSAGE_BYTES + 1), 413),
    ):
        assert (await say(owner, message))[0] == status
    assert team.dropped(1) == {"malformed": 2, "forged": 1, "too_large": 1}
    await team.turn(2)
    assert team.used_well(1)


async def test_replicas_of_other_secrets_are_not_believed(make_team: MakeTeam, tmp_path: Path) -> None:
    team, stranger = await make_team(2), await make_team(1)
    await team.first_turn(0, owner=1)
    config = HandleSharing(write_secrets(tmp_path / "others", 7, 8, 9), 60.0)
    stack = stranger.stacks[0]
    await stack.router.stop()
    stack.router = Router(
        make_config(mode="BidirectionalPull", handles=config), "127.0.0.1", lambda: 0.0, "router-0"
    )
    await stack.router.start(FixedSource(team.stacks[0].backends))
    stack.router.replicas.publish(team.routers[0].replicas.ready)
    status, _ = await stack.post(
        {"model": MODEL, "messages": [*team.messages, {"role": "user", "content": "and?"}]}
    )
    assert status == 200
    assert team.used_well(0)
    assert team.dropped(1)["unknown_key"] >= 1
    await team.turn(0)
    assert team.used_well(1)


async def test_a_handle_ends_in_time_at_another_replica_too(make_team: MakeTeam) -> None:
    for age, used in ((359.0, 1), (361.0, 0)):
        team = await make_team()
        await team.first_turn(0, owner=1)
        team.ahead(age)
        await team.turn(2)
        assert team.used_well(used)


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize(("age", "used"), [(159.0, 1), (161.0, 0)])
async def test_a_handle_ends_by_when_its_turn_was_sent_however_late_the_answer_comes(
    make_team: MakeTeam, replicas: int, age: float, used: int
) -> None:
    """Decode's own time may have begun then."""
    team = await make_team(replicas)
    decode = team.stacks[0].decode
    speak = decode.decode

    async def held_up(engine: FakeEngine, request: web.Request, seen: Seen) -> web.StreamResponse:
        team.ahead(200.0)
        return await speak(engine, request, seen)

    decode.decode = held_up
    if replicas == 1:
        await team.turn(0)
    else:
        await team.first_turn(0, owner=1)
    decode.decode = speak
    team.ahead(age)
    await team.turn(0)
    assert team.used_well(used)


@pytest.mark.parametrize("views", [((0,), (0, 1), (0, 1, 2)), ((1, 2), (0, 2), (0, 1)), ((), (2,), (1,))])
async def test_replicas_that_see_different_replicas_never_use_a_handle_twice(
    make_team: MakeTeam, views: tuple[tuple[int, ...], ...]
) -> None:
    team = await make_team()
    for at, seen in enumerate(views):
        team.see(at, *seen)
    for number in range(6):
        await team.turn(number % 3)
        await asyncio.gather(*(team.ask(at, f"and {at}?") for at in (0, 1, 2)))
    assert (team.world.wrong, team.world.dead) == ([], [])


async def test_a_handle_that_is_too_large_to_send_is_not_kept(make_team: MakeTeam) -> None:
    team = await make_team(2)
    team.world.blocks = MESSAGE_BYTES // 3
    for number in range(200):
        team.messages = []
        await team.turn(0, f"question {number}")
        if team.count("not_kept"):
            break
    assert team.count("not_kept") == 1
    await team.turn(1)
    assert team.used_well(0)


async def test_without_secrets_replicas_know_nothing_of_each_other(make_team: MakeTeam) -> None:
    team = await make_team(2, handles=None)
    assert (await say(team.routers[1].admin.port, b"hello"))[0] == 404
    for number in range(4):
        await team.turn(number % 2)
    assert team.between[0].seen == team.between[1].seen == []
    assert (team.world.wrong, team.world.dead) == ([], [])


@pytest.mark.parametrize("mode", ["BidirectionalPush", "Pull", "Push"])
async def test_in_other_modes_replicas_ask_each_other_nothing(make_team: MakeTeam, mode: str) -> None:
    team = await make_team(2, mode=mode)
    team.world.transfer, team.world.back = "push" if mode == "Push" else "pull", False
    if mode == "BidirectionalPush":
        for engine in (team.stacks[0].prefill, team.stacks[0].decode):
            engine.prefill = engine.decode = FakeEngine().decode
    for number in range(3):
        await team.ask(number % 2, "and?")
        team.messages += [
            {"role": "user", "content": "and?"},
            {"role": "assistant", "content": "one two three"},
        ]
    assert team.between[0].seen == team.between[1].seen == []
