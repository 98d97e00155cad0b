"""Which requests may be the reason of failed steps: a pure record that `journal` keeps of each.

A step that fails, or does not end, ends the epoch for all, and only says which requests it carried. All of these are suspects and are tried
again alone: of those that are not the reason each then gets its next token and is forgiven; the one that is fails again
and again, alone, and ends after three failed steps. What failed alone is forgiven after more tokens: on a replica with one stream every loss
would count against it, and three in a long life end nobody.
"""

from dataclasses import dataclass

MOST_FAILED_STEPS = 3
FORGIVEN_TOKENS = 64  # since the last of them


@dataclass(frozen=True, slots=True)
class Record:
    """Failed steps that a request was in: with others since its newest token, and alone since it was last forgiven. `tokens`: since the last of those."""

    in_company: int = 0
    alone: int = 0
    tokens: int = 0

    def failed(self, carried: int) -> "Record":
        """A step that carried so many requests has failed, this one among them."""
        return Record(self.in_company + (carried > 1), self.alone + (carried <= 1))

    def progressed(self) -> "Record":
        """It has a new token: what failed in company was not its doing. What failed alone may have been, for a while."""
        if not self.is_suspect:
            return self
        return Record(0, self.alone, self.tokens + 1) if self.alone and self.tokens + 1 < FORGIVEN_TOKENS else Record()

    @property
    def is_suspect(self) -> bool:
        """It is to be tried alone."""
        return self.in_company + self.alone > 0

    @property
    def is_over(self) -> bool:
        return self.in_company + self.alone >= MOST_FAILED_STEPS
