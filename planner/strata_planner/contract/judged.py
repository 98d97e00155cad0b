"""How good a plan is by the goal's own number, and what is known of better ones. Part of a plan; knows no search and no costs."""

from typing import Literal

from strata_planner.contract.values import Value

SearchEnd = Literal["proved", "settled", "workLimit", "orderLimit", "timeLimit"]


class Stated(Value, frozen=True):
    """The one number that plans of a question are compared by, for people: `value` in `unit`, of which `better` is better. Seconds and costs are above 0."""

    value: float
    unit: str
    better: Literal["more", "less"]

    def said(self, value: float | None = None) -> str:
        """This value, or another in the same unit, with the unit."""
        number = self.value if value is None else value
        return f"{number:.1%} {self.unit}" if self.unit == IN_TIME else f"{number:.4g} {self.unit}"


IN_TIME = "of requests in time"  # a share, 0 to 1


class SearchEnded(Value, frozen=True):
    """Why the search ended; `timeLimit`: the clock cut it or a part of it, and another run may find another plan. `cut_after_seconds`: the limit then.

    `bound`: no plan of this question is better than so much, in the unit of the plan's `objective`; None: unknown.
    """

    ended: SearchEnd
    cut_after_seconds: float | None = None
    bound: float | None = None

    @property
    def was_cut(self) -> bool:
        return self.ended == "timeLimit"

    @property
    def warning(self) -> str:
        """A sentence where the clock cut it, else nothing."""
        if not self.was_cut:
            return ""
        after = "" if self.cut_after_seconds is None else f" after {self.cut_after_seconds:g} s"
        return f"the search was cut by the clock{after}: another run may find another plan"
