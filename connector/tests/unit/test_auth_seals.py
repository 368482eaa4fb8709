"""Who is believed on the control channel."""

from __future__ import annotations

import hashlib
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg_connector import auth
from disagg_connector.auth import (
    SEAL_BYTES,
    WINDOW,
    Key,
    KeyRing,
    ReplayGuard,
    SealError,
    SealingCodec,
)
from disagg_connector.protocol import Accepted, Cancel, ProtocolError, Refused, encode

CANCEL = Cancel("engine", "xid", "request")


def secret(number: int) -> bytes:
    """The secret that is current after so many rotations."""
    return hashlib.sha256(number.to_bytes(4)).digest()


def ring(rotations: int) -> KeyRing:
    return KeyRing(secret(rotations), secret(rotations - 1) if rotations else None, secret(rotations + 1))


def end(rotations: int = 0, nonce: int = 1) -> SealingCodec:
    view = ring(rotations)
    return SealingCodec(lambda: view, nonce.to_bytes(16))


def reason(codec: SealingCodec, data: bytes) -> str:
    """Why a request is not believed."""
    with pytest.raises(ProtocolError) as caught:
        codec.read_request(data)
    return caught.value.reason


def test_a_request_and_its_reply_arrive() -> None:
    client, server = end(nonce=1), end(nonce=2)
    number, message, seal = server.read_request(client.write_request(7, CANCEL))
    assert (number, message) == (7, CANCEL)
    assert client.read_reply(server.write_reply(seal, number, Accepted())) == (7, Accepted())


def test_no_byte_can_be_changed() -> None:
    data = end().write_request(1, CANCEL)
    for position, bit in itertools.product(range(len(data)), range(8)):
        changed = bytearray(data)
        changed[position] ^= 1 << bit
        assert reason(end(), bytes(changed)), f"byte {position}, bit {bit}"


def test_no_byte_of_a_reply_can_be_changed() -> None:
    client, server = end(nonce=1), end(nonce=2)
    number, _, seal = server.read_request(client.write_request(1, CANCEL))
    data = server.write_reply(seal, number, Refused("no", "engine"))
    for position, bit in itertools.product(range(len(data)), range(8)):
        changed = bytearray(data)
        changed[position] ^= 1 << bit
        with pytest.raises(ProtocolError):
            client.read_reply(bytes(changed))


@given(st.data())
def test_no_part_can_be_cut_out_or_put_in(data: st.DataObject) -> None:
    sealed = end().write_request(1, CANCEL)
    start = data.draw(st.integers(0, len(sealed)))
    stop = data.draw(st.integers(start, len(sealed)))
    instead = data.draw(st.binary(max_size=64).filter(lambda b: b != sealed[start:stop]))
    with pytest.raises(ProtocolError):
        end().read_request(sealed[:start] + instead + sealed[stop:])


@given(st.binary(max_size=200))
def test_noise_is_not_believed(noise: bytes) -> None:
    for data in (noise, end().write_request(1, CANCEL)[: SEAL_BYTES // 2] + noise):
        with pytest.raises(ProtocolError):
            end().read_request(data)
        with pytest.raises(ProtocolError):
            end().read_reply(data)


def test_reasons_tell_what_to_look_for() -> None:
    data = end().write_request(1, CANCEL)
    assert reason(end(), encode(1, CANCEL)) == "unauthenticated"
    assert reason(end(rotations=5), data) == "unknown_key"
    assert reason(end(), data[:-1] + b"\x00\x00") == "forged"
    assert reason(end(), data[: SEAL_BYTES - 1]) == "malformed"


def test_nothing_is_decoded_before_its_seal_is_checked() -> None:
    """The payload is no msgpack at all, and yet what is complained of is the seal."""
    data = end().write_request(1, CANCEL)
    payload = b"\xc1" * (len(data) - SEAL_BYTES)
    assert reason(end(), data[:37] + payload + data[-32:]) == "forged"


def test_a_request_is_believed_once() -> None:
    client, server = end(nonce=1), end(nonce=2)
    data = client.write_request(1, CANCEL)
    server.read_request(data)
    assert reason(server, data) == "replayed"
    server.read_request(client.write_request(2, CANCEL))
    assert reason(server, data) == "replayed"


def test_a_forged_message_does_not_use_up_a_number() -> None:
    client, server = end(nonce=1), end(nonce=2)
    data = client.write_request(1, CANCEL)
    assert reason(server, data[:-1] + bytes([data[-1] ^ 1])) == "forged"
    server.read_request(data)


def test_a_message_does_not_come_back_in_the_other_direction() -> None:
    client, server = end(nonce=1), end(nonce=2)
    request = client.write_request(1, CANCEL)
    with pytest.raises(SealError):
        client.read_reply(request)
    _, _, seal = server.read_request(request)
    assert reason(server, server.write_reply(seal, 1, Accepted())) == "forged"


def test_a_reply_fits_one_request_of_one_channel() -> None:
    client, other, server = end(nonce=1), end(nonce=3), end(nonce=2)
    _, _, seal = server.read_request(client.write_request(1, CANCEL))
    reply = server.write_reply(seal, 1, Accepted())
    with pytest.raises(SealError) as caught:
        other.read_reply(reply)
    assert caught.value.reason == "replayed"
    assert client.read_reply(reply)[0] == 1, "the channel matches the number with what it has asked"


def test_the_number_inside_must_be_the_seals() -> None:
    key = ring(0).current
    data = auth._seal(key.id, key.request, b"n" * 16, 1, encode(2, CANCEL))
    assert reason(end(), data) == "malformed"


# --- Replay guard --------------------------------------------------------------------------------

RING = ring(0)


def accepts(guard: ReplayGuard, nonce: bytes, number: int) -> bool:
    return guard.refusal(RING, RING.current.id, nonce, number) is None


@given(st.lists(st.tuples(st.sampled_from([b"a", b"b"]), st.integers(0, 40)), max_size=80))
def test_every_number_is_accepted_once_if_it_is_not_too_late(numbers: list[tuple[bytes, int]]) -> None:
    guard = ReplayGuard(window=16)
    seen: dict[bytes, set[int]] = {b"a": set(), b"b": set()}
    for nonce, number in numbers:
        before = seen[nonce]
        expected = number not in before and (not before or number > max(before) - 16)
        assert accepts(guard, nonce, number) == expected
        if expected:
            before.add(number)


@given(st.permutations(range(WINDOW // 32)))
def test_messages_may_overtake_each_other(order: list[int]) -> None:
    guard = ReplayGuard(window=WINDOW // 32)
    assert all(accepts(guard, b"a", number) for number in order)
    assert not any(accepts(guard, b"a", number) for number in order)


def test_any_number_is_cheap() -> None:
    guard = ReplayGuard()
    for number in (1, 2**63, 2**64 - 1):
        assert accepts(guard, b"a", number)
        assert not accepts(guard, b"a", number)
    assert not accepts(guard, b"a", 2)


def test_the_table_of_senders_is_bounded_and_forgets_nobody_whose_key_is_accepted() -> None:
    guard = ReplayGuard(senders=3)
    early, late = ring(0), ring(2)
    old, new = early.current.id, late.current.id
    for nonce in (b"a", b"b", b"c"):
        assert guard.refusal(early, old, nonce, 1) is None
    assert guard.refusal(early, old, b"d", 1) == "overload"
    assert guard.refusal(early, old, b"a", 1) == "replayed"
    # a goes on with a new key; b and c fall silent, and what they sent is refused for its key.
    assert guard.refusal(late, new, b"a", 2) is None
    assert guard.refusal(late, new, b"d", 1) is None
    assert guard.refusal(late, new, b"e", 1) is None
    assert guard.refusal(late, new, b"f", 1) == "overload"
    assert guard.refusal(late, new, b"a", 2) == "replayed"


# --- Rotation ------------------------------------------------------------------------------------


@given(st.lists(st.sampled_from(["client", "server"]), max_size=12))
def test_ends_that_are_one_rotation_apart_understand_each_other(steps: list[str]) -> None:
    """Secrets reach the ends in any order, but nobody is two rotations ahead."""
    at = {"client": 0, "server": 0}
    client = SealingCodec(lambda: ring(at["client"]))
    server = SealingCodec(lambda: ring(at["server"]))
    for number, who in enumerate(steps, start=1):
        other = at["server" if who == "client" else "client"]
        at[who] += at[who] <= other
        for one, another in ((client, server), (server, client)):
            _, _, seal = another.read_request(one.write_request(number, CANCEL))
            assert one.read_reply(another.write_reply(seal, number, Accepted())) == (number, Accepted())


@pytest.mark.parametrize(("client_at", "server_at"), [(0, 2), (2, 0)])
def test_ends_two_rotations_apart_do_not(client_at: int, server_at: int) -> None:
    assert reason(end(server_at), end(client_at).write_request(1, CANCEL)) == "unknown_key"


@pytest.mark.parametrize("who", ["client", "server"])
def test_a_rotation_between_request_and_reply(who: str) -> None:
    at = {"client": 3, "server": 3}
    client = SealingCodec(lambda: ring(at["client"]))
    server = SealingCodec(lambda: ring(at["server"]))
    _, _, seal = server.read_request(client.write_request(1, CANCEL))
    at[who] += 1
    assert client.read_reply(server.write_reply(seal, 1, Accepted())) == (1, Accepted())


def test_a_key_that_is_gone_signs_no_reply() -> None:
    at = [3]
    server = SealingCodec(lambda: ring(at[0]))
    _, _, seal = server.read_request(end(3).write_request(1, CANCEL))
    at[0] = 5
    with pytest.raises(SealError):
        server.write_reply(seal, 1, Accepted())


def test_secrets_do_not_show() -> None:
    key = secret(0)
    for shown in (
        repr(Key(key)),
        repr(KeyRing(key)),
        str(end()),
        repr(end().read_request(end().write_request(1, CANCEL))),
    ):
        assert key.hex() not in shown
        assert repr(key)[2:-1] not in shown


@pytest.mark.parametrize("size", [0, 31, 33])
def test_a_secret_has_32_bytes(size: int) -> None:
    with pytest.raises(ValueError, match="32"):
        KeyRing(b"x" * size)
