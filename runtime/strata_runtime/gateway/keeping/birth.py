"""Birth: what of an answer is chance. With the same one, the same body comes to the same request, at this gateway and at any other. Pure."""

import secrets
import time

import msgspec

SEED_BITS = 63


class Birth(msgspec.Struct, frozen=True, array_like=True):
    """`seed`: of a request that names none. `epoch`: in force when it came, as its answer tells it."""

    name: str
    seed: int
    at: float  # seconds since 1970
    epoch: int = 0

    @classmethod
    def new(cls, epoch: int = 0) -> "Birth":
        return cls(secrets.token_hex(12), secrets.randbits(SEED_BITS), time.time(), epoch)
