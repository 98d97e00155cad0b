"""What `strata plan` looks at beside its plan: other devices (`--what-if`), the next one to have (`--next-device`), precisions (`--front`).

Reads the options, changes the cluster and asks the planner; a bar on stderr says how far it is.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from strata_operator.commands.inputs import Question
from strata_operator.decide.planning import compute_type_for, corrected, takeover_of
from strata_operator.errors import InvalidInputError
from strata_planner.answer.compared import Compared, Told, compared
from strata_planner.answer.front import Width, front
from strata_planner.answer.next_device import THOROUGH, Offer, Ranked, next_device
from strata_planner.answer.studies import front_table, next_device_table, what_if_table
from strata_planner.answer.what_if import what_if
from strata_planner.contract.plan import Plan
from strata_planner.errors import ClusterError
from strata_planner.question.catalogue import CPU, catalogue
from strata_planner.question.changes import Change, changed, parse_change, parse_prices, priced
from strata_planner.question.cluster import Cluster
from strata_planner.question.request import PlanRequest
from strata_planner.replan.losses import LossTold, losses_table, told_of_losses
from strata_planner.search.metric import value_of_plan

S = TypeVar("S")
T = TypeVar("T")

AS_IT_IS = "as it is"
ALL = "all"  # types of devices
_ROUNDS = 3  # times that a better plan may be found on the way


@dataclass(frozen=True, slots=True)
class StudyOptions:
    """`next_device`: types, or ALL of them; `on`: the node that it is for, a new one where it is None. `prices`: as written, TYPE=AMOUNT."""

    what_if: tuple[str, ...] = ()
    next_device: tuple[str, ...] = ()
    on: str | None = None
    prices: tuple[str, ...] = ()
    front: bool = False

    def check(self) -> bool:
        """Whether anything is asked for. Raises InvalidInputError for options that would say nothing."""
        problems = []
        if self.prices and not (self.what_if or self.next_device):
            problems.append(
                "--price says nothing by itself: add --what-if or --next-device, or give hourlyCost in the cluster file"
            )
        if self.on is not None and not self.next_device:
            problems.append(f"--on {self.on} says nothing without --next-device: add it")
        if problems:
            raise InvalidInputError("strata plan", problems)
        return bool(self.what_if or self.next_device or self.front)


@dataclass(frozen=True, slots=True)
class Found:
    """`plan`: the one that was asked about, or a better one that was found on the way."""

    plan: Plan
    base: Compared
    what_if: tuple[Compared, ...] = ()
    losses: tuple[LossTold, ...] = ()
    next_device: tuple[Ranked, ...] = ()
    front: tuple[Width, ...] = ()

    def tables(self) -> Iterator[Table]:
        if self.what_if:
            yield what_if_table(self.base, self.what_if)
        if self.losses:
            yield losses_table(self.losses)
        if self.next_device:
            yield next_device_table(self.next_device)
        if self.front:
            yield front_table(self.front)

    def as_json(self) -> dict[str, Any]:
        """Beside the plan."""
        return {
            "asItIs": self.base.as_json(),
            "whatIf": [each.as_json() for each in self.what_if],
            "repairs": [each.as_json() for each in self.losses],
            "nextDevice": [each.as_json() for each in self.next_device],
            "front": [each.as_json() for each in self.front],
        }


class Studies:
    """Checked when it is made, before anything is planned: raises InvalidInputError with every problem of the options."""

    def __init__(self, options: StudyOptions, question: Question, request: PlanRequest) -> None:
        self._options, self._question = options, question
        self._prices = _checked("--price", lambda: parse_prices(options.prices, question.cluster))
        self.request = self._asked(request, question.cluster)
        clusters = _each_checked("--what-if", options.what_if, self._changed)
        self._variants = [
            (text, self._asked(request, cluster)) for text, cluster in zip(options.what_if, clusters, strict=True)
        ]
        self._offers = _each_checked("--next-device", self._types(), lambda type_: self._offer(request, type_))

    def of(self, plan: Plan) -> Found:
        """Beside this plan, or beside a better one that a search finds on the way: then everything is looked at again."""
        found = self._beside(plan)
        for _ in range(_ROUNDS):
            if found.plan is plan:
                break
            plan = found.plan
            found = self._beside(plan)
        return found

    def _beside(self, plan: Plan) -> Found:
        best, widths, rows, ranked = plan, list[Width](), list[Compared](), list[Ranked]()
        if self._options.front:
            with _bar("precisions", None) as told:
                best, widths = front(self.request, best, told)
        if self._variants:
            with _bar("what if", len(self._variants)) as told:
                best, rows = what_if(self.request, best, self._variants, told)
        if self._offers:
            with _bar("next device", len(self._offers) + min(len(self._offers), 2 * THOROUGH)) as told:
                best, ranked = next_device(self.request, best, self._offers, told)
        base = compared(AS_IT_IS, self.request, best, value_of_plan(self.request, best))
        asked = [(name, asked, row.value) for (name, asked), row in zip(self._variants, rows, strict=True)]
        lost = told_of_losses(best, asked, takeover_of(self._question.deployment))
        return Found(best, base, tuple(rows), lost, tuple(ranked), tuple(widths))

    def _asked(self, request: PlanRequest, cluster: Cluster) -> PlanRequest:
        """The question about another cluster, which the deployment corrects like its own."""
        deployment = self._question.deployment
        devices = priced(corrected(deployment, cluster), self._prices)
        compute_type = deployment.spec.runtime.compute_type or compute_type_for(devices)
        return replace(request, cluster=devices, compute_type=compute_type)

    def _changed(self, text: str) -> Cluster:
        return changed(self._question.cluster, parse_change(text))

    def _types(self) -> list[str]:
        """Those that are named; of all that have rates a processor only where one is planned for."""
        if ALL not in self._options.next_device:
            return list(dict.fromkeys(self._options.next_device))
        own = {device.type for node in self._question.cluster.nodes for device in node.devices}
        return [*catalogue().devices, *self._question.cluster.profiles, *([CPU] if CPU in own else [])]

    def _offer(self, request: PlanRequest, type_: str) -> Offer:
        node = self._options.on or _unused_name(self._question.cluster)
        one_more = Change(f"+1x{type_}@{node}", node, type_, 1)
        asked = self._asked(request, changed(self._question.cluster, one_more))
        added = [device for each in asked.cluster.nodes if each.name == node for device in each.devices]
        price = next((device.hourly_cost for device in added if device.type == type_), None)
        return Offer(type_, asked, price)


def _unused_name(cluster: Cluster) -> str:
    names = {node.name for node in cluster.nodes}
    return next(name for name in ("new", *(f"new-{number}" for number in range(len(names) + 1))) if name not in names)


def _checked(option: str, read: Callable[[], T]) -> T:
    try:
        return read()
    except ClusterError as error:
        raise InvalidInputError(option, list(error.problems)) from error


def _each_checked(option: str, texts: Sequence[S], read: Callable[[S], T]) -> list[T]:
    found, problems = [], list[str]()
    for text in texts:
        try:
            found.append(read(text))
        except ClusterError as error:
            problems += error.problems
    if problems:
        raise InvalidInputError(option, problems)
    return found


@contextmanager
def _bar(what: str, total: int | None) -> Iterator[Told]:
    """On stderr while it is a terminal; it is gone when everything is looked at."""
    console = Console(stderr=True)
    columns = (TextColumn(f"{what}: {{task.description}}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=total, completed=-1)

        def told(name: str) -> None:
            progress.update(task, advance=1, description=name)

        yield told
