"""Who is believed of those who speak to a replica: holders of the secret, once, and nobody else."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg_router.config import ConfigError
from disagg_router.seal import SEAL_BYTES, Channel, ReplayGuard, SealError, Secrets
from disagg_router.secretdir import SecretDir

OLD, NOW, NEXT, LATER = (bytes([n]) * 32 for n in range(4))


def channel(*secrets: bytes, nonce: bytes = b"a" * 16) -> Channel:
    ring = Secrets(*(secrets or (NOW, OLD, NEXT)))
    return Channel(lambda: ring, nonce)


def refused(what: Channel, message: bytes) -> str:
    with pytest.raises(SealError) as caught:
        what.asked(message)
    return caught.value.reason


def test_a_question_and_its_answer_arrive() -> None:
    here, there = channel(), channel(nonce=b"b" * 16)
    number, message = here.ask(b"hello")
    question = there.asked(message)
    assert question.payload == b"hello"
    assert here.answered(number, there.answer(question, b"yes")) == b"yes"


@given(at=st.integers(0, SEAL_BYTES + 4), bit=st.integers(0, 7))
def test_a_message_with_any_bit_changed_is_refused(at: int, bit: int) -> None:
    there = channel(nonce=b"b" * 16)
    changed = bytearray(channel().ask(b"hello")[1])
    changed[at] ^= 1 << bit
    assert refused(there, bytes(changed)) in ("malformed", "unknown_key", "forged")


@given(st.binary(max_size=200))
def test_garbage_is_refused(message: bytes) -> None:
    assert refused(channel(), message) in ("malformed", "unknown_key", "forged")


def test_each_question_is_taken_once() -> None:
    here, there = channel(), channel(nonce=b"b" * 16)
    messages = [here.ask(b"%d" % n)[1] for n in range(3)]
    for message in (messages[1], messages[0], messages[2]):
        there.asked(message)
    assert [refused(there, message) for message in messages] == ["replayed"] * 3


@given(st.lists(st.integers(0, 40), max_size=80))
def test_the_guard_takes_no_number_twice_and_every_number_that_is_not_far_behind(numbers: list[int]) -> None:
    guard, taken = ReplayGuard(window=8), set()
    for number in numbers:
        refusal = guard.refusal(b"n", number)
        if refusal is None:
            assert number not in taken
            taken.add(number)
        else:
            assert number in taken or number <= max(taken) - 8


def test_the_guard_holds_more_senders_than_there_are_and_no_more() -> None:
    guard = ReplayGuard(senders=2)
    assert [guard.refusal(nonce, 1) for nonce in (b"a", b"b", b"c", b"a")] == [
        None,
        None,
        "overload",
        "replayed",
    ]


def test_a_number_far_ahead_takes_no_memory() -> None:
    guard = ReplayGuard()
    assert [guard.refusal(b"n", n) for n in (1, 2**64 - 1, 1)] == [None, None, "replayed"]


def test_an_answer_fits_its_question_only() -> None:
    here, there = channel(), channel(nonce=b"b" * 16)
    first, message = here.ask(b"1")
    answer = there.answer(there.asked(message), b"for 1")
    second, other = here.ask(b"2")
    for number, said in ((second, answer), (first, other), (first, message)):
        with pytest.raises(SealError):
            here.answered(number, said)
    assert refused(there, answer) == "forged", "an answer is no question"
    with pytest.raises(SealError):
        channel(nonce=b"c" * 16).answered(first, answer)


@pytest.mark.parametrize(
    ("theirs", "believed"),
    [((NOW, OLD, NEXT), True), ((NEXT, NOW, LATER), True), ((OLD, NOW), True), ((LATER, NEXT), False)],
)
def test_two_replicas_may_be_one_rotation_apart(theirs: tuple[bytes, ...], believed: bool) -> None:
    here, there = channel(*theirs), channel(nonce=b"b" * 16)
    number, message = here.ask(b"hello")
    if not believed:
        assert refused(there, message) == "unknown_key"
    else:
        assert here.answered(number, there.answer(there.asked(message), b"yes")) == b"yes"


def test_a_secret_says_nothing_of_itself_on_the_wire() -> None:
    message = channel().ask(b"hello")[1]
    assert NOW not in message
    assert b"hello" in message, "it is sealed, not hidden"


# -- the folder ----------------------------------------------------------------------------------------------


def write(folder: Path, **secrets: bytes) -> None:
    for name, secret in secrets.items():
        (folder / name).write_bytes(secret)


def test_the_folder_is_read_again_when_it_changes(tmp_path: Path) -> None:
    write(tmp_path, previous=OLD, current=NOW, next=NEXT)
    folder = SecretDir(tmp_path)
    assert folder.secrets == Secrets(NOW, OLD, NEXT)
    write(tmp_path, previous=NOW, current=NEXT, next=LATER)
    folder.look()
    assert folder.secrets == Secrets(NEXT, NOW, LATER)


@pytest.mark.parametrize(
    "damage", [b"", b"short", bytes(range(33)), None], ids=["empty", "short", "long", "gone"]
)
def test_what_cannot_be_used_changes_nothing(tmp_path: Path, damage: bytes | None) -> None:
    write(tmp_path, previous=OLD, current=NOW, next=NEXT)
    folder = SecretDir(tmp_path)
    if damage is None:
        (tmp_path / "current").unlink()
    else:
        write(tmp_path, current=damage)
    folder.look()
    assert folder.secrets == Secrets(NOW, OLD, NEXT)


@pytest.mark.parametrize("damage", [b"short", None])
def test_without_secrets_to_begin_with_it_says_where_and_why(tmp_path: Path, damage: bytes | None) -> None:
    write(tmp_path, previous=OLD, next=NEXT)
    if damage is not None:
        write(tmp_path, current=damage)
    why = "replicas' secrets cannot be read" if damage is None else "a secret has 5 bytes, 32 are needed"
    with pytest.raises(ConfigError, match=f"{tmp_path}/current.*{why}"):
        SecretDir(tmp_path)
