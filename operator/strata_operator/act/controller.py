"""The operator's shell: looks at the cluster, asks `reconcile` what to do, does it. One deployment after the other.

Woken by watch events, by statuses of slots and gateways, and by a clock. Planning happens here, one plan at a time, on a
fresh look: two deployments never plan the same device. What is kept between two looks is only what saves work (applied
manifests, plans that failed, connections); losing it changes nothing.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

import msgspec

from strata_operator.act import metrics
from strata_operator.act.control_client import Endpoint, Links, as_kind
from strata_operator.act.objects import event_object, status_object
from strata_operator.act.planner_call import CannotPlanError, plan_now
from strata_operator.api import LLMDeployment, deployment_from_object
from strata_operator.decide.actions import (
    Action,
    Apply,
    DeleteEpoch,
    DeletePod,
    DeleteStatefulSet,
    Emit,
    MakePlan,
    RenewEpoch,
    SetStatus,
)
from strata_operator.decide.claims import check_claims
from strata_operator.decide.epochs import Epoch, Observed, SendToGateway, SendToSlot, highest_epoch
from strata_operator.decide.epochs import slots_of as slots_in
from strata_operator.decide.planning import with_margin
from strata_operator.decide.reconcile import reconcile
from strata_operator.decide.view import PlanFailure, View, gateway_is_ready, gateway_trouble, node_views, pod_views
from strata_operator.decide.wishes import plan_key, without_digest
from strata_operator.errors import InvalidInputError, NotReadyError
from strata_operator.observe.inventory import Inventory, InventoryOptions, take_inventory
from strata_operator.observe.kube import CONFIG_MAPS, EVENTS, PODS, SECRETS, STATEFUL_SETS, AlreadyExistsError, Kube
from strata_operator.observe.snapshot import Snapshot, take_snapshot
from strata_operator.render import RenderOptions, image_for, render
from strata_operator.render.names import CONTROL_PORT, epoch_name, gateway_control_host, slot_address
from strata_operator.render.records import RENEWED, Cause, EpochRecord, as_planned, record_objects, spec_digest
from strata_operator.render.slots import Claim, claims_of, slots_of
from strata_planner.contract.control import GatewayStatus, SlotStatus
from strata_planner.contract.keys import new_secret
from strata_planner.contract.plan import Plan
from strata_planner.contract.values import ContractError
from strata_planner.question.cluster import Cluster

log = logging.getLogger(__name__)

LOOK_EVERY_SECONDS = 5.0
DEBOUNCE_SECONDS = 0.1  # events come in bursts
KEPT_FAILURES = 16  # plans that were not found, of a deployment
FIRST_ANSWERS_SECONDS = 3.0  # after its start an operator does not call a slot away before this
APPLY_AGAIN_SECONDS = 120.0  # drift that no watch shows is repaired this late
GATEWAY = "gateway"


@dataclass(frozen=True, slots=True)
class ControllerOptions:
    """What the operator was started with, as far as decisions rest on it."""

    namespaces: tuple[str, ...]  # empty: all
    runtime_image: str
    operator_namespace: str
    inventory: InventoryOptions = field(default_factory=InventoryOptions)


class Kept:
    """What saves work for one deployment between two looks."""

    def __init__(self, changed: Callable[[], None]) -> None:
        self.links = Links(changed)
        self.control_key = new_secret()  # used if the cluster has none yet
        self.applied: dict[str, tuple[str, float]] = {}  # kind and name -> what it was made last (digest), and when
        self.failures: dict[str, PlanFailure] = {}  # by key, the last few
        self.since = time.monotonic()


class Controller:
    """`wake` it after every change; `run` looks and acts while `leading()`."""

    def __init__(self, kube: Kube, options: ControllerOptions, leading: Callable[[], bool]) -> None:
        self._kube = kube
        self._options = options
        self._leading = leading
        self._woken = asyncio.Event()
        self._kept: dict[str, Kept] = {}  # by uid

    def wake(self) -> None:
        self._woken.set()

    async def run(self) -> None:
        """Until cancelled."""
        try:
            while True:
                if self._leading():
                    await self._look_safely()
                with suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_EVERY_SECONDS):
                        await self._woken.wait()
                await asyncio.sleep(DEBOUNCE_SECONDS)
                self._woken.clear()
        finally:
            for kept in self._kept.values():
                await kept.links.close()

    async def look(self) -> None:
        """One look at everything, one round of actions for each deployment."""
        snapshot = await take_snapshot(self._kube, self._options.namespaces)
        served = set()
        for thing in snapshot.deployments:
            uid = thing["metadata"]["uid"]
            if thing["metadata"].get("deletionTimestamp"):
                continue
            served.add(uid)
            try:
                await self._serve(deployment_from_object(thing), snapshot)
            except (NotReadyError, InvalidInputError, ContractError) as error:
                log.warning("%s/%s: %s", thing["metadata"]["namespace"], thing["metadata"]["name"], error)
        for uid in set(self._kept) - served:
            await self._kept.pop(uid).links.close()
        for pod in snapshot.stranded_pods(self._options.namespaces):
            meta = pod["metadata"]
            await self._kube.delete(PODS, meta["namespace"], meta["name"], uid=meta["uid"], force=True)
        metrics.count_phases(snapshot.deployments)

    async def _look_safely(self) -> None:
        """A look that fails is a look that comes again; an error of ours must not end the operator."""
        with metrics.LOOKS.time():
            try:
                await self.look()
            except NotReadyError as error:
                log.warning("%s", error)
            except Exception:
                metrics.ERRORS.inc()
                log.exception("a look at the cluster failed")

    async def _serve(self, deployment: LLMDeployment, snapshot: Snapshot) -> None:
        kept = self._kept.setdefault(deployment.metadata.uid, Kept(self.wake))
        view = self._view(deployment, snapshot, kept)
        if _is_too_early(view, kept):
            return
        actions = reconcile(view)
        for action in actions:
            await self._do(action, view, kept)
        if any(not isinstance(action, SetStatus | Emit) for action in actions):
            self.wake()

    def _view(self, deployment: LLMDeployment, snapshot: Snapshot, kept: Kept) -> View:
        records = snapshot.records_of(deployment.namespace, deployment.name)
        inventory = self._inventory(deployment, snapshot)
        key = snapshot.control_key_of(deployment) or kept.control_key
        image = image_for(deployment, self._options.runtime_image)
        recorded = deployment.status.model_copy(update={"image": image})
        deployment = deployment.model_copy(update={"status": recorded})
        newest = records[-1] if records else None
        plan = newest.epoch.plan if newest else None
        options = RenderOptions(image, key, self._options.operator_namespace)
        now = time.monotonic()
        kept.applied = {key: last for key, last in kept.applied.items() if now - last[1] < APPLY_AGAIN_SECONDS}
        return View(
            now=datetime.now(UTC),
            deployment=deployment,
            records=records,
            nodes=node_views(snapshot.nodes),
            pods=pod_views(deployment, snapshot.pods),
            stateful_sets=snapshot.stateful_sets_of(deployment),
            templates=snapshot.templates_of(deployment),
            seen=_observe(deployment, plan, key, kept.links),
            inventory_digest=inventory.digest,
            devices=sum(device.count for node in inventory.cluster.nodes for device in node.devices),
            refused=inventory.refused,
            manifests=_manifests(deployment, newest, options) if newest else (),
            applied=frozenset(digest for digest, _ in kept.applied.values()),
            usable=frozenset(node.name for node in inventory.cluster.nodes),
            failures=dict(kept.failures),
            gateway_trouble=gateway_trouble(deployment, snapshot.pods),
            gateway_ready=gateway_is_ready(deployment, snapshot.pods),
        )

    def _inventory(self, deployment: LLMDeployment, snapshot: Snapshot) -> Inventory:
        return take_inventory(
            deployment, snapshot.nodes, snapshot.pods, _claims(snapshot, deployment), self._options.inventory
        )

    async def _do(self, action: Action, view: View, kept: Kept) -> None:
        deployment = view.deployment
        match action:
            case MakePlan():
                await self._make_plan(action, view, kept)
            case RenewEpoch():
                await self._renew(action, view, kept)
            case Apply(manifest=manifest, digest=digest):
                await self._kube.apply(manifest)
                kept.applied[f"{manifest['kind']} {manifest['metadata']['name']}"] = (digest, time.monotonic())
            case SendToSlot(slot=slot, message=message):
                await kept.links.send(slot, message)
            case SendToGateway(gateway=gateway, message=route):
                await kept.links.send(gateway, route)
            case SetStatus(status=status):
                await self._kube.apply(status_object(deployment, status), "status")
            case Emit():
                await self._kube.create(EVENTS, event_object(deployment, action))
            case _:
                await self._delete(action, deployment)

    async def _delete(self, action: DeleteStatefulSet | DeletePod | DeleteEpoch, deployment: LLMDeployment) -> None:
        namespace = deployment.namespace
        match action:
            case DeleteStatefulSet(name=name):
                await self._kube.delete(STATEFUL_SETS, namespace, name)
            case DeletePod(name=name, uid=uid, force=force):
                await self._kube.delete(PODS, namespace, name, uid=uid, force=force)
            case DeleteEpoch(number=number):
                name = epoch_name(deployment, number)
                await self._kube.delete(CONFIG_MAPS, namespace, name)
                await self._kube.delete(SECRETS, namespace, name)

    async def _make_plan(self, wish: MakePlan, view: View, kept: Kept) -> None:
        """On a fresh look: another deployment may have got its plan since this one was seen."""
        deployment = as_planned(view.deployment, view.newest) if wish.recorded else view.deployment
        snapshot = await take_snapshot(self._kube, self._options.namespaces)
        inventory = self._inventory(deployment, snapshot)
        cluster = _without(inventory.cluster, wish.without)
        started = time.monotonic()
        running = view.newest.epoch.plan if view.newest and (wish.without or wish.optional) else None
        asked, devices = with_margin(deployment, cluster, wish.margin)
        try:
            plan = await plan_now(asked, devices, inventory.refused, running)
            check_claims(deployment, plan, snapshot.claims)
        except CannotPlanError as error:
            _remember(kept, view, wish, PlanFailure("", error.reason, str(error), view.now, passing=error.passing))
            log.warning("%s/%s: no plan (%s): %s", deployment.namespace, deployment.name, error.reason, error)
            return
        if wish.optional and plan == running:
            _remember(
                kept, view, wish, PlanFailure("", "NotWorthIt", "the plan in force is as good", view.now, kept=True)
            )
            return
        kept.failures.pop(plan_key(view, wish), None)
        cause = Cause(
            reason=wish.reason,
            spec_digest=spec_digest(deployment),
            inventory_digest=inventory.digest,
            node=wish.node,
            seconds_to_plan=time.monotonic() - started,
            without=without_digest(view, wish.without),
            margin=wish.margin,
        )
        await self._create_epoch(view, plan, cluster, cause)

    async def _renew(self, action: RenewEpoch, view: View, kept: Kept) -> None:
        """Only if every slot answers now: one that has just died looks alive for a moment, and could not prepare."""
        newest = view.newest
        assert newest is not None
        if not await kept.links.all_answer(slots_in(newest.epoch.plan)):
            return
        log.info("%s: epoch %d: %s", view.deployment.name, action.number, action.message)
        cause = replace(
            newest.cause,
            reason=RENEWED,
            node="",
            planned_in=newest.planned_in,
            renewals=action.renewals,
            seconds_to_plan=0.0,
        )
        await self._create_epoch(view, newest.epoch.plan, newest.cluster, cause)

    async def _create_epoch(self, view: View, plan: Plan, cluster: Cluster, cause: Cause) -> None:
        """The Secret first. Of two controllers that create the same epoch, the one whose ConfigMap is there has won."""
        number = 1 + highest_epoch(view.ledger, view.seen)
        deployment = (
            as_planned(view.deployment, view.newest) if cause.spec_digest != view.spec_digest else view.deployment
        )
        secret, config_map = record_objects(deployment, Epoch(number, new_secret(), plan), cluster, cause)
        try:
            await self._kube.create(SECRETS, secret)
        except AlreadyExistsError:
            log.info("the key of epoch %d exists already: an earlier attempt ended before its plan was stored", number)
        await self._kube.create(CONFIG_MAPS, config_map)
        metrics.EPOCHS.labels(cause.reason).inc()


def _manifests(deployment: LLMDeployment, newest: EpochRecord, options: RenderOptions) -> tuple[dict[str, Any], ...]:
    """What serves the newest plan, as it was planned for: another spec changes nothing before it has a plan."""
    return tuple(render(as_planned(deployment, newest), slots_of(newest.epoch.plan, newest.cluster), options))


def _remember(kept: Kept, view: View, wish: MakePlan, failure: PlanFailure) -> None:
    key = plan_key(view, wish)
    kept.failures.pop(key, None)
    kept.failures[key] = replace(failure, key=key, wish=wish.reason)
    while len(kept.failures) > KEPT_FAILURES:
        kept.failures.pop(next(iter(kept.failures)))


def _is_too_early(view: View, kept: Kept) -> bool:
    """Whether what serves has not been heard by this operator only because it has just started to listen."""
    unheard = any(not view.answers(stage.slot) for stage in view.stages()) or not view.seen.gateways
    serving = view.deployment.status.committed_epoch > 0
    return serving and unheard and time.monotonic() - kept.since < FIRST_ANSWERS_SECONDS


def _observe(deployment: LLMDeployment, plan: Plan | None, key: str, links: Links) -> Observed:
    """Follow the plan's slots and the gateway, and hand over what they have said last."""
    addresses = {slot: slot_address(deployment, slot) for slot in slots_in(plan)} if plan else {}
    endpoints = {slot: Endpoint(address.host, address.control_port, key) for slot, address in addresses.items()}
    if plan:
        endpoints[GATEWAY] = Endpoint(gateway_control_host(deployment), CONTROL_PORT, key)
    links.follow(endpoints)
    return Observed(
        slots=as_kind(links.statuses, SlotStatus),
        gateways=as_kind(links.statuses, GatewayStatus),
        addresses=addresses,
    )


def _claims(snapshot: Snapshot, own: LLMDeployment) -> list[Claim]:
    """What the newest plans of all other deployments take, whether their pods exist yet or not."""
    claims: list[Claim] = []
    for thing in snapshot.deployments:
        meta = thing["metadata"]
        if meta["uid"] == own.metadata.uid or meta.get("deletionTimestamp"):
            continue
        try:
            other = deployment_from_object(thing)
            records: tuple[EpochRecord, ...] = snapshot.records_of(other.namespace, other.name)
        except (InvalidInputError, ContractError) as error:
            log.warning("%s/%s is left out of the inventory: %s", meta["namespace"], meta["name"], error)
            continue
        if records:
            claims += claims_of(other, records[-1].epoch.plan, records[-1].cluster)
    return claims


def _without(cluster: Cluster, nodes: frozenset[str]) -> Cluster:
    return msgspec.structs.replace(
        cluster,
        nodes=tuple(node for node in cluster.nodes if node.name not in nodes),
        links=tuple(link for link in cluster.links if not nodes & {link.source, link.target}),
    )
