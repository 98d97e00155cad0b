"""A gateway's way to the slots' control ports, for standing orders alone: one question at a time to each, opened only while no controller is heard.

Used by `carrying`; knows no orders.
"""

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

import zmq
import zmq.asyncio

from strata_planner.contract.control import (
    LARGEST_CONTROL_BYTES,
    OrderRequest,
    SlotDoor,
    SlotStatus,
    encode,
    status_decoder,
)
from strata_planner.contract.decoding import decode_message
from strata_planner.contract.values import ContractError
from strata_runtime.wire.transport import Keys, connect

log = logging.getLogger(__name__)

ANSWER_SECONDS = 1.0


class Doors:
    """Make it inside the event loop; `close` it there."""

    def __init__(self, doors: Mapping[str, SlotDoor]) -> None:
        self._doors = doors
        self._context = zmq.asyncio.Context()
        self._sockets: dict[str, Any] = {}

    async def ask(self, slot: str, message: OrderRequest) -> SlotStatus | None:
        """The whole status after it; None where nobody answers. Whoever did not answer in time is connected to anew: its answer may still come."""
        socket = self._sockets.get(slot) or self._opened(slot)
        if socket is None:
            return None
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                await socket.send(encode(message))
                status = decode_message(status_decoder, await socket.recv_multipart(), LARGEST_CONTROL_BYTES)
        except (TimeoutError, ContractError, zmq.ZMQError) as error:
            log.debug("%s: %s: %s", slot, type(error).__name__, error)
            self._shut(slot)
            return None
        return status if isinstance(status, SlotStatus) else None

    def close(self) -> None:
        for slot in list(self._sockets):
            self._shut(slot)
        self._context.term()

    def _opened(self, slot: str) -> Any:
        door, socket = self._doors[slot], self._context.socket(zmq.DEALER)
        try:
            keys = Keys.of(door.secret).of_server(door.public_key)
            self._sockets[slot] = connect(socket, f"tcp://{door.host}:{door.port}", keys, LARGEST_CONTROL_BYTES)
        except (ValueError, zmq.ZMQError) as error:
            socket.close(linger=0)
            log.warning("standing orders: no way to slot %s at %s:%d: %s", slot, door.host, door.port, error)
            return None
        return socket

    def _shut(self, slot: str) -> None:
        if socket := self._sockets.pop(slot, None):
            socket.close(linger=0)
