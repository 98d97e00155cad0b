"""Acceptance: how many of the tokens that were guessed were right, as counted while a deployment served, and kept from run to run.

Counted by leaders, summed by the gateway, kept by `strata up`, read by whoever plans. Knows neither how tokens are guessed nor what that costs.
"""

import zlib
from typing import Self

import msgspec

from strata_planner.contract.plan import Speculation
from strata_planner.contract.values import ContractError, Value, from_json, to_json

RECORD_VERSION = 1
FEWEST_DRAFT_TOKENS = 300  # what fewer drafted tokens tell is not kept, and not believed
HALVING_DRAFT_TOKENS = 20_000  # so many new ones halve the weight of those before
_HALVINGS = 50  # of an interval: to the last bit of a share


class DraftCounts(Value, frozen=True):
    """`verifications` of `draft_tokens`, of which `accepted_tokens` were right, while `tokens` of answers were made in all."""

    verifications: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    tokens: int = 0

    def plus(self, more: "DraftCounts") -> "DraftCounts":
        pairs = zip(msgspec.structs.astuple(self), msgspec.structs.astuple(more), strict=True)
        return DraftCounts(*(one + other for one, other in pairs))

    def since(self, earlier: "DraftCounts") -> "DraftCounts":
        """What has come to it; none of it is below 0, whatever a gateway says."""
        pairs = zip(msgspec.structs.astuple(self), msgspec.structs.astuple(earlier), strict=True)
        return DraftCounts(*(max(0, now - before) for now, before in pairs))

    def times(self, share: float) -> "DraftCounts":
        """Rounded, in the order that they had."""
        return DraftCounts(*(round(count * share) for count in msgspec.structs.astuple(self)))

    @property
    def tells(self) -> bool:
        """Whether there are enough of them to be believed, and they can be."""
        return self.draft_tokens >= FEWEST_DRAFT_TOKENS and self._can_be

    @property
    def _can_be(self) -> bool:
        return 0 <= self.accepted_tokens <= self.draft_tokens and 0 < self.verifications <= self.draft_tokens

    @property
    def mean_drafts(self) -> float:
        """Of a verification."""
        return self.draft_tokens / self.verifications

    @property
    def acceptance(self) -> float:
        """The chance that a draft is right if all before it are: of which `expected_tokens` are what was counted."""
        found, low, high = 1 + self.accepted_tokens / self.verifications, 0.0, 1.0
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            low, high = (middle, high) if expected_tokens(middle, self.mean_drafts) < found else (low, middle)
        return high

    @property
    def guessed(self) -> float:
        """The share of a sequence's steps that verified something; 1 where it cannot be told."""
        steps = self.tokens - self.accepted_tokens
        return min(1.0, self.verifications / steps) if steps > 0 else 1.0


def expected_tokens(acceptance: float, drafts: float) -> float:
    """Of one verification: its own token, and each draft if it and all before it are right, the sum of acceptance^i for i = 0 .. drafts.

    Leviathan et al., Fast Inference from Transformers via Speculative Decoding, arXiv 2211.17192, section 3.1, equation 1. `drafts` may be a mean.
    """
    if acceptance >= 1:
        return drafts + 1.0
    return float((1 - acceptance ** (drafts + 1)) / (1 - acceptance))


class AcceptanceRecord(Value, frozen=True):
    """What was counted of one model under one wish. `model`: what tells it from others; `measured_on`: the day of the newest count, as 2026-01-31;
    `check`: CRC-32 of its own file, with 0 in this place.
    """

    version: int
    model: str
    wish: Speculation
    counts: DraftCounts
    measured_on: str
    check: int = 0

    def encode(self) -> bytes:
        """The bytes of its file: no other bytes are read as this record."""
        plain = msgspec.structs.replace(self, check=0)
        return to_json(msgspec.structs.replace(plain, check=zlib.crc32(to_json(plain)))) + b"\n"

    @classmethod
    def decode(cls, data: bytes | str, model: str, wish: Speculation) -> Self:
        """Raises ContractError for what is damaged, of another version, of another model or wish, or counts that cannot be."""
        found = from_json(data, cls)
        whole = data if isinstance(data, bytes) else data.encode()
        if found.version != RECORD_VERSION or (found.model, found.wish) != (model, wish):
            raise ContractError(f"of version {found.version}, {found.model} and {found.wish}: not what was asked for")
        if found.encode() != whole or not found.counts.tells:
            raise ContractError("its bytes are not those that its check says, or its counts cannot be")
        return found

    def merged(self, newer: DraftCounts, measured_on: str) -> Self:
        """With what was counted since. Old counts fade as new ones come, by half for every `HALVING_DRAFT_TOKENS`."""
        faded = self.counts.times(0.5 ** (newer.draft_tokens / HALVING_DRAFT_TOKENS))
        return msgspec.structs.replace(self, counts=faded.plus(newer), measured_on=measured_on)
