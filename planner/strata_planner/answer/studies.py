"""What-ifs, next devices and the front of precisions as people read them: tables."""

from collections.abc import Sequence

from rich.table import Table

from strata_planner.answer.compared import Compared
from strata_planner.answer.front import Width
from strata_planner.answer.next_device import Ranked

_SHOWN = 12  # types of a table of next devices; JSON has all


def what_if_table(base: Compared, rows: Sequence[Compared]) -> Table:
    """A row per change, under the plan itself."""
    table = _table("what if", "devices", "plan", "gain", "tokens/s", "cost of 1M tokens", "because")
    for each in (base, *rows):
        gained = "-" if each is base else _gain(each)
        table.add_row(each.name, _said(table, each), gained, _rate(each), _cost(each), _because(each))
    return table


def next_device_table(rows: Sequence[Ranked]) -> Table:
    """Best gain first."""
    table = _table(
        "next device", "one more", "plan", "gain", "hourlyCost", "gain for hourlyCost 1", "cost of 1M tokens", "because"
    )
    best = min(
        (each for each in rows if each.gain_for_price is not None),
        key=lambda each: -(each.gain_for_price or 0),
        default=None,
    )
    shown = [each for place, each in enumerate(rows) if place < _SHOWN or each.offer.price is not None]
    for each in shown:
        for_price = "-" if each.gain_for_price is None else f"{each.gain_for_price:+.1%}{' (best)' * (each is best)}"
        price = "-" if each.offer.price is None else f"{each.offer.price:g}"
        told = each.compared
        table.add_row(each.offer.type, _said(table, told), _gain(told), price, for_price, _cost(told), _because(told))
    if len(shown) < len(rows):
        _caption(table, f"{len(rows) - len(shown)} more types gain less; --json lists them")
    return table


def front_table(rows: Sequence[Width]) -> Table:
    """Fewest bits first; the chosen plan last, marked."""
    table = _table(
        "precision",
        "bits",
        "plan",
        "beside the plan",
        "tokens/s",
        "quality",
        "best of these for qualityWeight",
        "remark",
    )
    for each in rows:
        told = each.compared
        name = f"* {told.name}" if each.bits is None else told.name
        beside = "-" if each.bits is None else _gain(told)
        table.add_row(name, _said(table, told), beside, _rate(told), _quality(told), _weights(each), each.remark)
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        text = column in {"devices", "one more", "bits", "because", "remark"}
        table.add_column(column, justify="left" if text else "right", overflow="fold")
    return table


def _caption(table: Table, line: str) -> None:
    table.caption = f"{table.caption}\n{line}" if table.caption else line
    table.caption_justify = "left"


def _said(table: Table, each: Compared) -> str:
    """The number alone; what is to be known about it goes below the table."""
    number, _, remark = each.said.partition(", ")
    if remark and f"plan: {remark}" not in str(table.caption or ""):
        _caption(table, f"plan: {remark}")
    return number


def _gain(each: Compared) -> str:
    return "-" if each.gain is None else f"{each.gain:+.1%}"


def _rate(each: Compared) -> str:
    return "-" if each.plan is None else f"{each.plan.prediction.tokens_per_second:.4g}"


def _cost(each: Compared) -> str:
    return "-" if each.cost_per_million_tokens is None else f"{each.cost_per_million_tokens:.4g}"


def _because(each: Compared) -> str:
    return each.reason if each.plan is None else f"bound by {each.plan.prediction.bound_by}"


def _quality(each: Compared) -> str:
    if each.plan is None:
        return "-"
    told = each.plan.prediction
    if told.perplexity_increase is not None:
        return f"perplexity +{told.perplexity_increase:.3g}"
    return f"penalty {told.quality_penalty:.4g}"


def _weights(each: Width) -> str:
    if each.weights is None:
        return "-"
    first, last = each.weights
    return f"{first:.3g} and more" if last == float("inf") else f"{first:.3g} to {last:.3g}"
