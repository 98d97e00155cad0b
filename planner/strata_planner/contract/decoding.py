"""From what a socket received to a message of the contract, or one error that says what is wrong with it.

Called by whoever reads a socket, with the frames of one delivery. Whoever holds the right keys may still send anything: no
bytes may end the reader, or make it allocate more than a small multiple of what arrived.
"""

from collections.abc import Sequence
from typing import Protocol, TypeVar

import msgspec

from strata_planner.contract.values import ContractError

T_co = TypeVar("T_co", covariant=True)
Bytes = bytes | memoryview


class Decoder(Protocol[T_co]):
    """Of JSON or msgpack, for one kind of message."""

    def decode(self, data: Bytes, /) -> T_co: ...


def decode_message(decoder: Decoder[T_co], frames: Sequence[Bytes], largest_bytes: int) -> T_co:
    """The message that is one frame of at most so many bytes. Raises ContractError."""
    if len(frames) != 1:
        raise ContractError(f"a message of {len(frames)} frames came; it is one frame: send it as one")
    return decode_frame(decoder, frames[0], largest_bytes)


def decode_frame(decoder: Decoder[T_co], frame: Bytes, largest_bytes: int) -> T_co:
    """The message in a frame that others may follow. Raises ContractError."""
    if len(frame) > largest_bytes:
        raise ContractError(f"a message of {len(frame)} bytes came; at most {largest_bytes} are taken here")
    try:
        return decoder.decode(frame)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:  # the latter two are none of msgspec's
        raise ContractError(f"a message does not decode: {error}") from error
