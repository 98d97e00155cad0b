"""A stage as the simulator runs it: what a step carries, how long that takes, how it gets to the next stage.

Batches are made by the scheduler; stages by `pricing` from a plan, or by hand from any callable (tables of other systems).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple


class Chunk(NamedTuple):
    """`tokens` consecutive tokens of one prompt that come after `past` ones whose KV is there."""

    tokens: int
    past: int


class Batch(NamedTuple):
    """One step: `decoding` sequences with one new token each, which see `decode_keys` keys together (the new ones
    included), and chunks of prompts. `tokens`: of both. `sampled`: the rows that want logits.
    """

    tokens: int
    sampled: int
    decoding: int
    decode_keys: int
    chunks: tuple[Chunk, ...] = ()


StageSeconds = Callable[[Batch], float]


@dataclass(frozen=True, slots=True)
class Hop:
    """From a stage to the next: tokens take the link one after the other, then each arrives after the latency.

    The last stage's hop leads back to the first and its "tokens" are the sampled ones; rows are all of the step, whose states go back to a head.
    """

    latency_seconds: float = 0.0
    seconds_per_token: float = 0.0
    seconds_per_row: float = 0.0


@dataclass(frozen=True, slots=True)
class StageModel:
    seconds: StageSeconds
    hop: Hop = field(default_factory=Hop)
