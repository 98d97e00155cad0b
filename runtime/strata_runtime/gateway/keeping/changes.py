"""What gateways tell each other of the answers that they keep. Pure; encoded as arrays, of one release."""

import msgspec

from strata_runtime.gateway.keeping.birth import Birth

LARGEST_BATCH_BYTES = 32 << 20  # the first token of an answer may bring 16 MiB with it


class _Array(msgspec.Struct, frozen=True, array_like=True):
    """Positional on the wire."""


class Begun(_Array, frozen=True, tag="begun"):
    """This gateway makes an answer, from no token on: those that it has follow."""

    key: bytes
    body: bytes
    birth: Birth
    choices: int
    term: int


class Grown(_Array, frozen=True, tag="grown"):
    """Its tokens from number `first` on."""

    key: bytes
    first: int
    entries: list[bytes]


class Ended(_Array, frozen=True, tag="ended"):
    """A choice has ended by its text: no token says so."""

    key: bytes
    choice: int


class Dropped(_Array, frozen=True, tag="dropped"):
    """It failed, or nobody came back for it."""

    key: bytes


Change = Begun | Grown | Ended | Dropped


class Greeting(_Array, frozen=True, tag="greeting"):
    """Who speaks."""

    incarnation: str


class Batch(_Array, frozen=True, tag="batch"):
    """Changes in their order, to be confirmed."""

    incarnation: str
    number: int
    changes: list[Change]


class Confirmed(_Array, frozen=True, tag="confirmed"):
    """All changes up to this batch are kept."""

    number: int


class Wanted(_Array, frozen=True, tag="wanted"):
    """This gateway has just begun, and wants all that the other one keeps."""


class Told(_Array, frozen=True, tag="told"):
    """That was all."""


Message = Greeting | Batch | Confirmed | Wanted | Told

encode = msgspec.msgpack.encode
decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)
