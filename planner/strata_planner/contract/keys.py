"""Keys: which secret opens what, and from a secret the CURVE secret keys of both ends of a ZeroMQ connection.

Two roots, which only the controller holds: the deployment's control secret and an epoch's key. Each process gets what follows
from them for its own connections and can tell neither the root nor another's secret from it. So a slot cannot speak to another
slot as the controller does, nor a gateway as a slot; a zombie of an old epoch lacks the new one's secrets. Torch-free and ZeroMQ-free.

| secret          | opens                    | known beside the controller by                      |
|-----------------|--------------------------|-----------------------------------------------------|
| slot_secret     | a slot's control port    | that slot                                           |
| gateway_secret  | a gateway's control port | gateways                                            |
| journal_secret  | a gateway's journal port | gateways                                            |
| position_secret | (signs places in streams)| gateways                                            |
| request_secret  | leaders' request ports   | gateways and slots                                  |
| RoleKeys        | the data port of a role  | the role, the one before it and the one behind it   |
| pages_secret    | a slot's port for pages  | that slot and those that get pages of it            |
| order_secret    | a slot's control port,   | that slot, and gateways that have standing orders   |
|                 | for standing orders only |                                                     |
"""

import base64
import hashlib
import hmac
import secrets

from strata_planner.contract.roles import Role
from strata_planner.contract.values import Value

_Z85 = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"


class RoleKeys(Value, frozen=True):
    """Secrets of the data ports that a role listens at (`own`) and connects to."""

    own: str
    previous: str
    next: str


def new_secret() -> str:
    """A fresh secret for an epoch or for a deployment's control ports."""
    return secrets.token_urlsafe(32)


def slot_secret(control_secret: str, slot: str) -> str:
    return _derived(control_secret, f"control/slot/{slot}")


def gateway_secret(control_secret: str) -> str:
    return _derived(control_secret, "control/gateway")


def journal_secret(gateway_secret: str) -> str:
    return _derived(gateway_secret, "journal")


def position_secret(gateway_secret: str) -> str:
    return _derived(gateway_secret, "positions")


def request_secret(epoch_key: str) -> str:
    return _derived(epoch_key, "requests")


def order_secret(slot_secret: str) -> str:
    return _derived(slot_secret, "orders")


def order_key(epoch_key: str, number: int) -> str:
    """The key of the epoch that a standing order of this one makes."""
    return _derived(epoch_key, f"order/{number}")


def seal_of(slot_secret: str, text: str) -> str:
    """That the controller has written this for the slot: gateways hand it on and cannot make one."""
    return _derived(slot_secret, f"seal/{text}")


def pages_secret(epoch_key: str, slot: str) -> str:
    return _derived(epoch_key, f"pages/{slot}")


def role_keys(epoch_key: str, role: Role) -> RoleKeys:
    def port_of(stage: int) -> str:
        return _derived(epoch_key, f"data/{role.replica}/{stage % role.stages}")

    return RoleKeys(own=port_of(role.stage), previous=port_of(role.stage - 1), next=port_of(role.stage + 1))


def curve_secret_key(secret: str, purpose: str) -> bytes:
    """The 40 characters (Z85) of a CURVE secret key for `purpose`, for instance "server" or "client"."""
    digest = hashlib.sha256(f"strata/{purpose}/{secret}".encode()).digest()
    return _z85(digest)


def _derived(root: str, purpose: str) -> str:
    digest = hmac.digest(root.encode(), f"strata/{purpose}".encode(), "sha256")
    return base64.urlsafe_b64encode(digest).decode().rstrip("=")


def _z85(data: bytes) -> bytes:
    """ZeroMQ RFC 32: four bytes become five characters."""
    out = []
    for start in range(0, len(data), 4):
        number = int.from_bytes(data[start : start + 4], "big")
        out.append("".join(_Z85[number // 85**power % 85] for power in (4, 3, 2, 1, 0)))
    return "".join(out).encode()
