"""Gives gateways the standing orders of the epoch in force, each gateway once.

Used by whoever makes epochs: `strata up` and the operator's hands. What is remembered only saves work: a gateway that is given the same orders again keeps them.
"""

import logging

import zmq

from strata_operator.act.control_client import Links
from strata_operator.decide.epochs import Observed
from strata_operator.decide.standing_orders import OrderTerms, set_orders, untold
from strata_operator.render.epoch import Epoch
from strata_planner.contract.control import SlotDoor
from strata_planner.contract.keys import curve_secret_key, order_secret

log = logging.getLogger(__name__)


class OrderGiving:
    """Of one deployment."""

    def __init__(self) -> None:
        self._given: dict[str, tuple[str, int, OrderTerms]] = {}  # gateway -> its life, epoch and terms

    async def give(self, links: Links, epoch: Epoch, seen: Observed, terms: OrderTerms) -> None:
        """To those that route to this epoch. Who does not answer is asked again at the next look."""
        self._given = {name: given for name, given in self._given.items() if name in seen.gateways}
        due = {
            name: given
            for name, status in sorted(seen.gateways.items())
            if status.epoch == epoch.number
            and self._given.get(name) != (given := (status.incarnation, epoch.number, terms))
        }
        if not due:
            return
        secrets = links.secrets()
        doors = {
            slot: door_of(address.host, address.control_port, secrets[slot])
            for slot, address in seen.addresses.items()
            if slot in secrets
        }
        message = set_orders(epoch, seen, secrets, doors, terms)
        for name, given in due.items() if message else ():
            assert message is not None
            if await links.send(name, message):
                self._given[name] = given
                log.info("%s has %d standing orders for epoch %d", name, len(message.orders), epoch.number)
                if left_out := untold(epoch, message):
                    log.warning(
                        "the loss of %s waits for a controller: more orders than one message holds", ", ".join(left_out)
                    )


def door_of(host: str, port: int, secret: str) -> SlotDoor:
    """Of a slot, by its control port's secret: with what a gateway opens it for standing orders alone."""
    public = zmq.curve_public(curve_secret_key(secret, "server")).decode()
    return SlotDoor(host=host, port=port, public_key=public, secret=order_secret(secret))
