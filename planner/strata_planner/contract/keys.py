"""Keys: from one shared secret to the CURVE secret keys of both ends of a ZeroMQ connection.

A server's public key never travels in the clear, so only who holds the secret can derive it and speak to the server: a
zombie of an old epoch, which lacks the new secret, is refused at the handshake. Torch-free and ZeroMQ-free.
"""

import hashlib
import secrets

_Z85 = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"


def new_secret() -> str:
    """A fresh secret for an epoch or for a deployment's control ports."""
    return secrets.token_urlsafe(32)


def curve_secret_key(secret: str, purpose: str) -> bytes:
    """The 40 characters (Z85) of a CURVE secret key for `purpose`, for instance "server" or "client"."""
    digest = hashlib.sha256(f"strata/{purpose}/{secret}".encode()).digest()
    return _z85(digest)


def _z85(data: bytes) -> bytes:
    """ZeroMQ RFC 32: four bytes become five characters."""
    out = []
    for start in range(0, len(data), 4):
        number = int.from_bytes(data[start : start + 4], "big")
        out.append("".join(_Z85[number // 85**power % 85] for power in (4, 3, 2, 1, 0)))
    return "".join(out).encode()
