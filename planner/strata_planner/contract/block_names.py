"""What a block of keys and values is called: by its tokens and all before them. Leaders share blocks by these names, and stages keep what theirs hold.

A name is a digest of BLAKE2b, so that no client can make two prompts that are taken for each other.
"""

import struct
from collections.abc import Sequence
from hashlib import blake2b

NAME_BYTES = 16
TOKEN_BYTES = 8


def root_of(salt: str) -> bytes:
    """What stands before the first block of a sequence; never the name of a block, whatever the salt is."""
    return blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=NAME_BYTES, person=b"salt").digest()


NO_SALT = root_of("")


def packed(tokens: Sequence[int]) -> bytes:
    """As names are made of them: `TOKEN_BYTES` each."""
    return struct.pack(f"<{len(tokens)}q", *tokens)


def name_of(parent: bytes, tokens: bytes) -> bytes:
    """The name of the block with these packed tokens behind the block `parent`, or behind a root."""
    return blake2b(parent + tokens, digest_size=NAME_BYTES).digest()


def alike(one: bytes, other: bytes) -> int:
    """How many tokens two packed texts have in common, from the first on."""
    most = min(len(one), len(other))
    if one[:most] == other[:most]:
        return most // TOKEN_BYTES
    return next(place for place in range(most) if one[place] != other[place]) // TOKEN_BYTES
