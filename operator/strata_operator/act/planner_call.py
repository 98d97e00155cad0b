"""The operator's call of the planner: reads the model's config, plans in a thread, names what went wrong for status."""

import asyncio

from strata_operator.api import LLMDeployment
from strata_operator.decide.planning import request_for
from strata_operator.errors import InvalidInputError, NotReadyError, OperatorError
from strata_operator.observe.model_files import read_beside, read_config
from strata_planner.answer.alternatives import with_alternatives
from strata_planner.contract.architectures import UnsupportedModelError
from strata_planner.contract.plan import Plan
from strata_planner.errors import InfeasibleError, InputError, PlannerError
from strata_planner.question.cluster import Cluster
from strata_planner.replan.decision import ReplanWishes, replan
from strata_planner.search.planning import PlanRequest, make_plan


class CannotPlanError(OperatorError):
    """There is no plan. `reason` in CamelCase for status; `passing`: trying again may help although nothing changes."""

    def __init__(self, reason: str, message: str, *, passing: bool = False) -> None:
        self.reason = reason
        self.passing = passing
        super().__init__(message)


async def plan_now(
    deployment: LLMDeployment, cluster: Cluster, refused: tuple[str, ...], running: Plan | None = None
) -> Plan:
    """Raises CannotPlanError. `refused`: why nodes were left out, for its message. `running`: what devices hold by now; of
    plans about as good the one that moves least is taken.
    """
    if not cluster.nodes:
        raise CannotPlanError("NoDevices", "; ".join(("no node has a device that may be used", *refused)))
    try:
        config = await asyncio.to_thread(read_config, deployment.spec.model.uri)
        found = await asyncio.to_thread(read_beside, deployment.spec.model.uri, config)
        request = request_for(deployment, cluster, config, beside=found)
        return await asyncio.to_thread(_plan, request, running, deployment.spec.replanning.min_gain)
    except InfeasibleError as error:
        raise CannotPlanError("Infeasible", "; ".join((str(error), *refused))) from error
    except (InputError, UnsupportedModelError, InvalidInputError) as error:
        raise CannotPlanError("InvalidInput", str(error)) from error
    except NotReadyError as error:
        raise CannotPlanError("ModelUnavailable", str(error), passing=True) from error
    except PlannerError as error:
        raise CannotPlanError("NoPlanInTime", str(error)) from error


def _plan(request: PlanRequest, running: Plan | None, min_gain: float) -> Plan:
    """The running one where no other is enough better. A layout is planned from scratch, and compared by what it lets through."""
    if running is None:
        return with_alternatives(request, make_plan(request)).plan
    if request.layout is None:
        return replan(request, running, ReplanWishes(min_gain=min_gain)).plan
    plan = make_plan(request).plan
    gone = any(request.cluster.group(stage.places) is None for stage in running.stages)
    gains = plan.prediction.tokens_per_second >= (1 + min_gain) * running.prediction.tokens_per_second
    return plan if gone or gains else running
