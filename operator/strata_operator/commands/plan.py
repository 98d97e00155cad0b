"""`strata plan`: the plan as a table for people, or as the contract's JSON for programs."""

import sys
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
from rich.console import Console
from rich.text import Text

from strata_operator.api import LLMDeployment
from strata_operator.api.load import read_text
from strata_operator.commands.costs import latency_sources
from strata_operator.commands.foretold import foretold
from strata_operator.commands.inputs import read_question
from strata_operator.commands.profile import profiles_for
from strata_operator.commands.studies import Found, Studies, StudyOptions
from strata_operator.decide.planning import readied_outcome
from strata_operator.errors import InvalidInputError
from strata_operator.local.planning_line import planning_line
from strata_operator.local.run import Progress, interruptible, leave_on_signals, leaving_at_once, log_to
from strata_operator.local.view import FILE_WIDTH, show_plan
from strata_planner.answer.alternatives import with_alternatives
from strata_planner.answer.explain import objective_lines, render_plan
from strata_planner.answer.picture import picture as draw
from strata_planner.answer.unused import explained
from strata_planner.contract.plan import Plan
from strata_planner.contract.values import ContractError
from strata_planner.replan.decision import replan
from strata_planner.replan.table import render_replan
from strata_planner.search.planning import PlanOutcome, PlanRequest, make_plan


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """What the command line was given. `running`: a plan in force, as JSON."""

    deployment: Path
    cluster: Path | None
    picture: Path | None
    running: Path | None
    costs: tuple[str, ...]
    as_json: bool
    measure: bool
    shapes_only: bool
    profile: Path | None = None
    studies: StudyOptions | None = None


def run(options: PlanOptions) -> None:
    """Raises what `commands.errors` knows."""
    log_to(Console(stderr=True))
    progress = Progress()
    progress.doing = "planning"
    leave_on_signals()
    with leaving_at_once(progress):
        _run(options)


def _run(options: PlanOptions) -> None:
    asked_more = options.studies is not None and options.studies.check()
    sources = latency_sources(options.costs)
    running = _read_plan(options.running) if options.running else None
    question = read_question(
        options.deployment, options.cluster, measure=options.measure, shapes_only=options.shapes_only
    )
    profiles = profiles_for(question, options.profile, kept=options.measure)
    request = replace(question.request, latency_sources=(*profiles, *sources))
    studies = Studies(options.studies, question, request) if asked_more and options.studies else None
    request = studies.request if studies else request
    wished = question.deployment
    plan = _show_anew(request, wished, options) if running is None else _show_change(request, running, wished, options)
    found = interruptible(lambda: studies.of(plan)) if studies else None
    better = found.plan if found and found.plan is not plan else None
    if found and better:
        found = replace(found, plan=foretold(better, request, simulated=True))
    if found is not None and not options.as_json:
        _show_studies(found, plan)
    if found and better and running is None:  # one in force is kept as it was decided
        plan = found.plan
    if options.picture is not None:
        _draw(options.picture, plan)
    if options.as_json:
        shown = plan.encode() if found is None else msgspec.json.encode({"plan": plan, **found.as_json()})
        sys.stdout.write(msgspec.json.format(shown, indent=2).decode() + "\n")


def _show_studies(found: Found, plan: Plan) -> None:
    console = Console()
    if not console.is_terminal:
        console.width = FILE_WIDTH
    if found.plan is not plan:
        console.print(Text("a better plan was found on the way; the tables below are beside this one:"))
        console.print(render_plan(found.plan), highlight=False)
    for table in found.tables():
        console.print(table, highlight=False)


def _show_anew(request: PlanRequest, wished: LLMDeployment, options: PlanOptions) -> Plan:
    with planning_line(request, Console(stderr=True), quiet=options.as_json) as line:

        def planned() -> PlanOutcome:
            found = make_plan(request, watch=line.watch)
            line.say(f"looking at alternatives and idle devices: {', '.join(objective_lines(found.plan))}")
            return readied_outcome(wished, request, explained(request, found))

        outcome = interruptible(planned)
    outcome = replace(outcome, plan=foretold(outcome.plan, request, simulated=True))
    if not options.as_json:
        show_plan(outcome, Console())
    return outcome.plan


def _show_change(request: PlanRequest, running: Plan, wished: LLMDeployment, options: PlanOptions) -> Plan:
    with planning_line(request, Console(stderr=True), quiet=options.as_json) as line:
        change = interruptible(lambda: replan(request, running, watch=line.watch, further=with_alternatives))
    plan = change.plan if change.kept else foretold(change.plan, request, simulated=True)
    notes = (change.search.warning,) if change.search and change.search.was_cut else ()
    outcome = readied_outcome(wished, request, PlanOutcome(plan, change.stats, notes))
    if not options.as_json:
        console = Console()
        show_plan(outcome, console)
        console.print(render_replan(change), highlight=False)
    return outcome.plan


def _read_plan(file: Path) -> Plan:
    try:
        return Plan.decode(read_text(file))
    except ContractError as error:
        raise InvalidInputError(f"--running {file}", [f"{error}; give what `strata plan --json` printed"]) from error


def _draw(file: Path, plan: Plan) -> None:
    """Raises InvalidInputError where the file cannot be written."""
    try:
        file.write_text(draw(plan), encoding="utf-8")
    except OSError as error:
        raise InvalidInputError(f"--picture {file}", [f"cannot be written: {error.strerror}"]) from error
