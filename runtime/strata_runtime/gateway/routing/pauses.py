"""What losses of leaders and changes of epoch cost those whose answers run: who waited, for how long, and what was computed again for them.

Pure, driven by `dispatcher`, which passes times in. The account of an epoch is told once its leaders are there and nobody waits any more: until then it
could still grow.
"""

from dataclasses import dataclass

import msgspec

from strata_planner.contract.control import EpochChange
from strata_planner.contract.frames import TokenEvent


@dataclass(frozen=True, slots=True)
class Arrival:
    """A token that has come for a held request. `at`: seconds of the same clock as `Pauses.hold` has; `moment`: since 1970; `known`: tokens of the prompt and
    of the answer that were known before it.
    """

    at: float
    moment: float
    known: int
    event: TokenEvent


KEPT = 8  # who controls may not have read the one before when the next is told


class Pauses:
    """`told`: of the last epochs whose changes are over, oldest first."""

    def __init__(self) -> None:
        self.told: tuple[EpochChange, ...] = ()
        self._waiting: dict[str, float | None] = {}  # held requests -> when their clients got the token before
        self._account = EpochChange(0)
        self._epochs: list[int] = []  # that began since the last account was closed

    def start_epoch(self, epoch: int) -> None:
        """Those who wait already wait for this one. One that comes before the last change is over prolongs that: the account stays that of the first."""
        self._epochs.append(epoch)

    def hold(self, request_id: str, last_at: float | None) -> None:
        """No leader has it. `last_at`: when its client got a token last; None: it has none yet."""
        if request_id not in self._waiting:
            self._waiting[request_id] = last_at
            self._add(held=1)

    def resume(self, request_id: str, arrival: Arrival) -> float | None:
        """A token of it has come. Returns how long its client waited since the one before; None where it was not held, or this is its first."""
        if request_id not in self._waiting:
            return None
        before = self._waiting.pop(request_id)
        self._account = msgspec.structs.replace(self._account, resumed_at=self._account.resumed_at or arrival.moment)
        if before is None:
            return None
        pause, event = arrival.at - before, arrival.event
        self._add(recomputed_tokens=max(0, arrival.known - 1 - event.found), refilled_tokens=event.refilled)
        self._account = msgspec.structs.replace(self._account, pause_seconds=max(self._account.pause_seconds, pause))
        return pause

    def end(self, request_id: str, *, is_lost: bool) -> bool:
        """It is over, whoever ended it. `is_lost`: not by its client. Returns whether it was held, and so lost by that."""
        if request_id not in self._waiting:
            return False
        del self._waiting[request_id]
        self._add(lost=int(is_lost))
        return is_lost

    def settle(self, *, are_leaders_there: bool) -> bool:
        """Close the account if nobody waits. Returns whether there is news: those who came back to the leader they had are of no epoch's change."""
        if self._waiting or (self._epochs and not are_leaders_there):
            return False
        account, self._account = self._account, EpochChange(0)
        epochs, self._epochs = self._epochs, []
        if not epochs:
            return False
        first, *others = epochs
        over = (msgspec.structs.replace(account, epoch=first), *(EpochChange(epoch) for epoch in others))
        self.told = (*self.told, *over)[-KEPT:]
        return True

    def _add(self, **counts: int) -> None:
        more = {name: getattr(self._account, name) + count for name, count in counts.items()}
        self._account = msgspec.structs.replace(self._account, **more)
