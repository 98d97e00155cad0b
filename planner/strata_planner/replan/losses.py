"""What a loss would do: the repair of the plan, taken in milliseconds, beside the fresh plan that a search finds for what is left.

Called by `strata plan --what-if` for changes that take away devices of the plan.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from strata_planner.contract.plan import Plan
from strata_planner.errors import PlannerError
from strata_planner.question.request import PlanRequest
from strata_planner.replan.repair import Repair, Takeover, repair
from strata_planner.search.metric import Metric
from strata_planner.units import human_bytes


@dataclass(frozen=True)
class LossTold:
    """`fresh`: the value of the plan that was searched for, None where there is none; without a repair `reason` says why."""

    name: str
    before: Plan
    repair: Repair | None
    fresh: float | None
    said: str
    reason: str = ""

    @property
    def loss(self) -> float | None:
        """Of the repair against the fresh plan."""
        return None if self.repair is None or self.fresh is None else self.repair.loss_against(self.fresh)

    def as_json(self) -> dict[str, Any]:
        """Camel case, null for what is not known."""
        mended = self.repair
        if mended is None:
            return {"name": self.name, "reason": self.reason}
        return {
            "name": self.name,
            "kind": mended.kind,
            "milliseconds": round(1e3 * mended.seconds, 2),
            "value": mended.value,
            "lossAgainstFresh": self.loss,
            "tokensPerSecond": mended.plan.prediction.tokens_per_second,
            "perplexityIncrease": mended.plan.prediction.perplexity_increase,
            "layersMoved": mended.movement.moved_layers,
            "loadedBytes": mended.movement.loaded_bytes,
            "shadowedBytes": mended.shadowed_bytes,
            "bitsBefore": _bits(self.before),
            "bitsAfter": _bits(mended.plan),
            "lowered": [
                {"replica": each.replica, "layer": each.layer, "before": each.before, "after": each.after}
                for each in mended.lowered
            ],
            "plan": mended.plan,
        }


Asked = tuple[
    str, PlanRequest, float | None
]  # a change's name, the question without its devices, the value of a plan made for that


def told_of_losses(plan: Plan, asked: Sequence[Asked], wishes: Takeover) -> tuple[LossTold, ...]:
    """Of the changes that take away devices of the plan."""
    found: list[LossTold] = []
    for name, request, fresh in asked:
        if not request.cluster.lacks(plan.places):
            continue
        try:
            mended = repair(request, plan, wishes)
        except PlannerError as error:
            found.append(LossTold(name, plan, None, fresh, "-", str(error)))
        else:
            said = Metric.for_request(request).said(mended.value).partition(", ")[0]
            found.append(LossTold(name, plan, mended, fresh, said))
    return tuple(found)


def losses_table(rows: Sequence[LossTold]) -> Table:
    """A row per loss."""
    table = Table(title="repair, before any search", title_justify="left")
    for column in (
        "loss",
        "repair",
        "plan",
        "below a fresh plan",
        "tokens/s",
        "layers moved",
        "read",
        "bits of layers",
        "found in",
    ):
        table.add_column(
            column, justify="left" if column in {"loss", "repair", "bits of layers"} else "right", overflow="fold"
        )
    for each in rows:
        mended = each.repair
        if mended is None:
            table.add_row(each.name, f"none: {each.reason}", *["-"] * 7)
            continue
        table.add_row(
            each.name,
            mended.kind,
            each.said,
            "-" if each.loss is None else f"{each.loss:.1%}",
            f"{mended.plan.prediction.tokens_per_second:.4g}",
            str(mended.movement.moved_layers),
            _read(mended),
            f"{_counted(each.before)} -> {_counted(mended.plan)}" if mended.lowered else "as before",
            f"{1e3 * mended.seconds:.1f} ms",
        )
    return table


def _read(mended: Repair) -> str:
    read = human_bytes(mended.movement.loaded_bytes)
    return f"{read}, {human_bytes(mended.shadowed_bytes)} of it shadowed" if mended.shadowed_bytes else read


def _bits(plan: Plan) -> dict[str, list[int]]:
    """Of each replica's layers, by its number."""
    return {str(each.replica): [bits for stage in each.stages for bits in stage.bits] for each in plan.replicas}


def _counted(plan: Plan) -> str:
    """`64 x 8, 16 x 4`."""
    bits = [each for of in _bits(plan).values() for each in of]
    return ", ".join(f"{bits.count(width)} x {width}" for width in sorted(set(bits), reverse=True))
