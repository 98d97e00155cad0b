"""Whatever the bytes are that someone with the right keys sends, there is a message or one error that says what is wrong."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from msgspec import structs

from strata_planner.contract import control, frames
from strata_planner.contract.decoding import decode_frame, decode_message
from strata_planner.contract.values import ContractError
from tests.laws import share

MOST = 10_000
KINDS: dict[str, tuple[Any, Any, Any]] = {
    "between stages": (frames.DataMessage, frames.data_decoder, frames.encode),
    "from a gateway": (frames.GatewayMessage, frames.gateway_message_decoder, frames.encode),
    "from a leader": (frames.LeaderMessage, frames.leader_message_decoder, frames.encode),
    "to a slot": (control.SlotRequest, control.slot_request_decoder, control.encode),
    "to a gateway": (control.GatewayRequest, control.gateway_request_decoder, control.encode),
    "to the controller": (control.Status, control.status_decoder, control.encode),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def drawn_in_full(message: type[msgspec.Struct]) -> None:
    """Left to itself hypothesis takes for a list's default what makes it."""
    made = [each.name for each in structs.fields(message) if each.default_factory is not msgspec.NODEFAULT]
    if made:
        st.register_type_strategy(message, st.builds(message, **dict.fromkeys(made, ...)))


for each in vars(frames).values():
    if isinstance(each, type) and issubclass(each, msgspec.Struct):
        drawn_in_full(each)
CHANGES = st.lists(st.tuples(st.integers(0, MOST), st.binary(max_size=4)), max_size=3)


def encoded(data: st.DataObject, kind: str) -> bytes:
    """Any message of this kind."""
    message, _, encode = KINDS[kind]
    try:
        return bytes(encode(data.draw(st.from_type(message))))
    except OverflowError:  # msgpack has 64 bits
        assume(condition=False)
        raise


def damaged(whole: bytes, changes: Sequence[tuple[int, bytes]]) -> bytes:
    for place, piece in changes:
        cut = place % (len(whole) + 1)
        whole = whole[:cut] + piece + whole[cut + 1 :]
    return whole


@pytest.mark.parametrize("kind", list(KINDS)[:3])  # JSON has no infinite numbers, which these have
@given(data=st.data())
@settings(max_examples=10, deadline=None)
def test_what_is_encoded_is_decoded(kind: str, data: st.DataObject) -> None:
    whole = encoded(data, kind)
    _, decoder, encode = KINDS[kind]
    assert encode(decode_message(decoder, [whole], len(whole))) == whole
    with pytest.raises(ContractError, match=f"{len(whole)} bytes came; at most {len(whole) - 1}"):
        decode_frame(decoder, whole, len(whole) - 1)


@every_kind
@given(data=st.data(), changes=CHANGES)
@settings(max_examples=share(30), deadline=None)
def test_damaged_messages_decode_or_are_refused(
    kind: str, data: st.DataObject, changes: list[tuple[int, bytes]]
) -> None:
    refused_or_decoded(kind, [damaged(encoded(data, kind), changes)])


@every_kind
@given(received=st.lists(st.binary(), max_size=3))
@settings(max_examples=share(30), deadline=None)
def test_any_frames_decode_or_are_refused(kind: str, received: list[bytes]) -> None:
    refused_or_decoded(kind, received)


CASES = {
    "no text": b"\x92\xa5abort\xa2\xff\xfe",
    "text that is cut": b"\x92\xa5abort\xdb\xff\xff\xff\xff",
    "a list of four billion": b"\x97\xa6submit\xa1a\xdd\xff\xff\xff\xff",
    "too deep": b"\x9a\xa5frame\x00\x01\x00\xa0\x90\x90\xa7float32\x00" + b"\x91" * 9000,
    "too deep for JSON": b'{"type":"setRoute","leaders":' + b"[" * 9000,
    "no text in JSON": b'{"type":"commit\xff","epoch":1}',
    "half a surrogate": b'{"type":"prepare","key":"\\ud800',
}


@pytest.mark.parametrize("case", CASES)
@every_kind
def test_frames_that_once_ended_their_reader(kind: str, case: str) -> None:
    with pytest.raises(ContractError, match="does not decode"):
        decode_message(KINDS[kind][1], [CASES[case]], MOST)


def refused_or_decoded(kind: str, received: list[bytes]) -> None:
    message, decoder, _ = KINDS[kind]
    try:
        decoded = decode_message(decoder, received, MOST)
    except ContractError:
        return
    assert isinstance(decoded, message)
    assert isinstance(decoded, msgspec.Struct)
