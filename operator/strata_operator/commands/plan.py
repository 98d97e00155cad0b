"""`strata plan`: the plan as a table for people, or as the contract's JSON for programs."""

import sys
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
from rich.console import Console

from strata_operator.commands.costs import latency_sources
from strata_operator.commands.inputs import read_question
from strata_operator.errors import InvalidInputError
from strata_operator.local.run import leave_on_signals, log_to
from strata_operator.local.view import show_plan
from strata_planner.alternatives import with_alternatives
from strata_planner.contract.plan import Plan
from strata_planner.picture import picture as draw
from strata_planner.planning import make_plan


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """What the command line was given."""

    deployment: Path
    cluster: Path | None
    picture: Path | None
    costs: tuple[str, ...]
    as_json: bool
    measure: bool
    shapes_only: bool


def run(options: PlanOptions) -> None:
    """Raises what `commands.errors` knows."""
    log_to(Console(stderr=True))
    leave_on_signals()
    sources = latency_sources(options.costs)
    question = read_question(
        options.deployment, options.cluster, measure=options.measure, shapes_only=options.shapes_only
    )
    request = replace(question.request, latency_sources=sources)
    outcome = with_alternatives(request, make_plan(request))
    if options.picture is not None:
        _draw(options.picture, outcome.plan)
    if options.as_json:
        sys.stdout.write(msgspec.json.format(outcome.plan.encode(), indent=2).decode() + "\n")
    else:
        show_plan(outcome, Console())


def _draw(file: Path, plan: Plan) -> None:
    """Raises InvalidInputError where the file cannot be written."""
    try:
        file.write_text(draw(plan), encoding="utf-8")
    except OSError as error:
        raise InvalidInputError(f"--picture {file}", [f"cannot be written: {error.strerror}"]) from error
