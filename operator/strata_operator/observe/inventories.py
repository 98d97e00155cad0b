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
from strata_operator.api.spec import LLMDeploymentSpec
from strata_operator.decide.ledger import DeviceLedger
from strata_operator.observe.inventory import (
    NO_OFFER,
    Inventory,
    InventoryOptions,
    Offer,
    has_devices,
    inventory_of,
    offer_of,
    refusal,
)
from strata_operator.observe.nodes import why_unusable
from strata_operator.observe.snapshot import Snapshot
from strata_operator.observe.stock import NOTHING, Key, Object, Stock
from strata_operator.once import Same
from strata_operator.render.names import COMPONENT_LABEL, SLOT
from strata_operator.render.requests import Amounts, added, remaining
from strata_operator.render.slots import is_pod_of, pod_label


@dataclass(slots=True)
class _Audience:
    """`offers`: of the nodes that have devices, to a deployment with nothing of its own there. `closed`: nodes that are not for it,
    whatever becomes of their pods. `seen`: the stock's and the promises' changes that they know. `version` rises when one of them becomes
    another.
    """

    offers: dict[str, Offer] = field(default_factory=dict)
    closed: dict[str, Object] = field(default_factory=dict)
    seen: tuple[int, int] = (-1, -1)
    version: int = 0


class _Basis(NamedTuple):
    """All that one deployment's inventory was made from."""

    audience: tuple[str, int]
    own: tuple[tuple[str, Offer], ...]


class _Made(NamedTuple):
    """`asked`: the spec, and the changes that were known."""

    asked: tuple[Same[LLMDeploymentSpec], tuple[int, int]]
    basis: _Basis
    inventory: Inventory


class _Own(NamedTuple):
    """What a deployment is offered where it has pods or promises, and what that rests on."""

    asked: tuple[Same[LLMDeploymentSpec], Same[Snapshot]]
    promised: Mapping[str, Amounts]
    changed: tuple[tuple[str, int, int], ...]  # nodes, and when something of them changed
    offers: dict[str, Offer]


class Inventories:
    """Of one stock. `of` is asked with the ledger as it is at that moment."""

    def __init__(self, stock: Stock, options: InventoryOptions) -> None:
        self._stock, self._options = stock, options
        self._audiences: dict[str, _Audience] = {}
        self._made: dict[str, _Made] = {}
        self._devices: dict[str, tuple[Object, bool]] = {}
        self._keys: dict[str, tuple[Same[LLMDeploymentSpec], str]] = {}
        self._own: dict[str, _Own] = {}
        self._promises = _Promises(stock)

    def of(self, deployment: LLMDeployment, ledger: DeviceLedger) -> Inventory:
        """The same value as long as nothing of it changes."""
        self._promises.take_up(ledger)
        uid, now = deployment.metadata.uid, (self._stock.changes, self._promises.turns)
        made = self._made.get(uid)
        if made is not None and made.asked == (Same(deployment.spec), now):
            return made.inventory
        key = self._audience_of(deployment)
        audience = self._audiences.setdefault(key, _Audience())
        self._catch_up(audience, deployment)
        own = self._own_offers(deployment)
        basis = _Basis((key, audience.version), tuple(own.items()))
        if made is None or made.basis != basis:
            offers = audience.offers | own
            inventory = inventory_of((offers[name] for name in sorted(offers)), self._options)
        else:
            inventory = made.inventory
        self._made[uid] = _Made((Same(deployment.spec), now), basis, inventory)
        return inventory

    def drop(self, uid: str) -> None:
        """The deployment is gone; audiences that nobody belongs to go with it."""
        for kept in (self._made, self._keys, self._own):
            kept.pop(uid, None)
        needed = {made.basis.audience[0] for made in self._made.values()}
        self._audiences = {key: each for key, each in self._audiences.items() if key in needed}

    def _catch_up(self, audience: _Audience, deployment: LLMDeployment) -> None:
        now = (self._stock.changes, self._promises.changes)
        if audience.seen == now:
            return
        names = {*self._stock.changed_nodes(audience.seen[0]), *self._promises.changed_nodes(audience.seen[1])}
        changed = False
        for name in names:
            node = self._stock.node(name)
            if node is not None and audience.closed.get(name) is node:
                continue
            offer = self._offer(audience, deployment, name, node)
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

    def _offer(self, audience: _Audience, deployment: LLMDeployment, name: str, node: Object | None) -> Offer:
        """To all of an audience."""
        audience.closed.pop(name, None)
        if node is None:
            self._devices.pop(name, None)
        if node is None or not self._has_devices(name, node):
            return NO_OFFER
        if reason := why_unusable(node, deployment):
            audience.closed[name] = node
            return refusal(node, reason)
        return offer_of(deployment, node, added(self._stock.taken(name), self._promises.of(name)), (), self._options)

    def _has_devices(self, name: str, node: Object) -> bool:
        known = self._devices.get(name)
        if known is None or known[0] is not node:
            known = self._devices[name] = (node, has_devices(node))
        return known[1]

    def _audience_of(self, deployment: LLMDeployment) -> str:
        uid, spec = deployment.metadata.uid, Same(deployment.spec)
        known = self._keys.get(uid)
        if known is None or known[0] != spec:
            known = self._keys[uid] = (spec, _audience_of(deployment))
        return known[1]

    def _own_offers(self, deployment: LLMDeployment) -> dict[str, Offer]:
        """Of nodes where it has pods or promises."""
        namespace, name = deployment.namespace, deployment.name
        part, promised = self._stock.part(namespace, name), self._promises.to((namespace, name))
        asked, known = (Same(deployment.spec), Same(part)), self._own.get(deployment.metadata.uid)
        if known and known == (asked, promised, self._changed(where for where, *_ in known.changed), known.offers):
            return known.offers
        pods = [pod for pod in part.pods if is_pod_of(deployment, pod)]
        held = _requests_of(self._stock, pods)
        offers: dict[str, Offer] = {}
        places = sorted(held.keys() | promised.keys())
        for where in places:
            node = self._stock.node(where)
            if node is None:
                continue
            all_of_it = added(self._stock.taken(where), self._promises.of(where))
            taken = _less(all_of_it, added(held.get(where, NOTHING), promised.get(where, NOTHING)))
            slots = tuple(pod for pod in pods if _is_slot(pod) and self._stock.held(pod)[0] == where)
            offers[where] = offer_of(deployment, node, taken, slots, self._options)
        self._own[deployment.metadata.uid] = _Own(asked, promised, self._changed(places), offers)
        return offers

    def _changed(self, nodes: Iterable[str]) -> tuple[tuple[str, int, int], ...]:
        return tuple((node, self._stock.changed_at(node), self._promises.changed_at(node)) for node in nodes)


class _Promises:
    """What plans have been promised of each node and no pod of theirs holds yet."""

    def __init__(self, stock: Stock) -> None:
        self._stock = stock
        self._known: tuple[DeviceLedger | None, int] = (None, -1)
        self._of_node: dict[str, Amounts] = {}
        self._to: dict[Key, dict[str, Amounts]] = {}
        self._changed: dict[str, int] = {}
        self.changes = 0  # of what a node has been promised to all
        self.turns = 0  # of who has been promised what

    def take_up(self, ledger: DeviceLedger) -> None:
        if self._known == (ledger, self._stock.pod_changes):
            return
        self._known = (ledger, self._stock.pod_changes)
        held = self._stock.slot_requests()
        before, before_to, self._to = self._of_node, self._to, {}
        parts: dict[str, list[Amounts]] = {}
        for claim in (each for claims in ledger.claims.values() for each in claims):
            left = remaining(claim.requests, [held.get((claim.namespace, claim.deployment, claim.slot), NOTHING)])
            parts.setdefault(claim.node, []).append(left)
            own = self._to.setdefault((claim.namespace, claim.deployment), {})
            own[claim.node] = added(own.get(claim.node, NOTHING), left)
        self._of_node = {node: added(*amounts) for node, amounts in parts.items()}
        self.turns += self._to != before_to
        for node in before.keys() | self._of_node.keys():
            if before.get(node, NOTHING) != self._of_node.get(node, NOTHING):
                self.changes += 1
                self._changed[node] = self.changes

    def of(self, node: str) -> Amounts:
        return self._of_node.get(node, NOTHING)

    def to(self, deployment: Key) -> Mapping[str, Amounts]:
        """By node."""
        return self._to.get(deployment, {})

    def changed_at(self, node: str) -> int:
        return self._changed.get(node, 0)

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
    gateway = deployment.spec.gateway
    reserve = {name: str(amount) for name, amount in (gateway.resources.requests or {}).items()}
    return msgspec.json.encode([placement, reserve, gateway.replicas], order="sorted").decode()
