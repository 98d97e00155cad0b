"""`strata up`: plans a deployment and runs it on this machine until it is told to stop."""

import contextlib
import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from rich.console import Console

from strata_operator.api import LLMDeployment
from strata_operator.api.load import read_text
from strata_operator.commands.foretold import foretold
from strata_operator.commands.inputs import Question, measured, read_question
from strata_operator.commands.profile import profiles_for
from strata_operator.decide.planning import order_terms_of, readied_outcome, shadow_bytes_of, takeover_of
from strata_operator.errors import InvalidInputError
from strata_operator.local import launcher as launching
from strata_operator.local.acceptance import acceptance_kept
from strata_operator.local.deployment import Begun, LocalDeployment, LocalOptions, Programs
from strata_operator.local.machine import (
    check_threads,
    divisions_of_slots,
    free_memory_bytes,
    gpu_count,
    threads_of_slots,
)
from strata_operator.local.mending import Mender
from strata_operator.local.phases import Phases, phases_of_processes, phases_table
from strata_operator.local.planning_line import planning_line
from strata_operator.local.ports import check_port, free_port
from strata_operator.local.preflight import (
    Check,
    PreflightError,
    check_driver,
    check_memory,
    check_shards,
    failures,
    runtime_check,
)
from strata_operator.local.record import claimed, recorded
from strata_operator.local.run import (
    Progress,
    interruptible,
    leave_on_signals,
    leaving_at_once,
    log_folder,
    log_to,
    run_until_stopped,
    serve,
)
from strata_operator.local.view import show_plan
from strata_operator.observe.model_files import local_folder
from strata_operator.render.gateway import page_flags
from strata_planner.answer.alternatives import with_alternatives
from strata_planner.contract.phases import age_seconds
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
    check: bool = False
    programs: Programs = field(default_factory=Programs)
    verify: bool = True
    verbose: bool = False


def run(options: UpOptions) -> None:
    """Returns when stopped by a signal while it served; raises SystemExit for one that came before, and what `commands.errors`
    knows. Nothing is left running in any case.
    """
    console = Console(stderr=True)
    log_to(console)
    progress = Progress()
    phases = Phases("imports of this command", age_seconds())
    phases.enter("files and checks")
    leave_on_signals()
    with leaving_at_once(progress), contextlib.ExitStack() as held:
        _run(options, console, Course(progress, phases, held))


@dataclass(frozen=True, slots=True)
class Course:
    """What goes along with a run: what is being done, how long it takes, and what ends with it."""

    progress: Progress
    phases: Phases
    held: contextlib.ExitStack


def _run(options: UpOptions, console: Console, course: Course) -> None:
    progress, held = course.progress, course.held
    port = Check("port", lambda: check_port(options.host, options.port))
    try:
        question = read_question(options.file, options.cluster, measure=False)
    except Exception as error:
        for sentence in port.failures():  # needs no file: told with what is wrong in them
            error.add_note(sentence)
        raise
    if (wanted := question.deployment.spec.gateway.replicas) > 1:
        console.print(f"spec.gateway.replicas: {wanted} are for Kubernetes; here one gateway listens at the port")
    tokenizer = held.enter_context(runtime_check(question.request.model_uri))
    if failed := failures([port, *_checks(options, question, held)]):
        raise PreflightError([*failed, *tokenizer.failures()])
    course.phases.enter("rates of the processor")
    progress.doing = "measuring the processor"  # which says so itself, where there is something to measure
    question = measured(question)
    profiles = profiles_for(question, options.profile, kept=True)
    request = replace(question.request, latency_sources=profiles)
    free_bytes = free_memory_bytes()
    launcher = None
    if not options.check:  # its imports take longer than planning; what is measured is measured before they begin
        logs = held.enter_context(log_folder(options.logs))
        launcher = held.enter_context(launching.begun(logs / launching.LAUNCHER_LOG, options.programs.launcher))
    course.phases.enter("planning")
    progress.enter(f"planning, {request.time_limit_seconds:g} s at most")
    with planning_line(request, console) as line:
        outcome = interruptible(lambda: with_alternatives(request, make_plan(request, watch=line.watch)))
    has_rate = (
        request.objective.requests_per_second is not None
    )  # nobody waits for a simulation who has not asked for it
    outcome = replace(outcome, plan=foretold(outcome.plan, request, simulated=has_rate))
    outcome = readied_outcome(question.deployment, request, outcome)
    show_plan(outcome, Console())
    course.phases.enter("tokenizer and memory")
    progress.enter("looking at the tokenizer and at free memory")
    memory = Check("memory", lambda: check_memory(outcome.plan, question.cluster, free_bytes))
    if failed := failures([tokenizer, memory]):
        raise PreflightError(failed)
    if launcher is None:
        sys.stdout.write("checked: everything that can be told before loading is in order\n")
        return
    local = local_options(options, question, outcome.plan, logs)
    wished = question.deployment
    mender = Mender(
        request,
        takeover_of(wished),
        wished.spec.replanning.min_gain,
        shadow_bytes_of(wished),
        orders=wished.spec.replanning.takeover.wants_orders,
    )
    local = replace(local, mender=mender, orders=order_terms_of(wished))

    def tell() -> None:
        if options.verbose:
            console.print(phases_table(course.phases.ended, phases_of_processes(logs)))

    _serve(partial(serve, outcome.plan, local, console, Begun(launcher, course.phases)), progress, tell)


def _serve(
    start: Callable[[], AbstractAsyncContextManager[LocalDeployment]], progress: Progress, tell: Callable[[], None]
) -> None:
    async def body() -> None:
        progress.enter("starting the processes and loading the model")
        async with start() as deployment:
            local, plan = deployment.options, deployment.plan
            tell()
            with recorded(local.served_model_name, plan, deployment.slot_endpoints):
                progress.serving = True
                sys.stdout.write(f"ready: {local.url}\n")
                sys.stdout.flush()
                async with acceptance_kept(plan, lambda: deployment.gateway_status):
                    await deployment.supervise()

    run_until_stopped(body, progress)


def _checks(options: UpOptions, question: Question, held: contextlib.ExitStack) -> list[Check]:
    """What can be told before anything is measured. The name stays claimed as long as `held` is."""
    cluster, wish = question.cluster, question.request.speculation
    uris = (question.request.model_uri, wish.draft_uri)
    folders = [local_folder(uri) for uri in uris if uri.startswith("file://")]
    return [
        Check("name", lambda: held.enter_context(claimed(question.deployment.name))),
        Check("logs", lambda: _check_logs(options.logs)),
        Check("keys", lambda: _check_keys(options, question.deployment)),
        *(Check("shards", partial(check_shards, folder)) for folder in folders),
        Check("driver", lambda: check_driver(cluster, gpu_count()) if options.cluster else None),
        Check("threads", lambda: check_threads(cluster)),
    ]


def local_options(options: UpOptions, question: Question, plan: Plan, logs: Path) -> LocalOptions:
    return LocalOptions(
        served_model_name=question.deployment.name,
        logs=logs,
        host=options.host,
        port=options.port or free_port(options.host),
        api_keys_file=options.api_keys_file,
        page_flags=page_flags(question.deployment.spec.gateway),
        prepare_timeout_seconds=question.deployment.spec.replanning.prepare_timeout_seconds,
        step_timeout_seconds=question.deployment.spec.runtime.step_timeout_seconds,
        threads=threads_of_slots(plan, question.cluster),
        divisions=divisions_of_slots(plan, question.cluster),
        verify=options.verify,
        programs=options.programs,
    )


def _check_logs(wanted: Path | None) -> None:
    with log_folder(wanted):
        pass


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
