"""The operator's question to the planner and its answer, as values that pass between processes; `answer_to` answers.

Runs in a process of its own (plan_worker): a tenant's model and wishes decide how long it takes and what memory it needs.
Whatever goes wrong is an answer too, with a reason for status; `passing`: asking again may help although nothing changes.
"""

import logging
from typing import Any

import msgspec

from strata_operator.api import LLMDeployment, deployment_from_object
from strata_operator.decide.planning import readied, request_for, takeover_of, with_draft_model
from strata_operator.errors import InvalidInputError, NotReadyError
from strata_operator.observe.model_files import check_shards, read_beside, read_model
from strata_planner.answer.alternatives import with_alternatives
from strata_planner.answer.bounded import with_bound
from strata_planner.contract.architectures import UnsupportedModelError
from strata_planner.contract.plan import Plan
from strata_planner.contract.values import Value
from strata_planner.errors import InfeasibleError, InputError, PlannerError
from strata_planner.question.cluster import Cluster
from strata_planner.replan.decision import ReplanWishes, no_further, replan
from strata_planner.replan.repair import Repair, RepairNote, repair
from strata_planner.search.planning import PlanRequest, make_plan

log = logging.getLogger(__name__)


class Question(Value, frozen=True):
    """`deployment`: the Kubernetes object. `model_uri`, `draft_uri`: where the models are read, if not as in its spec. `token`: for the hub.
    `refused`: why nodes were left out, for the answer's message. `running`: what devices hold by now; of plans about as good the
    one that moves least is taken. `time_limit_seconds`: the administrator's, over the deployment's own.
    """

    deployment: dict[str, Any]
    cluster: Cluster
    refused: tuple[str, ...] = ()
    running: Plan | None = None
    model_uri: str = ""
    token: str = ""
    time_limit_seconds: float = 3600.0
    reason: str = ""  # why it is asked, in CamelCase: for logs
    draft_uri: str = ""
    repair: bool = False  # of `running`, before any search
    only_repair: bool = False  # nothing is searched for where there is none
    hurried: bool = False  # others wait for their plans: a short search, and nothing to compare with


class Answer(Value, frozen=True):
    """A plan, or why there is none: `reason` in CamelCase and a message, both for status."""

    plan: Plan | None = None
    reason: str = ""
    message: str = ""
    passing: bool = False
    repair: RepairNote | None = None  # the plan is a repair
    gain: float | None = None  # of the best plan that was found over the running one, as a share
    hurried: bool = False  # a better one may well be there


def answer_to(question: Question) -> Answer:
    """Never raises: what nobody foresaw is an answer like every other."""
    if not question.cluster.nodes:
        return Answer(None, "NoDevices", "; ".join(("no node has a device that may be used", *question.refused)))
    try:
        return _plan(question)
    except InfeasibleError as error:
        return Answer(None, "Infeasible", "; ".join((str(error), *question.refused)))
    except Exception as error:  # noqa: BLE001  said in status
        return _failure(error)


def _failure(error: Exception) -> Answer:
    match error:
        case InputError() | UnsupportedModelError() | InvalidInputError():
            return Answer(None, "InvalidInput", str(error))
        case NotReadyError():
            return Answer(None, "ModelUnavailable", str(error), passing=True)
        case PlannerError():
            return Answer(None, "NoPlanInTime", str(error))
        case MemoryError():
            return Answer(None, "PlanTooLarge", f"planning needs more memory than the operator gives it: {TOO_LARGE}")
        case _:
            return Answer(None, "PlannerFault", f"planning failed: {type(error).__name__}: {error}", passing=True)


TOO_LARGE = (
    "raise planning.memoryMiB of the chart, or narrow the search by placement.maxStages or placement.nodeSelector"
)


def _plan(question: Question) -> Answer:
    deployment = deployment_from_object(question.deployment)
    limit = int(min(deployment.spec.planning.time_limit_seconds, question.time_limit_seconds))
    planning = deployment.spec.planning.model_copy(update={"time_limit_seconds": max(1, limit)})
    deployment = deployment.model_copy(update={"spec": deployment.spec.model_copy(update={"planning": planning})})
    uri = question.model_uri or deployment.spec.model.uri
    model = read_model(uri, token=question.token)
    check_shards(uri)
    found = read_beside(uri, model.config)
    request = request_for(deployment, question.cluster, model.config, model.uri, beside=found)
    if (small := deployment.spec.runtime.speculation.draft_model) is not None:
        draft = read_model(question.draft_uri or small.uri, token=question.token)
        check_shards(draft.uri)
        request = with_draft_model(request, draft.config, draft.uri)
    if question.repair and question.running and (mended := _repaired(request, question.running, deployment)):
        return Answer(mended.plan, repair=mended.note)
    if question.only_repair:
        return Answer(None, "NoRepair", "the slots that are left cannot take over")
    if question.hurried and question.running is None:
        return Answer(make_plan(request, quick=True, proven=False).plan, hurried=True)
    answer = _best(request, question, deployment.spec.replanning.min_gain)
    return msgspec.structs.replace(answer, plan=_readied(request, answer.plan, deployment)) if answer.plan else answer


def _readied(request: PlanRequest, plan: Plan, deployment: LLMDeployment) -> Plan:
    """With what is kept ready for losses, also where the plan in force stays: a repair has only what was left of the plan before."""
    found = readied(deployment, request, plan)
    for note in found.notes:
        log.info("%s: %s", deployment.name, note)
    return found.plan


def _repaired(request: PlanRequest, running: Plan, deployment: LLMDeployment) -> Repair | None:
    """None where only a search helps; the log says why."""
    try:
        return repair(request, running, takeover_of(deployment))
    except PlannerError as error:
        log.warning("%s is planned anew, not repaired: %s", deployment.name, error)
        return None


def _best(request: PlanRequest, question: Question, min_gain: float) -> Answer:
    """The running one where no other is enough better. Behind a loss somebody waits: nothing is looked at that the search has not found."""
    running = question.running
    if running is None:
        return Answer(with_bound(request, with_alternatives(request, make_plan(request)).plan))
    further = no_further if question.repair else with_alternatives
    found = replan(request, running, ReplanWishes(min_gain=min_gain), further=further)
    return Answer(found.plan, gain=found.gained)
