from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg_connector import protocol
from disagg_connector.protocol import Address, Hello, Offer, Peer, ProtocolError, decode, encode

PEER = Peer("engine", Address("10.0.0.1", 5700), "10.0.0.1", 5600, 8, "fingerprint")


@given(st.binary(max_size=300))
def test_any_bytes_are_a_message_or_a_protocol_error(payload: bytes) -> None:
    try:
        decode(payload)
    except ProtocolError:
        pass


@given(st.integers(0, 400), st.integers(0, 255))
def test_a_damaged_message_is_a_message_or_a_protocol_error(position: int, value: int) -> None:
    payload = bytearray(encode(1, Offer("to", 0, "xid", PEER, [b"h" * 32] * 3, 0, "")))
    payload[position % len(payload)] = value
    try:
        decode(bytes(payload))
    except ProtocolError:
        pass


@given(st.integers(0, 2**40), st.lists(st.binary(min_size=32, max_size=32), max_size=20))
def test_what_is_encoded_is_decoded(seq: int, hashes: list[bytes]) -> None:
    offer = Offer("to", 0, "xid", PEER, hashes, 2, "want")
    frame = decode(encode(seq, offer))
    assert (frame.seq, frame.body) == (seq, offer)


def test_hashes_of_another_length_are_refused() -> None:
    with pytest.raises(ProtocolError, match="length"):
        decode(encode(1, Offer("to", 0, "xid", PEER, [b"short"], 0, "")))


def test_messages_beyond_the_bound_are_refused_unread() -> None:
    with pytest.raises(ProtocolError, match="at most"):
        decode(b"\x00" * (protocol.MAX_MESSAGE_BYTES + 1))


def test_the_longest_chain_fits_into_a_message() -> None:
    # A million tokens in blocks of 16.
    offer = Offer("to", 0, "xid", PEER, [b"h" * 32] * (1_000_000 // 16), 0, "")
    assert len(encode(1, offer)) < protocol.MAX_MESSAGE_BYTES


def test_a_greeting_of_a_later_version_is_still_understood() -> None:
    later = msgspec.msgpack.encode([1, {"type": "hello", "wire": 9, "new": "field"}])
    assert decode(later).body == Hello(9)


@pytest.mark.parametrize(
    ("prefill", "decode_id"),
    [
        ("cmpl-00ff-0-1234abcd", "cmpl-00ff-0-ABCD1234"),
        ("chatcmpl-00ff-1234abcd", "chatcmpl-00ff-99999999"),
        ("cmpl-00ff-0-1234abcd", "1_cmpl-00ff-0-99999999"),
    ],
)
def test_both_legs_of_a_turn_have_one_key(prefill: str, decode_id: str) -> None:
    assert protocol.leg_key(prefill) == protocol.leg_key(decode_id)


def test_prompts_of_one_request_have_keys_of_their_own() -> None:
    assert protocol.leg_key("cmpl-00ff-0-1234abcd") != protocol.leg_key("cmpl-00ff-1-1234abcd")
