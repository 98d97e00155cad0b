"""From one look at the cluster to the View of one deployment, and to the ledger of all. Called by the controller at every look.

Starts to listen to the slots of the newest plan; decides nothing.
"""

import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from strata_operator.act.clock import Clock
from strata_operator.act.control_client import Endpoint, Links, as_kind
from strata_operator.act.kept import APPLY_AGAIN_SECONDS, Kept
from strata_operator.act.plan_process import PlanLimits
from strata_operator.act.readings import Readings
from strata_operator.api import LLMDeployment
from strata_operator.api.tenants import TenantRules
from strata_operator.decide.epochs import Observed
from strata_operator.decide.epochs import slots_of as slots_in
from strata_operator.decide.ledger import DeviceLedger
from strata_operator.decide.reconcile import manifest_digest
from strata_operator.decide.silence import suspects
from strata_operator.decide.view import (
    NodeView,
    View,
    gateway_hosts,
    gateway_is_ready,
    gateway_pod_views,
    given_the_control_key,
    pod_views,
    slot_hosts,
    slot_nodes,
)
from strata_operator.observe.inventories import Inventories
from strata_operator.observe.inventory import Inventory, InventoryOptions
from strata_operator.observe.snapshot import Records, Snapshot
from strata_operator.observe.stock import Stock
from strata_operator.render import RenderOptions, image_for
from strata_operator.render.names import (
    CONTROL_PORT,
    CONTROL_SECRET_KEY,
    INSTANCE_LABEL,
    gateway_name,
    process_secret,
    slot_address,
)
from strata_operator.render.objects import is_own, secret_text
from strata_operator.render.records import epoch_number
from strata_operator.render.slots import Claim, pod_label
from strata_planner.contract.control import GatewayStatus, SlotStatus
from strata_planner.contract.keys import gateway_secret, slot_secret
from strata_planner.contract.plan import NO_SPECULATION, Plan

log = logging.getLogger(__name__)

APPLY_EACH_SECONDS = 12.0  # for each deployment there is
_GATEWAY_PODS = "gateway/"  # before their names: no slot is called so


@dataclass(frozen=True)
class ControllerOptions:
    """What the operator was started with, as far as decisions rest on it."""

    namespaces: tuple[str, ...]  # empty: all
    runtime_image: str
    operator_namespace: str
    inventory: InventoryOptions = field(default_factory=InventoryOptions)
    limits: PlanLimits = field(default_factory=PlanLimits)
    tenants: TenantRules = field(default_factory=TenantRules)


@dataclass(frozen=True, slots=True)
class Look:
    """One look at the cluster, and what has been dealt by the time that somebody asks."""

    stock: Stock
    options: ControllerOptions
    clock: Clock
    readings: Readings
    inventories: Inventories

    def part(self, deployment: LLMDeployment) -> Snapshot:
        return self.stock.part(deployment.namespace, deployment.name)

    def records_of(self, deployment: LLMDeployment) -> Records:
        return self.readings.records(deployment, self.part(deployment))

    def inventory(self, deployment: LLMDeployment, ledger: DeviceLedger) -> Inventory:
        return self.inventories.of(deployment, ledger)

    def view(self, deployment: LLMDeployment, ledger: DeviceLedger, kept: Kept) -> View:
        snapshot, seconds = self.part(deployment), self.clock.seconds()
        records, unread = self.records_of(deployment)
        inventory = self.inventory(deployment, ledger)
        key = snapshot.control_key_of(deployment) or kept.control_key
        image = image_for(deployment, self.options.runtime_image)
        recorded = kept.status_over(deployment.status).model_copy(update={"image": image})
        deployment = deployment.model_copy(update={"status": recorded})
        newest = records[-1] if records else None
        plan = newest.epoch.plan if newest else None
        nodes = self.stock.node_views()
        lets_go = (
            kept.has_no_plan_for("Drain") and any(_is_cordoned(nodes.get(each.node)) for each in plan.stages)
            if plan
            else False
        )
        options = RenderOptions(
            image, key, self.options.operator_namespace, plan.model_uri if plan else "", lets_go=lets_go
        )
        manifests = self.readings.manifests(deployment, newest, options) if newest else ()
        number = newest.epoch.number if newest else 0
        seen = _observe(deployment, plan, key, snapshot, nodes, kept.links)
        # Each of them has counted what all have asked for. One that stays the same, for as long as it lives.
        gateway = next((seen.gateways[name] for name in sorted(seen.gateways)), None)
        view = View(
            now=self.clock.now(),
            deployment=deployment,
            records=records,
            nodes=nodes,
            pods=pod_views(deployment, snapshot.pods),
            stateful_sets=snapshot.stateful_sets_of(deployment),
            templates=snapshot.templates(),
            seen=seen,
            inventory_digest=inventory.digest,
            devices=inventory.devices,
            refused=inventory.told,
            manifests=manifests,
            applied=kept.still_applied(seconds, self._apply_again_seconds()),
            usable=inventory.usable,
            failures=dict(kept.failures),
            gateway_pods=gateway_pod_views(deployment, snapshot.pods),
            gateway_ready=gateway_is_ready(deployment, snapshot.pods),
            highest_number=max((number, *(each.number for each in unread))),
            troubles=tuple(f"{each.name}: {each.reason}" for each in unread if not 0 < each.number < number),
            refusals=kept.still_refused({manifest_digest(manifest) for manifest in manifests}),
            postponed=kept.postponed(seconds),
            drafted=kept.drafts.take(gateway, number, plan.speculation if plan else NO_SPECULATION),
            is_unsaid=kept.is_to_be_said(seconds),
            unreachable=frozenset(kept.links.unreachable),
            knocked=kept.knocked(self.clock.now()),
            foretold=kept.foretold,
        )
        for slot in suspects(view):
            kept.links.doubt(slot)
        return view

    def heard(self, view: View, kept: Kept) -> View:
        """The same moment's, with what processes have said since."""
        snapshot, nodes = self.part(view.deployment), self.stock.node_views()
        key = snapshot.control_key_of(view.deployment) or kept.control_key
        return replace(view, seen=_observe(view.deployment, view.plan, key, snapshot, nodes, kept.links))

    def outdated(self, deployment: LLMDeployment) -> tuple[int, ...]:
        """Epochs behind a committed one that are none: another release's records, and what attempts that ended early have left."""
        records, unread = self.records_of(deployment)
        newest = records[-1].epoch.number if records else 0
        if deployment.status.committed_epoch != newest:
            return ()
        alone = self.part(deployment).lone_keys()
        numbers = alone | {each.number for each in unread}
        return tuple(number for number in sorted(numbers) if 0 < number < newest)

    def ledger(self) -> DeviceLedger:
        """What the newest plans of all deployments take, whether their pods exist yet or not."""
        claims: dict[str, tuple[Claim, ...]] = {}
        for thing in self.stock.deployments:
            meta = thing["metadata"]
            if meta.get("deletionTimestamp"):
                continue
            try:
                deployment = self.readings.deployment(thing)
                records, _ = self.records_of(deployment)
                if records:
                    claims[meta["uid"]] = self.readings.claims(deployment, records[-1])
            except Exception as error:  # noqa: BLE001  whatever one deployment holds, the others' devices are still theirs
                log.warning("%s/%s is left out of the ledger: %s", meta["namespace"], meta["name"], error)
        return DeviceLedger(claims)

    def newest_numbers(self) -> dict[str, int]:
        """The highest epoch on record of each deployment, by its uid."""
        metas = [thing["metadata"] for thing in self.stock.deployments]
        return {
            meta["uid"]: max(map(epoch_number, self.stock.part(meta["namespace"], meta["name"]).config_maps), default=0)
            for meta in metas
        }

    def stranded_pods(self) -> list[dict[str, Any]]:
        """Slot and gateway pods on their way out whose deployment and node are both gone: nobody else confirms their end."""
        known = {(thing["metadata"]["namespace"], thing["metadata"]["name"]) for thing in self.stock.deployments}
        namespaces, nodes = self.options.namespaces, self.stock.node_views()
        return [
            pod
            for pod in self.stock.own_pods()
            if pod["metadata"].get("deletionTimestamp")
            and (not namespaces or pod["metadata"]["namespace"] in namespaces)
            and pod["metadata"]["namespace"] not in self.stock.unread  # whose deployments nobody knows
            and (pod["metadata"]["namespace"], pod_label(pod, INSTANCE_LABEL)) not in known
            and _is_away(nodes.get(pod["spec"].get("nodeName", "")))
        ]

    def _apply_again_seconds(self) -> float:
        """Those of all deployments together are applied at a pace that the API server does not notice."""
        return max(APPLY_AGAIN_SECONDS, APPLY_EACH_SECONDS * len(self.stock.deployments))


def _is_cordoned(node: NodeView | None) -> bool:
    return node is not None and node.cordoned


def _is_away(node: NodeView | None) -> bool:
    return node is None or node.away_since is not None


def _observe(
    deployment: LLMDeployment,
    plan: Plan | None,
    key: str,
    snapshot: Snapshot,
    nodes: Mapping[str, NodeView],
    links: Links,
) -> Observed:
    """Follow the pods of the plan's slots, of those that leave and of every gateway, and hand over what they have said last. Slots find each other by name."""
    hosts, on = slot_hosts(deployment, snapshot.pods), slot_nodes(deployment, snapshot.pods)
    addresses = {slot: slot_address(deployment, slot) for slot in {*slots_in(plan), *hosts}} if plan else {}
    earlier = given_the_control_key(deployment, snapshot.pods)
    stored = _keys_of(deployment, snapshot)

    def key_of(who: str, process: str, derived: str) -> str:
        return key if who in earlier else stored.get(process_secret(process), derived)

    endpoints = {
        slot: Endpoint(
            hosts[slot],
            address.control_port,
            key_of(slot, slot, slot_secret(key, slot)),
            node.kubelet if (node := nodes.get(on.get(slot, ""))) else None,
        )
        for slot, address in addresses.items()
        if slot in hosts
    }
    if plan:
        derived = gateway_secret(key)
        for pod, host in gateway_hosts(deployment, snapshot.pods).items():
            secret = key_of(pod, gateway_name(deployment), derived)
            endpoints[f"{_GATEWAY_PODS}{pod}"] = Endpoint(host, CONTROL_PORT, secret)
    links.follow(endpoints)
    return Observed(
        slots=as_kind(links.statuses, SlotStatus),
        gateways=as_kind(links.statuses, GatewayStatus),
        addresses=addresses,
    )


def _keys_of(deployment: LLMDeployment, snapshot: Snapshot) -> dict[str, str]:
    """By the Secret's name. A process has the key that its own Secret holds, whatever has become of the one that it was derived from:
    a control key that is lost is made anew, and ends no process.
    """
    keys: dict[str, str] = {}
    for secret in snapshot.secrets:
        if secret["metadata"].get("namespace") == deployment.namespace and is_own(deployment, secret):
            with suppress(KeyError, TypeError, ValueError):  # it holds none that could be read: the derived one stands
                keys[secret["metadata"]["name"]] = secret_text(secret, CONTROL_SECRET_KEY)
    return keys
