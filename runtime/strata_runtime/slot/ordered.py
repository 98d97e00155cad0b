"""Standing orders as a slot takes them: written and sealed by the controller that made the epoch in force, handed on by gateways while nobody controls.

Used by `slot`. Who hands an order on can neither change it nor make one, and with its key can ask for nothing else.
"""

import hmac
import logging
import math
import time
from dataclasses import dataclass
from typing import Any

import zmq

from strata_planner.contract.control import (
    LARGEST_CONTROL_BYTES,
    CarryOut,
    OrderRequest,
    Prepare,
    SlotRequest,
    prepare_decoder,
)
from strata_planner.contract.decoding import decode_message
from strata_planner.contract.keys import order_secret, seal_of
from strata_planner.contract.values import ContractError
from strata_runtime.wire.transport import Keys

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Standing:
    """What a slot is at. `committed`: the epoch that it serves, 0: none; `silence`: seconds since a controller last spoke with it; without end for
    one that was started anew and has heard none: the others know.
    """

    secret: str
    committed: int
    silence: float


def why_not(order: CarryOut, at: Standing) -> str:
    """Why the order is not taken; empty: it is."""
    if not hmac.compare_digest(order.seal.encode(), seal_of(at.secret, order.sealed).encode()):
        return "its seal is not that of this slot's controller"
    if at.committed not in (0, order.after):
        return f"it is for whom serves epoch {order.after}; here epoch {at.committed} is in force"
    if at.silence < order.silence_seconds:
        return f"a controller was heard {at.silence:.1f} s ago; it waits for {order.silence_seconds:g} s of silence"
    return ""


def received(control: "zmq.Socket[Any]") -> list[zmq.Frame]:
    """A message at the control port; empty where there is none. It is readable as soon as somebody has connected, who may say nothing."""
    try:
        frames: Any = control.recv_multipart(zmq.NOBLOCK, copy=False)
    except zmq.Again:
        return []
    return list(frames)


class Ordering:
    """Who speaks at the control port, when a controller last did, and which order was taken. `keys`: of those who hand orders on."""

    def __init__(self, slot: str, secret: str) -> None:
        self.keys = Keys.of(order_secret(secret))
        self.number = 0  # of the epoch that the order makes, which who handed it on may commit
        self._slot, self._secret, self._user = slot, secret, self.keys.client_public.decode()
        self._heard = -math.inf

    def lets(self, user: str, request: SlotRequest) -> bool:
        """Whether whoever's key this is may ask for that. A controller is heard."""
        if user != self._user:
            self.hear()
            return True
        if not isinstance(request, OrderRequest):
            log.warning("%s: %s came with a key for standing orders alone", self._slot, type(request).__name__)
            return False
        return True

    def hear(self) -> None:
        """A controller spoke."""
        self._heard = time.monotonic()

    def prepare_of(self, order: CarryOut, committed: int) -> Prepare | None:
        """What it says, to be done like a controller's prepare; None where it is not taken, as the log says."""
        reason = why_not(order, Standing(self._secret, committed, time.monotonic() - self._heard))
        try:
            prepare = (
                None if reason else decode_message(prepare_decoder, [order.prepare.encode()], LARGEST_CONTROL_BYTES)
            )
        except ContractError as error:
            prepare, reason = None, str(error)
        if prepare is None:
            log.info("%s: a standing order is not taken: %s", self._slot, reason)
            return None
        if prepare.epoch != self.number:
            log.warning(
                "%s: nobody controls for %g s: a standing order makes epoch %d",
                self._slot,
                order.silence_seconds,
                prepare.epoch,
            )
        self.number = prepare.epoch
        return prepare
