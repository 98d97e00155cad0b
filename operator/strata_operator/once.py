"""Working something out once of each value: found again by being the same object, as comparing two values costs as much as the work itself.

For values that nobody changes: what the stock hands out, and what was read of it. Knows nothing of them.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, Generic, TypeVar

KNOWN = 4096  # values whose results are kept

Argument = TypeVar("Argument")
Result = TypeVar("Result")


class Same(Generic[Argument]):
    """Of a value; equal to itself alone."""

    __slots__ = ("value",)

    def __init__(self, value: Argument) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def once_of_each(work: Callable[[Argument], Result]) -> Callable[[Argument], Result]:
    """The same function, which keeps the results of the last KNOWN values, and these values with them."""

    @lru_cache(KNOWN)
    def worked_out(same: Same[Any]) -> Result:
        return work(same.value)

    return lambda value: worked_out(Same(value))
