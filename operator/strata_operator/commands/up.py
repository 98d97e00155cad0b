"""`strata up`: plans a deployment and runs it on this machine until it is told to stop."""

import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.console import Console

from strata_operator.api import LLMDeployment
from strata_operator.commands.inputs import Question, read_question, read_text
from strata_operator.commands.profile import profiles_for
from strata_operator.errors import InvalidInputError
from strata_operator.local.deployment import LocalOptions, Programs
from strata_operator.local.machine import threads_of_slots
from strata_operator.local.ports import check_port, free_port
from strata_operator.local.record import recorded
from strata_operator.local.run import leave_on_signals, log_folder, log_to, run_until_stopped, serve
from strata_operator.local.view import show_plan
from strata_planner.contract.plan import Plan
from strata_planner.search.planning import make_plan


@dataclass(frozen=True, slots=True)
class UpOptions:
    """The flags of `strata up`."""

    file: Path
    cluster: Path | None
    host: str
    port: int
    api_keys_file: Path | None
    logs: Path | None
    profile: Path | None = None
    programs: Programs = field(default_factory=Programs)


def run(options: UpOptions) -> None:
    """Returns when stopped by a signal. Raises what `commands.errors` knows; nothing is left running then either."""
    console = Console(stderr=True)
    log_to(console)
    leave_on_signals()
    check_port(options.host, options.port)
    question = read_question(options.file, options.cluster, measure=True)
    _check_keys(options, question.deployment)
    profiles = profiles_for(question, options.profile, kept=True)
    outcome = make_plan(replace(question.request, latency_sources=profiles))
    show_plan(outcome, Console())
    with log_folder(options.logs) as logs:
        local = local_options(options, question, outcome.plan, logs)

        async def body() -> None:
            async with serve(outcome.plan, local, console) as deployment:
                with recorded(local.served_model_name, outcome.plan, deployment.slot_endpoints):
                    sys.stdout.write(f"ready: {local.url}\n")
                    sys.stdout.flush()
                    await deployment.supervise()

        run_until_stopped(body)


def local_options(options: UpOptions, question: Question, plan: Plan, logs: Path) -> LocalOptions:
    return LocalOptions(
        served_model_name=question.deployment.name,
        logs=logs,
        host=options.host,
        port=options.port or free_port(options.host),
        api_keys_file=options.api_keys_file,
        prepare_timeout_seconds=question.deployment.spec.replanning.prepare_timeout_seconds,
        threads=threads_of_slots(plan, question.cluster),
        programs=options.programs,
    )


def _check_keys(options: UpOptions, deployment: LLMDeployment) -> None:
    """Keys that the object asks for are never dropped silently."""
    wanted = deployment.spec.gateway.api_keys_secret_ref
    if wanted and not options.api_keys_file:
        raise InvalidInputError(
            str(options.file),
            [f"spec.gateway.apiKeysSecretRef: {wanted.name} lives in Kubernetes; here use --api-keys-file FILE"],
        )
    if options.api_keys_file:
        read_text(options.api_keys_file)
