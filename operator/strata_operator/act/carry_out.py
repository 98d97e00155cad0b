"""Does what `reconcile` decided for one deployment: writes to the API server, messages to slots, questions to the planner.

Called by the controller, one deployment at a time each, several beside each other. What the API server refuses is remembered
with its sentence and tried again later; the rest is done all the same. Decides nothing but whether a plan that is done may
still be taken.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from strata_operator.act import metrics
from strata_operator.act.clock import Clock
from strata_operator.act.kept import Asked, Kept, Refusal
from strata_operator.act.lease import NotLeadingError
from strata_operator.act.objects import event_object, status_object
from strata_operator.act.observation import Look
from strata_operator.act.ownership import apply_own, create_own
from strata_operator.act.planner_call import Answer, Question
from strata_operator.act.planners import LOSSES, Planners
from strata_operator.api import LLMDeployment
from strata_operator.api.status import stored_status
from strata_operator.decide.actions import (
    Action,
    Apply,
    DeleteEpoch,
    DeletePod,
    DeleteStatefulSet,
    Emit,
    GiveOrders,
    MakePlan,
    RecordOrder,
    RenewEpoch,
    SetStatus,
)
from strata_operator.decide.backoff import Backoff
from strata_operator.decide.claims import unshared_claim
from strata_operator.decide.epochs import SendToGateway, SendToSlot, going_on, highest_epoch, to_be_formed
from strata_operator.decide.ledger import Dealing, still_free
from strata_operator.decide.planning import with_margin
from strata_operator.decide.reconcile import GOES_ON, RUN_PODS, converse
from strata_operator.decide.standing_orders import OrderTerms, cause_of
from strata_operator.decide.view import Foretold, PlanFailure, View
from strata_operator.decide.wishes import plan_key, planned_digest, without_digest
from strata_operator.errors import NotReadyError
from strata_operator.observe.kube import (
    CONFIG_MAPS,
    EVENTS,
    PODS,
    SECRETS,
    STATEFUL_SETS,
    AlreadyExistsError,
    Kube,
    RefusedError,
    ServerError,
)
from strata_operator.render.epoch import Epoch
from strata_operator.render.names import epoch_name, process_secret
from strata_operator.render.objects import secret_text
from strata_operator.render.records import NODE_BACK, RENEWED, Cause, as_planned, record_objects
from strata_operator.render.slots import claims_of
from strata_planner.contract.control import Commit
from strata_planner.contract.keys import new_secret
from strata_planner.contract.plan import Plan
from strata_planner.question.cluster import Cluster

log = logging.getLogger(__name__)


class Hands:
    """Carries out actions. `leading`: asked before messages, as the fence is before writes."""

    def __init__(
        self, kube: Kube, planners: Planners, dealing: Dealing, leading: Callable[[], bool], clock: Clock
    ) -> None:
        self._kube, self._planners, self._dealing = kube, planners, dealing
        self._leading, self._clock = leading, clock

    async def carry_out(self, actions: tuple[Action, ...], look: Look, view: View, kept: Kept) -> bool:
        """Whether something was changed, so that it is worth looking again at once."""
        # Not while status is to be written: reconcile may withhold its wish for that look.
        if not any(isinstance(action, MakePlan | SetStatus) for action in actions):
            self._want_no_plan(view, kept)
        if all(_named(each, view) in kept.refusals for each in actions if _comes_first(each)):
            kept.wants({_named(action, view) for action in actions})
        changed = unsafe = False
        told = [action for action in actions if isinstance(action, SendToSlot | SendToGateway)]
        for action in actions:
            if told and action is told[0]:
                changed |= await self._tell(told, look, view, kept)
            if action in told:
                continue
            kind = action.manifest["kind"] if isinstance(action, Apply) else ""
            if unsafe and kind in RUN_PODS:
                continue
            changed |= await self._try(action, look, view, kept)
            if changed and isinstance(action, MakePlan):
                return True  # all else was decided before there was this plan
            unsafe |= kind == "Secret" and _named(action, view) in kept.refusals
        return changed

    async def _tell(self, told: Sequence[SendToSlot | SendToGateway], look: Look, view: View, kept: Kept) -> bool:
        """Side by side: one that is silent keeps nothing from the others. Once slots have committed, requests are held until gateways know: they are told
        before anything is written.
        """
        changed = await asyncio.gather(*(self._try(each, look, view, kept) for each in told))
        if any(isinstance(each.message, Commit) for each in told):
            now = look.heard(view, kept)
            routes = [each for each in converse(now) if isinstance(each, SendToGateway)]
            changed += await asyncio.gather(*(self._try(each, look, now, kept) for each in routes))
        return any(changed)

    def _want_no_plan(self, view: View, kept: Kept) -> None:
        if kept.asked is not None:
            self._planners.drop(view.deployment.metadata.uid)
            kept.asked = kept.foretold = None

    async def _try(self, action: Action, look: Look, view: View, kept: Kept) -> bool:
        """What the API server refuses stops nothing else."""
        what, now = _named(action, view), self._clock.seconds()
        refused = kept.refusals.get(what)
        if refused is not None and refused.backoff.waits(now):
            return isinstance(action, SetStatus) and kept.leave_unsaid(action.status)
        try:
            changed = await self._do(action, look, view, kept)
        except NotLeadingError:
            raise
        except NotReadyError as error:
            answered = isinstance(error, RefusedError | ServerError)
            if isinstance(action, Emit) or (isinstance(action, SetStatus) and not answered):
                log.warning("%s/%s: %s: %s", view.deployment.namespace, view.deployment.name, what, error)
                return isinstance(error, AlreadyExistsError)  # the object has changed meanwhile: look again
            before = refused.backoff if refused else Backoff()
            digest = action.digest if isinstance(action, Apply) else ""
            kept.refusals[what] = Refusal(f"{what}: {error}", digest, before.failed(now))
            log.warning("%s/%s: %s: %s", view.deployment.namespace, view.deployment.name, what, error)
            if isinstance(action, SetStatus):
                kept.leave_unsaid(action.status)
            return True
        kept.refusals.pop(what, None)
        return changed

    async def _do(self, action: Action, look: Look, view: View, kept: Kept) -> bool:
        deployment = view.deployment
        match action:
            case MakePlan():
                return await self._plan(action, look, view, kept)
            case RenewEpoch():
                return await self._renew(action, view, kept)
            case RecordOrder():
                await self._record_order(action, view, kept)
            case GiveOrders(terms=terms):
                await self._give_orders(terms, view, kept)
                return False
            case Apply(manifest=manifest, digest=digest):
                await apply_own(self._kube, deployment, manifest)
                kept.applied[f"{manifest['kind']} {manifest['metadata']['name']}"] = (digest, self._clock.seconds())
            case SendToSlot(slot=name, message=message):
                await self._send(kept, name, message)
            case SendToGateway(gateway=name, message=message):
                await self._send(kept, name, message)
            case SetStatus(status=status):
                stored = await self._kube.apply(status_object(deployment, status), "status")
                metrics.count_replans(deployment.status, status)
                kept.note_said(status, stored_status(stored.get("status")), self._clock.seconds())
                return False
            case Emit():
                await self._kube.create(EVENTS, event_object(deployment, action, self._clock.now()))
                return False
            case _:
                await self._delete(action, deployment, kept)
        return True

    async def _send(self, kept: Kept, name: str, message: Any) -> None:
        if not self._leading():
            raise NotLeadingError("this operator leads no more: nobody is told anything")
        await kept.links.send(name, message)

    async def _delete(
        self, action: DeleteStatefulSet | DeletePod | DeleteEpoch, deployment: LLMDeployment, kept: Kept
    ) -> None:
        """Secrets first: what is looked for again, should the second deletion fail, is what they belong to."""
        namespace = deployment.namespace
        match action:
            case DeleteStatefulSet(name=name):
                kept.forget_applied(f"Secret {process_secret(name)}", f"StatefulSet {name}")
                await self._kube.delete(SECRETS, namespace, process_secret(name))
                await self._kube.delete(STATEFUL_SETS, namespace, name)
            case DeletePod(name=name, uid=uid, grace_seconds=grace_seconds):
                await self._kube.delete(PODS, namespace, name, uid=uid, grace_seconds=grace_seconds)
            case DeleteEpoch(number=number):
                name = epoch_name(deployment, number)
                await self._kube.delete(SECRETS, namespace, name)
                await self._kube.delete(CONFIG_MAPS, namespace, name)

    async def _plan(self, wish: MakePlan, look: Look, view: View, kept: Kept) -> bool:
        """Ask for a plan, or take one that is done. Never waits for it."""
        uid, asked = view.deployment.metadata.uid, kept.asked
        if asked is None or not _still_asked(asked, wish, view):
            return await self._ask(wish, look, view, kept)
        if self._asked_of_others(asked, wish, look, view):
            return await self._ask(wish, look, view, kept, first=asked)
        if wish.reason in LOSSES:
            self._planners.hurry(uid)
        answer = self._planners.answer(uid)
        if answer is None:
            return False
        if wish.early:
            return _foretell(wish, answer, kept)
        if not asked.seconds:
            asked = kept.asked = replace(asked, seconds=self._clock.seconds() - asked.since)
        if answer.plan is None:
            self._note_failure(answer, wish, asked, view, kept)
        else:
            await self._take(wish, answer, asked, look, view, kept)
        self._want_no_plan(view, kept)  # not before: an epoch that is refused is tried again with the same plan
        return True

    def _asked_of_others(self, asked: Asked, wish: MakePlan, look: Look, view: View) -> bool:
        """Whether other devices are there than those it will be planned on once its turn comes: nodes of a new cluster come one by one."""
        if not self._planners.is_waiting(view.deployment.metadata.uid):
            return False
        inventory = look.inventory(_wanted_deployment(wish, view), self._dealing.ledger)
        return inventory.digest != asked.inventory_digest

    async def _ask(self, wish: MakePlan, look: Look, view: View, kept: Kept, first: Asked | None = None) -> bool:
        """Whether there is an answer already: that the question cannot be asked. `first`: as it was asked before, of other devices."""
        if kept.conflicts.failures > 1 and kept.conflicts.waits(self._clock.seconds()):
            return False
        deployment = _wanted_deployment(wish, view)
        inventory = look.inventory(deployment, self._dealing.ledger)
        cluster = inventory.cluster.without(wish.without)
        asked = Asked(
            question=_question_of(wish, view),
            key=plan_key(view, wish),
            cluster=cluster,
            inventory_digest=inventory.digest,
            without=without_digest(view, wish.without),
            since=first.since if first else self._clock.seconds(),
            noticed=first.noticed if first else view.now,
        )
        try:
            question = await self._question(wish, view, cluster, inventory.told)
        except NotReadyError as error:
            answer = Answer(None, "ModelUnavailable", str(error), passing=True)
            self._note_failure(answer, wish, asked, view, kept)
            return True
        kept.asked, kept.foretold = asked, None
        self._planners.want(view.deployment.metadata.uid, question, urgent=wish.reason in LOSSES)
        return False

    async def _take(self, wish: MakePlan, answer: Answer, asked: Asked, look: Look, view: View, kept: Kept) -> None:
        """Only if all its devices can still be had, its volumes can be mounted there, and it is better where it is a wish."""
        plan = answer.plan
        assert plan is not None
        deployment = _wanted_deployment(wish, view)
        now = look.inventory(deployment, self._dealing.ledger)
        if not still_free(plan, asked.cluster, now.cluster.without(wish.without)):
            log.info("%s: what was planned on is not free any more: it is planned anew", view.deployment.name)
            kept.conflicts = kept.conflicts.failed(self._clock.seconds())
            return
        if unshared := unshared_claim(deployment, plan, look.stock.claims(deployment.namespace)):
            self._note_failure(Answer(None, "ClaimNotShared", unshared), wish, asked, view, kept)
            return
        if wish.optional and view.newest and plan == view.newest.epoch.plan:
            as_good = "the plan in force is as good"
            kept.note_failure(
                PlanFailure(
                    asked.key, "NotWorthIt", as_good, view.now, wish=wish.reason, kept=True, gain=answer.gain or 0.0
                )
            )
            return
        kept.failures.pop(asked.key, None)
        kept.conflicts = Backoff()
        cause = Cause(
            reason=wish.reason,
            spec_digest=planned_digest(view, wish),
            inventory_digest=asked.inventory_digest,
            node=wish.node,
            seconds_to_plan=asked.seconds,
            without=asked.without,
            margin=wish.margin,
            repair=answer.repair,
            gain=answer.gain if wish.optional else None,
            noticed=asked.noticed,
            planned=self._clock.now(),
            weighed=kept.weighed if wish.taken_over else None,
            hurried=answer.hurried,
        )
        await self._create_epoch(view, kept, plan, asked.cluster, cause)

    async def _question(self, wish: MakePlan, view: View, cluster: Cluster, refused: tuple[str, ...]) -> Question:
        """An `hf://` model is resolved to a commit when it is first planned and whenever the spec changes, never by a loss."""
        newest = view.newest
        deployment, devices = with_margin(_wanted_deployment(wish, view), cluster, wish.margin)
        same_spec = newest is not None and newest.cause.spec_digest == planned_digest(view, wish)
        thing = deployment.model_dump(mode="json", by_alias=True, exclude_none=True, exclude={"status"})
        return Question(
            deployment=thing,
            cluster=devices,
            refused=refused,
            running=newest.epoch.plan if newest and (wish.without or wish.optional) else None,
            model_uri=newest.epoch.plan.model_uri if newest and same_spec else "",
            draft_uri=newest.epoch.plan.speculation.draft_uri if newest and same_spec else "",
            token=await self._token(deployment),
            reason=wish.reason,
            repair=wish.repair,
            only_repair=bool(wish.taken_over),
        )

    async def _token(self, deployment: LLMDeployment) -> str:
        """Raises NotReadyError where the Secret that the spec names is not there."""
        named = deployment.spec.model.token_secret_ref
        if named is None:
            return ""
        where = f"spec.model.tokenSecretRef: the Secret {deployment.namespace}/{named.name}"
        secret = await self._kube.get(SECRETS, deployment.namespace, named.name)
        if secret is None:
            raise NotReadyError(f"{where} is not there; create it")
        try:
            return secret_text(secret, named.key).strip()
        except (KeyError, TypeError, ValueError) as error:
            raise NotReadyError(f"{where} has no text under the key {named.key}; add it") from error

    def _note_failure(self, answer: Answer, wish: MakePlan, asked: Asked, view: View, kept: Kept) -> None:
        deployment = view.deployment
        failure = PlanFailure(
            asked.key, answer.reason, answer.message, view.now, wish=wish.reason, passing=answer.passing
        )
        kept.note_failure(failure)
        log.warning("%s/%s: no plan (%s): %s", deployment.namespace, deployment.name, answer.reason, answer.message)

    async def _renew(self, action: RenewEpoch, view: View, kept: Kept) -> bool:
        """Only if every slot that is to be formed anew answers, if it seems to: one that has just died looks alive for a moment, and could not prepare."""
        newest = view.newest
        assert newest is not None
        record = action.back_to or newest
        if not await kept.links.all_answer(to_be_formed(record.epoch.plan, view.ledger, view.seen)):
            return True
        log.info("%s: epoch %d: %s", view.deployment.name, action.number, action.message)
        cause = replace(
            record.cause,
            reason=NODE_BACK if action.back_to else RENEWED,
            node=newest.cause.node if action.back_to else "",
            planned_in=record.planned_in,
            renewals=action.renewals,
            seconds_to_plan=0.0,
            gain=None,
            noticed=None,
            planned=None,
            weighed=None if action.back_to else kept.weighed,
        )
        await self._create_epoch(view, kept, record.epoch.plan, record.cluster, cause)
        return True

    async def _give_orders(self, terms: OrderTerms, view: View, kept: Kept) -> None:
        if not self._leading():
            raise NotLeadingError("this operator leads no more: nobody is told anything")
        assert view.newest is not None
        await kept.orders.give(kept.links, view.newest.epoch, view.seen, terms)

    async def _record_order(self, action: RecordOrder, view: View, kept: Kept) -> None:
        """With its own number and key, which follow from the epoch that had the order: whoever records it records the same."""
        newest, ordered = view.newest, action.ordered
        assert newest is not None
        log.info("%s: epoch %d was made by a standing order", view.deployment.name, ordered.epoch.number)
        await self._store(view, kept, ordered.epoch, newest.cluster, cause_of(ordered, newest))

    async def _create_epoch(self, view: View, kept: Kept, plan: Plan, cluster: Cluster, cause: Cause) -> None:
        """The Secret first. Of two controllers that create the same epoch, the one whose ConfigMap is there has won."""
        number = 1 + max(highest_epoch(view.ledger, view.seen), view.highest_number, kept.taken_number)
        epoch = Epoch(number, new_secret(), plan, going_on(plan, view.ledger, view.seen))
        await self._store(view, kept, epoch, cluster, cause)
        kept.weighed = None

    async def _store(self, view: View, kept: Kept, epoch: Epoch, cluster: Cluster, cause: Cause) -> None:
        uid, number, plan = view.deployment.metadata.uid, epoch.number, epoch.plan
        own = cause.spec_digest == view.spec_digest
        deployment = view.deployment if own else as_planned(view.deployment, view.newest)
        secret, config_map = record_objects(deployment, epoch, cluster, cause)
        self._dealing.deal(uid, number, claims_of(view.deployment, plan, cluster))
        try:
            if not await create_own(self._kube, view.deployment, secret) and not epoch.reserved:
                log.info(
                    "the key of epoch %d exists already: an earlier attempt ended before its plan was stored", number
                )
                # That attempt may not have known the keys of the same replicas: all are formed anew.
                _, config_map = record_objects(deployment, replace(epoch, formations=()), cluster, cause)
            await self._kube.create(CONFIG_MAPS, config_map)
        except AlreadyExistsError:
            kept.taken_number = number
            self._dealing.take_back(uid)
            raise
        except (RefusedError, NotLeadingError):
            self._dealing.take_back(uid)
            raise
        except BaseException:  # no sure answer: it may be there all the same
            self._dealing.doubt(uid, self._clock.seconds())
            raise
        metrics.EPOCHS.labels(cause.reason).inc()


def _wanted_deployment(wish: MakePlan, view: View) -> LLMDeployment:
    return as_planned(view.deployment, view.newest) if wish.recorded else view.deployment


def _question_of(wish: MakePlan, view: View) -> str:
    """What a plan under way must still be the answer to. Not the inventory, which moves with every pod on a processor's node."""
    repaired = f"{wish.repair}/{','.join(sorted(wish.taken_over))}"
    return f"{planned_digest(view, wish)}/{wish.margin:g}/{wish.optional}/{repaired}"


def _foretell(wish: MakePlan, answer: Answer, kept: Kept) -> bool:
    """Keep what a repair would be until it is wanted; whether that is news."""
    told = Foretold(wish.taken_over, answer.repair) if wish.taken_over and answer.repair else None
    is_news, kept.foretold = kept.foretold != told, told
    return is_news


def _still_asked(asked: Asked, wish: MakePlan, view: View) -> bool:
    """A plan that takes minutes is not begun anew for nodes that may be used again, or that it does not know: only for those
    that it counts on and must do without.
    """
    nodes = {node.name for node in asked.cluster.nodes}
    return asked.question == _question_of(wish, view) and not nodes & wish.without


def _comes_first(action: Action) -> bool:
    """What would be done after it is not said yet: of that, nobody knows whether it is still wanted."""
    return not isinstance(action, SetStatus | Emit | GiveOrders) and not (
        isinstance(action, MakePlan) and action.reason in GOES_ON
    )


def _named(action: Action, view: View) -> str:
    """What is done, in words of the object that it is done to."""
    match action:
        case Apply(manifest=manifest):
            return f"{manifest['kind']} {manifest['metadata']['name']}"
        case MakePlan() | RenewEpoch() | RecordOrder():
            return f"a new epoch of {view.deployment.name}"
        case DeleteStatefulSet(name=name) | DeletePod(name=name):
            return f"the end of {name}"
        case DeleteEpoch(number=number):
            return f"the end of {epoch_name(view.deployment, number)}"
        case SetStatus():
            return f"the status of {view.deployment.name}"
        case _:
            return type(action).__name__
