"""Where turns go: tables of fleets and loads against choices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg_router.backends import Backend, Role
from disagg_router.config import Policy
from disagg_router.http1 import Address
from disagg_router.pick import Choice, Load, any_engine, choose, rank
from disagg_router.session import Placement, Session


def engine(role: Role, n: int, revision: str = "r1", zone: str = "", **state: bool) -> Backend:
    name = f"{role[0]}{n}-{revision}"
    return Backend(name, role, revision, Address(f"10.0.{role == 'decode':d}.{n}", 8000), 5700, zone, **state)


def pool(prefills: int, decodes: int, revision: str = "r1") -> list[Backend]:
    return [engine("prefill", n, revision) for n in range(prefills)] + [
        engine("decode", n, revision) for n in range(decodes)
    ]


def session(n: int = 0, earlier: bool = False) -> Session:
    return Session(b"%016d" % n, "root", earlier)


IDLE = Load({})
ONE = session()


def pick(
    backends: list[Backend],
    s: Session = ONE,
    last: Placement | None = None,
    load: Load = IDLE,
    **kw: object,
) -> Choice:
    choice = choose(backends, s, last, load, **kw)  # type: ignore[arg-type]
    assert choice is not None
    return choice


def test_no_ready_decode_engine_is_no_choice() -> None:
    assert choose([], session(), None, IDLE) is None
    assert choose(pool(2, 0), session(), None, IDLE) is None
    assert choose([engine("decode", 0, ready=False)], session(), None, IDLE) is None
    assert choose([engine("decode", 0, terminating=True)], session(), None, IDLE) is None


def test_a_new_conversation_goes_home_wherever_the_request_arrives() -> None:
    fleet = pool(4, 4)
    for n in range(20):
        one, other = pick(fleet, session(n)), pick(list(reversed(fleet)), session(n))
        assert (one.decode, one.prefill) == (other.decode, other.prefill)
        assert (one.decode_reason, one.prefill_reason) == ("home", "home")
        assert one.holder is None


def test_homes_are_spread_evenly() -> None:
    homes = Counter(pick(pool(4, 4), session(n)).decode.name for n in range(2000))
    assert len(homes) == 4
    assert max(homes.values()) < 1.25 * 2000 / 4


def test_another_engine_takes_over_only_what_becomes_its_own() -> None:
    before = [pick(pool(1, 4), session(n)).decode.name for n in range(500)]
    after = [pick(pool(1, 5), session(n)).decode.name for n in range(500)]
    moved = [b for a, b in zip(before, after, strict=True) if a != b]
    assert set(moved) == {"d4-r1"}
    assert len(moved) < 200


def test_a_known_conversation_stays_where_its_last_turn_was() -> None:
    fleet = pool(3, 3)
    for n in range(10):
        choice = pick(fleet, session(n), Placement("r1", "d1-r1", "p2-r1"))
        assert choice.prefill is not None
        assert (choice.decode.name, choice.prefill.name) == ("d1-r1", "p2-r1")
        assert (choice.decode_reason, choice.prefill_reason) == ("session", "session")
        assert choice.holder is choice.decode


def test_a_lost_pod_moves_the_conversation_and_nobody_else_holds_its_kv() -> None:
    fleet = pool(2, 3)
    gone = [b for b in fleet if b.name != "d1-r1"]
    choice = pick(gone, session(), Placement("r1", "d1-r1", "p0-r1"))
    assert choice.decode_reason == "moved"
    assert choice.prefill_reason == "session"
    assert choice.holder is None


FLEET = pool(2, 3)
AT_D1 = Placement("r1", "d1-r1", "p1-r1")
# Policy, turns in flight, the turn's number, where the last one was; then decode, prefill, and who is asked for KV.
POLICIES: list[tuple[Policy, dict[str, int], int, Placement | None, tuple[str, str, str | None]]] = [
    ("LeastLoaded", {"d0-r1": 1, "d1-r1": 2, "p0-r1": 1}, 0, None, ("d2-r1", "p1-r1", None)),
    ("LeastLoaded", {"d0-r1": 1, "d1-r1": 2, "p1-r1": 1}, 9, AT_D1, ("d2-r1", "p0-r1", "d1-r1")),
    ("LeastLoaded", {"d0-r1": 1, "d2-r1": 2, "p0-r1": 1}, 0, AT_D1, ("d1-r1", "p1-r1", "d1-r1")),
    ("RoundRobin", {"d0-r1": 9}, 0, None, ("d0-r1", "p0-r1", None)),
    ("RoundRobin", {"d1-r1": 9}, 1, None, ("d1-r1", "p1-r1", None)),
    ("RoundRobin", {}, 2, AT_D1, ("d2-r1", "p0-r1", "d1-r1")),
    ("RoundRobin", {}, 3, AT_D1, ("d0-r1", "p1-r1", "d1-r1")),
]


@pytest.mark.parametrize(("policy", "inflight", "number", "last", "where"), POLICIES)
def test_other_policies_ignore_where_a_conversation_was_and_say_who_holds_its_kv(
    policy: Policy,
    inflight: dict[str, int],
    number: int,
    last: Placement | None,
    where: tuple[str, str, str | None],
) -> None:
    for fleet in (FLEET, FLEET[::-1]):
        choice = pick(fleet, last=last, load=Load(inflight), policy=policy, number=number)
        assert choice.prefill is not None
        holder = choice.holder.name if choice.holder else None
        assert (choice.decode.name, choice.prefill.name, holder) == where
        assert (choice.decode_reason, choice.prefill_reason) == ("policy", "policy")


AT_R2 = Placement("r2", "d0-r2", "p0-r2")


@pytest.mark.parametrize("policy", ["LeastLoaded", "RoundRobin"])
def test_other_policies_keep_to_what_holds_for_all(policy: Policy) -> None:
    both = pool(2, 2) + pool(2, 2, "r2")
    for number in range(8):
        choice = pick(both, session(number), policy=policy, number=number)
        assert choice.prefill is not None
        assert choice.prefill.revision == choice.decode.revision
        stays = pick(both, last=AT_R2, policy=policy, number=number)
        assert stays.decode.revision == "r2"
        # It has a history, and where is not known.
        assert pick(both, session(number, earlier=True), policy=policy, number=number).holder is None
        suspects = Load({}, {"d0-r2", "p0-r2"})
        left = pick(both, ONE, AT_R2, suspects, avoid={"p1-r2"}, policy=policy, number=number)
        assert (left.decode.name, left.prefill, left.prefill_reason) == ("d1-r2", None, "none")
        zones = [replace(b, zone=b.name[1]) for b in pool(2, 2)]
        near = pick(zones, policy=policy, number=number, load=Load({"p0-r1": 5}))
        assert near.prefill is not None
        assert near.prefill.zone == near.decode.zone


def test_engines_that_have_nothing_to_do_share_the_least_loaded_turns() -> None:
    taken = Counter(pick(pool(1, 4), session(n), policy="LeastLoaded").decode.name for n in range(400))
    assert len(taken) == 4
    assert max(taken.values()) < 150


def test_a_terminating_pod_takes_no_turn_but_is_asked_for_its_kv() -> None:
    fleet = [replace(b, terminating=b.name == "d1-r1") for b in pool(1, 3)]
    choice = pick(fleet, session(), Placement("r1", "d1-r1", "p0-r1"))
    assert choice.decode.name != "d1-r1"
    assert choice.holder is not None
    assert choice.holder.name == "d1-r1"


def test_an_unremembered_conversation_with_a_history_looks_for_its_kv_at_home() -> None:
    fleet = pool(2, 4)
    choice = pick(fleet, session(7, earlier=True))
    assert choice.decode is pick(fleet, session(7)).decode
    assert choice.holder is choice.decode


def test_an_unremembered_conversation_that_spills_still_looks_for_its_kv_at_home() -> None:
    fleet = pool(1, 2)
    home = pick(fleet, session(7)).decode
    choice = pick(fleet, session(7, earlier=True), load=Load({home.name: 40}))
    assert choice.decode_reason == "spill"
    assert choice.holder is home


def test_a_suspect_pod_does_not_drive_a_conversation_off_its_revision() -> None:
    fleet = pool(1, 1, "r1") + pool(1, 1, "r2")
    choice = pick(fleet, session(), Placement("r1", "d0-r1", "p0-r1"), Load({}, {"d0-r1"}))
    assert choice.decode.name == "d0-r1"


def test_a_busy_home_spills_a_new_conversation_to_the_next_in_its_order() -> None:
    fleet = pool(1, 3)
    order = sorted(
        (b.name for b in fleet if b.role == "decode"), key=lambda n: rank(session().key, n), reverse=True
    )
    assert pick(fleet, load=Load({order[0]: 3, order[1]: 3})).decode.name == order[2]
    assert pick(fleet, load=Load({order[0]: 2})).decode.name == order[1]
    assert pick(fleet, load=Load({order[0]: 2})).decode_reason == "spill"


def test_a_known_conversation_bears_more_load_before_it_moves() -> None:
    fleet = pool(1, 2)
    last = Placement("r1", "d0-r1", "p0-r1")
    assert pick(fleet, session(), last, Load({"d0-r1": 7})).decode.name == "d0-r1"
    spilled = pick(fleet, session(), last, Load({"d0-r1": 20, "d1-r1": 1}))
    assert (spilled.decode.name, spilled.decode_reason) == ("d1-r1", "spill")
    assert spilled.holder is not None
    assert spilled.holder.name == "d0-r1"


@given(st.lists(st.integers(0, 50), min_size=1, max_size=6), st.integers(0, 99), st.booleans())
def test_some_engine_is_always_taken_and_a_new_turn_never_the_fullest_of_uneven_ones(
    loads: list[int], n: int, known: bool
) -> None:
    fleet = pool(1, len(loads))
    load = Load({f"d{i}-r1": count for i, count in enumerate(loads)})
    choice = pick(fleet, session(n), Placement("r1", "d0-r1", None) if known else None, load)
    taken = load.inflight[choice.decode.name]
    if not known and taken == max(loads):
        mean = sum(loads) / len(loads)
        assert taken <= 1.25 * mean + 2.5


def test_prefill_comes_from_decodes_zone_if_it_has_one() -> None:
    fleet = [engine("prefill", n, zone="ab"[n % 2]) for n in range(4)] + [engine("decode", 0, zone="b")]
    for n in range(10):
        choice = pick(fleet, session(n))
        assert choice.prefill is not None
        assert choice.prefill.zone == "b"
    assert pick([*fleet[:1], fleet[-1]]).prefill is fleet[0]


def test_revisions_are_never_mixed() -> None:
    fleet = pool(2, 2, "r1") + pool(2, 2, "r2")
    for n in range(50):
        choice = pick(fleet, session(n))
        assert choice.prefill is not None
        assert choice.prefill.revision == choice.decode.revision


def test_a_revision_with_one_role_ready_gets_no_new_conversation() -> None:
    fleet = pool(1, 1, "r1") + pool(0, 5, "r2")
    assert {pick(fleet, session(n)).decode.revision for n in range(50)} == {"r1"}


def test_new_conversations_are_shared_by_the_size_of_the_revisions() -> None:
    fleet = pool(1, 3, "r1") + pool(1, 1, "r2")
    share = Counter(pick(fleet, session(n)).decode.revision for n in range(1000))
    assert 150 < share["r2"] < 350


def test_a_conversation_keeps_its_revision_while_that_can_decode() -> None:
    last = Placement("r1", "d0-r1", "p0-r1")
    lost_pod = [b for b in pool(1, 2, "r1") if b.name != "d0-r1"] + pool(3, 3, "r2")
    assert pick(lost_pod, session(), last).decode.name == "d1-r1"
    lost_prefill = pool(0, 1, "r1") + pool(3, 3, "r2")
    choice = pick(lost_prefill, session(), last)
    assert (choice.decode.name, choice.prefill, choice.prefill_reason) == ("d0-r1", None, "none")
    lost_revision = pick(pool(1, 1, "r2"), session(), last)
    assert lost_revision.decode.revision == "r2"


def test_kv_of_another_revision_is_not_asked_for() -> None:
    fleet = [replace(b, ready=False) for b in pool(1, 1, "r1")] + pool(1, 1, "r2")
    assert pick(fleet, session(), Placement("r1", "d0-r1", "p0-r1")).holder is None


def test_without_any_prefill_decode_is_still_chosen() -> None:
    choice = pick(pool(0, 2))
    assert (choice.prefill, choice.prefill_reason) == (None, "none")


def test_suspects_are_avoided_while_there_are_others() -> None:
    fleet = pool(2, 2)
    home = pick(fleet)
    assert home.prefill is not None
    load = Load({}, {home.decode.name, home.prefill.name})
    other = pick(fleet, load=load)
    assert other.decode is not home.decode
    assert other.prefill is not home.prefill
    everyone = pick(fleet, load=Load({}, {b.name for b in fleet}))
    assert everyone.decode is home.decode
    assert everyone.prefill is None


@pytest.mark.parametrize("known", [True, False])
def test_pods_that_failed_this_turn_are_not_taken_again(known: bool) -> None:
    fleet = pool(1, 2)
    last = Placement("r1", "d0-r1", "p0-r1") if known else None
    assert pick(fleet, session(), last, avoid={"d0-r1"}).decode.name == "d1-r1"
    assert choose(fleet, session(), last, IDLE, {"d0-r1", "d1-r1"}) is None


# -- engines that are leaving --------------------------------------------------------------------------------


def going(backends: list[Backend], *names: str) -> list[Backend]:
    return [replace(b, leaving=b.name in names) for b in backends]


POLICY_NAMES: list[Policy] = ["SessionAffinity", "LeastLoaded", "RoundRobin"]


@pytest.mark.parametrize("policy", POLICY_NAMES)
@pytest.mark.parametrize("earlier", [False, True])
@pytest.mark.parametrize("last", [None, Placement("r1", "d2-r1", "p2-r1")])
def test_an_engine_that_is_leaving_gets_no_turn(
    policy: Policy, earlier: bool, last: Placement | None
) -> None:
    fleet = going(pool(3, 3), "d2-r1", "p2-r1")
    busy = Load({"d0-r1": 60, "d1-r1": 70, "p0-r1": 60, "p1-r1": 70})
    for n in range(30):
        for load in (IDLE, busy):
            choice = pick(fleet, session(n, earlier), last, load, policy=policy, number=n)
            assert choice.prefill is not None
            assert not choice.decode.leaving
            assert not choice.prefill.leaving


def test_a_conversation_moves_off_a_leaving_engine_and_stays_on_the_other() -> None:
    last = Placement("r1", "d1-r1", "p1-r1")
    of_decode = pick(going(pool(2, 2), "d1-r1"), ONE, last)
    assert of_decode.prefill is not None
    assert (of_decode.decode.name, of_decode.decode_reason) == ("d0-r1", "moved")
    assert (of_decode.prefill.name, of_decode.prefill_reason) == ("p1-r1", "session")
    of_prefill = pick(going(pool(2, 2), "p1-r1"), ONE, last)
    assert of_prefill.prefill is not None
    assert (of_prefill.decode.name, of_prefill.decode_reason) == ("d1-r1", "session")
    assert (of_prefill.prefill.name, of_prefill.prefill_reason) == ("p0-r1", "moved")


def test_a_leaving_engine_is_asked_for_its_kv() -> None:
    choice = pick(going(pool(1, 3), "d1-r1"), ONE, Placement("r1", "d1-r1", "p0-r1"))
    assert choice.holder is not None
    assert choice.holder.name == "d1-r1"


def test_an_unremembered_conversation_asks_where_it_would_have_been_and_goes_where_it_will_be() -> None:
    before, after = pool(2, 3), [b for b in pool(2, 3) if b.name != "d2-r1"]
    moved = 0
    for n in range(60):
        home = pick(before, session(n)).decode
        choice = pick(going(before, "d2-r1"), session(n, earlier=True))
        assert choice.holder is not None
        assert choice.holder.name == home.name
        assert choice.decode.name == pick(after, session(n)).decode.name
        assert choice.decode_reason == "home"
        moved += home.name == "d2-r1"
        assert pick(going(before, "d2-r1"), session(n)).holder is None, "a first turn has no KV anywhere"
    assert moved


def test_who_stays_takes_over_only_what_was_of_the_leaving() -> None:
    for n in range(100):
        home = pick(pool(1, 4), session(n)).decode.name
        if home != "d3-r1":
            assert pick(going(pool(1, 4), "d3-r1"), session(n)).decode.name == home


# The fleet, who leaves, who is a suspect, what has failed in this turn; then decode and prefill of a new conversation.
NOBODY_ELSE: list[tuple[list[Backend], set[str], set[str], set[str], tuple[str, str]]] = [
    (pool(1, 1), {"d0-r1"}, set(), set(), ("d0-r1", "p0-r1")),
    (pool(1, 1), {"p0-r1"}, set(), set(), ("d0-r1", "p0-r1")),
    (pool(1, 1), {"d0-r1", "p0-r1"}, set(), set(), ("d0-r1", "p0-r1")),
    (pool(2, 2), {"d1-r1", "p1-r1"}, {"d0-r1", "p0-r1"}, set(), ("d1-r1", "p1-r1")),
    (pool(1, 2), {"d1-r1"}, set(), {"d0-r1"}, ("d1-r1", "p0-r1")),
    ([replace(b, ready=b.name != "d0-r1") for b in pool(1, 2)], {"d1-r1"}, set(), set(), ("d1-r1", "p0-r1")),
    # A revision that stays comes before one whose engines of a role leave.
    (pool(1, 1) + pool(1, 1, "r2"), {"d0-r1"}, set(), set(), ("d0-r2", "p0-r2")),
    (pool(1, 1) + pool(1, 1, "r2"), {"p0-r1"}, set(), set(), ("d0-r2", "p0-r2")),
]


@pytest.mark.parametrize(("fleet", "leaving", "suspects", "avoid", "where"), NOBODY_ELSE)
def test_leaving_engines_are_taken_where_there_is_no_other(
    fleet: list[Backend], leaving: set[str], suspects: set[str], avoid: set[str], where: tuple[str, str]
) -> None:
    for n in range(10):
        choice = pick(going(fleet, *leaving), session(n), load=Load({}, suspects), avoid=avoid)
        assert choice.prefill is not None
        assert (choice.decode.name, choice.prefill.name) == where


def test_a_conversation_stays_where_all_engines_leave() -> None:
    fleet = going(pool(2, 2), "d0-r1", "d1-r1", "p0-r1", "p1-r1")
    choice = pick(fleet, ONE, Placement("r1", "d1-r1", "p1-r1"))
    assert choice.prefill is not None
    assert (choice.decode.name, choice.prefill.name) == ("d1-r1", "p1-r1")
    assert (choice.decode_reason, choice.prefill_reason) == ("session", "session")


@pytest.mark.parametrize(
    ("leaving", "revision"),
    [
        (["d0-r1"], "r1"),
        (["d0-r1", "d1-r1"], "r2"),
        (["d0-r1", "d1-r1", "d0-r2"], "r1"),
        (["p0-r1"], "r1"),
    ],
)
def test_a_conversation_keeps_its_revision_while_decode_stays_there(
    leaving: list[str], revision: str
) -> None:
    fleet = going(pool(1, 2) + pool(1, 1, "r2"), *leaving)
    assert pick(fleet, ONE, Placement("r1", "d0-r1", "p0-r1")).decode.revision == revision


def test_what_any_engine_can_answer_goes_to_one_that_stays() -> None:
    fleet = going(pool(1, 2), "d0-r1", "p0-r1")

    def asked(load: Load, avoid: Collection[str] = ()) -> str | None:
        taken = any_engine(fleet, load, avoid)
        return taken.name if taken else None

    assert asked(Load({"d1-r1": 9})) == "d1-r1"
    assert asked(Load({}, {"d1-r1"})) == "d0-r1"
    assert asked(Load({"d0-r1": 1}), {"d1-r1"}) == "p0-r1"
