"""The inventories of all deployments, from one stock and one ledger of devices: what did not change is not worked out again.

A node offers the same to all deployments that place alike and have nothing of their own there: such deployments are one audience, and a
change of a node is looked at once for each of them. Only nodes where a deployment has pods or promises are worked out for it alone. The
law: the same as `take_inventory` makes of all nodes and pods. Called by the controller; pure but for what it keeps.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import NamedTuple

import msgspec

from strata_operator.api import LLMDeployment
from strata_operator.decide.ledger import DeviceLedger
from strata_operator.observe.inventory import NO_OFFER, Inventory, InventoryOptions, Offer, inventory_of, offer_of
from strata_operator.observe.stock import NOTHING, Key, Stock
from strata_operator.render.names import COMPONENT_LABEL, SLOT
from strata_operator.render.requests import Amounts, added, remaining
from strata_operator.render.slots import is_pod_of, pod_label


@dataclass(slots=True)
class _Audience:
    """`offers`: of the nodes that have devices, to a deployment with nothing of its own there. `seen`: the stock's and the promises' changes
    that they know. `version` rises when one of them becomes another.
    """

    offers: dict[str, Offer] = field(default_factory=dict)
    seen: tuple[int, int] = (-1, -1)
    version: int = 0


class _Basis(NamedTuple):
    """All that one deployment's inventory was made from."""

    audience: tuple[str, int]
    own: tuple[tuple[str, Offer], ...]


class Inventories:
    """Of one stock. `of` is asked with the ledger as it is at that moment."""

    def __init__(self, stock: Stock, options: InventoryOptions) -> None:
        self._stock, self._options = stock, options
        self._audiences: dict[str, _Audience] = {}
        self._made: dict[str, tuple[_Basis, Inventory]] = {}
        self._promises = _Promises(stock)

    def of(self, deployment: LLMDeployment, ledger: DeviceLedger) -> Inventory:
        """The same value as long as nothing of it changes."""
        self._promises.take_up(ledger)
        key = _audience_of(deployment)
        audience = self._audiences.setdefault(key, _Audience())
        self._catch_up(audience, deployment)
        own = self._own_offers(deployment)
        basis = _Basis((key, audience.version), tuple(own.items()))
        made = self._made.get(deployment.metadata.uid)
        if made is None or made[0] != basis:
            offers = audience.offers | own
            made = (basis, inventory_of((offers[name] for name in sorted(offers)), self._options))
            self._made[deployment.metadata.uid] = made
        return made[1]

    def drop(self, uid: str) -> None:
        """The deployment is gone; audiences that nobody belongs to go with it."""
        self._made.pop(uid, None)
        needed = {basis.audience[0] for basis, _ in self._made.values()}
        self._audiences = {key: each for key, each in self._audiences.items() if key in needed}

    def _catch_up(self, audience: _Audience, deployment: LLMDeployment) -> None:
        now = (self._stock.changes, self._promises.changes)
        if audience.seen == now:
            return
        names = {*self._stock.changed_nodes(audience.seen[0]), *self._promises.changed_nodes(audience.seen[1])}
        changed = False
        for name in names:
            node = self._stock.node(name)
            taken = added(self._stock.taken(name), self._promises.of(name))
            offer = offer_of(deployment, node, taken, (), self._options) if node else NO_OFFER
            if offer == audience.offers.get(name, NO_OFFER):
                continue
            changed = True
            if offer == NO_OFFER:
                del audience.offers[name]
            else:
                audience.offers[name] = offer
        audience.seen = now
        if changed:
            audience.version += 1

    def _own_offers(self, deployment: LLMDeployment) -> dict[str, Offer]:
        """Of nodes where it has pods or promises."""
        namespace, name = deployment.namespace, deployment.name
        pods = [pod for pod in self._stock.part(namespace, name).pods if is_pod_of(deployment, pod)]
        held = _requests_of(self._stock, pods)
        promised = self._promises.to((namespace, name))
        offers: dict[str, Offer] = {}
        for where in sorted(held.keys() | promised.keys()):
            node = self._stock.node(where)
            if node is None:
                continue
            all_of_it = added(self._stock.taken(where), self._promises.of(where))
            taken = _less(all_of_it, added(held.get(where, NOTHING), promised.get(where, NOTHING)))
            slots = tuple(pod for pod in pods if _is_slot(pod) and self._stock.held(pod)[0] == where)
            offers[where] = offer_of(deployment, node, taken, slots, self._options)
        return offers


class _Promises:
    """What plans have been promised of each node and no pod of theirs holds yet."""

    def __init__(self, stock: Stock) -> None:
        self._stock = stock
        self._known: tuple[DeviceLedger | None, int] = (None, -1)
        self._of_node: dict[str, Amounts] = {}
        self._to: dict[Key, dict[str, Amounts]] = {}
        self._changed: dict[str, int] = {}
        self.changes = 0

    def take_up(self, ledger: DeviceLedger) -> None:
        if self._known == (ledger, self._stock.pod_changes):
            return
        self._known = (ledger, self._stock.pod_changes)
        held = self._stock.slot_requests()
        before, self._to = self._of_node, {}
        parts: dict[str, list[Amounts]] = {}
        for claim in (each for claims in ledger.claims.values() for each in claims):
            left = remaining(claim.requests, [held.get((claim.namespace, claim.deployment, claim.slot), NOTHING)])
            parts.setdefault(claim.node, []).append(left)
            own = self._to.setdefault((claim.namespace, claim.deployment), {})
            own[claim.node] = added(own.get(claim.node, NOTHING), left)
        self._of_node = {node: added(*amounts) for node, amounts in parts.items()}
        for node in before.keys() | self._of_node.keys():
            if before.get(node, NOTHING) != self._of_node.get(node, NOTHING):
                self.changes += 1
                self._changed[node] = self.changes

    def of(self, node: str) -> Amounts:
        return self._of_node.get(node, NOTHING)

    def to(self, deployment: Key) -> Mapping[str, Amounts]:
        """By node."""
        return self._to.get(deployment, {})

    def changed_nodes(self, since: int) -> list[str]:
        return [node for node, at in self._changed.items() if at > since]


def _less(whole: Amounts, part: Amounts) -> Amounts:
    return {name: amount - part.get(name, Decimal()) for name, amount in whole.items()}


def _requests_of(stock: Stock, pods: Iterable[dict[str, object]]) -> dict[str, Amounts]:
    parts: dict[str, list[Amounts]] = {}
    for pod in pods:
        node, requests = stock.held(pod)
        if node:
            parts.setdefault(node, []).append(requests)
    return {node: added(*amounts) for node, amounts in parts.items()}


def _is_slot(pod: dict[str, object]) -> bool:
    return pod_label(pod, COMPONENT_LABEL) == SLOT


def _audience_of(deployment: LLMDeployment) -> str:
    """What of a deployment decides which nodes it may use, and how much of them."""
    placement = deployment.spec.placement.model_dump(mode="json", include={"node_selector", "tolerations", "exclude"})
    reserve = dict(deployment.spec.gateway.resources.requests or {})
    return msgspec.json.encode(
        [placement, {name: str(amount) for name, amount in reserve.items()}], order="sorted"
    ).decode()
