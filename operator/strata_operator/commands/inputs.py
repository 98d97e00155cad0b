"""Reads what the commands are given: the deployment, the cluster and the model's config.json, as a question to the planner."""

import logging
from dataclasses import dataclass, replace
from pathlib import Path

from strata_operator.api import LLMDeployment, load_deployment
from strata_operator.api.load import read_text
from strata_operator.decide.planning import corrected, request_for, with_draft_model
from strata_operator.errors import InvalidInputError
from strata_operator.local.machine import check_threads, this_machine, with_measured_rates, with_threads
from strata_operator.observe.model_files import beside, read_beside, read_model
from strata_planner.errors import ClusterError
from strata_planner.question.cluster import Cluster
from strata_planner.question.request import PlanRequest

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Question:
    """A deployment, the devices of this run (threads filled in), and what the planner is asked."""

    deployment: LLMDeployment
    cluster: Cluster
    request: PlanRequest


def read_question(
    deployment_file: Path, cluster_file: Path | None, *, measure: bool, shapes_only: bool = False
) -> Question:
    """Cheap checks first: both files and the model's config are read before anything is measured. `measure` False: later, if
    at all (`measured`).
    """
    deployment = load_deployment(read_text(deployment_file), source=str(deployment_file))
    given = _read_cluster(cluster_file, to_run_here=measure) if cluster_file else None
    uri = beside(deployment.spec.model.uri, deployment_file)
    model = read_model(uri)
    cluster = with_threads(given or this_machine(deployment.spec.placement.min_stages))
    found = read_beside(uri, model.config)
    small = deployment.spec.runtime.speculation.draft_model
    draft = None if small is None else read_model(beside(small.uri, deployment_file))

    def asked() -> PlanRequest:
        request = request_for(deployment, cluster, model.config, model.uri, for_serving=not shapes_only, beside=found)
        return request if draft is None else with_draft_model(request, draft.config, draft.uri)

    asked().check()
    if measure:
        cluster = with_measured_rates(cluster, asked().workload.concurrency)
    _say_what_is_for_kubernetes(deployment)
    return Question(deployment, cluster, asked())


def measured(question: Question) -> Question:
    """With the rates of this machine's processor. Raises LocalError."""
    cluster = with_measured_rates(question.cluster, question.request.workload.concurrency)
    devices = corrected(question.deployment, cluster)
    return replace(question, cluster=cluster, request=replace(question.request, cluster=devices))


def _read_cluster(file: Path, *, to_run_here: bool) -> Cluster:
    """Raises InvalidInputError with every problem."""
    try:
        cluster = Cluster.from_yaml(read_text(file))
        if to_run_here:
            check_threads(cluster)
    except ClusterError as error:
        raise InvalidInputError(str(file), error.problems) from error
    return cluster


def _say_what_is_for_kubernetes(deployment: LLMDeployment) -> None:
    """Nothing is ignored silently: these fields have no meaning without pods."""
    placement, runtime = deployment.spec.placement, deployment.spec.runtime
    unused = {
        "placement.nodeSelector": placement.node_selector,
        "placement.tolerations": placement.tolerations,
        "runtime.image": runtime.image,
        "model.cache": deployment.spec.model.cache,
        "model.tokenSecretRef": deployment.spec.model.token_secret_ref,
    }
    given = [name for name, value in unused.items() if value]
    if given:
        log.warning("not used without Kubernetes: %s", ", ".join(f"spec.{name}" for name in given))
