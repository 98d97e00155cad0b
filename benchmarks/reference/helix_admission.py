"""Which requests a pipeline of ours runs in Helix's simulator: those that our scheduler would admit, by the KV that is in use.

Called by `helix_feeder`. The rules of the runtime's scheduler/scheduler.py, in tokens, of which the artifact's KV is made, where ours has
pages: first come first served while a prompt fits and `WATERMARK` of the KV stays free, as many prompts under way as steps carry that are
(`most_prompts`); where room ends, the last to come is computed again, prompt and answer. Of a request they see its prompt and the tokens
that came back, never how long its answer will be.

One thing differs: who has to go leaves when its token is back, for the artifact's nodes forget nothing that is on its way. Until then all
others go on, so that they are asked that much earlier.
"""

from bisect import bisect, insort
from collections.abc import Iterable
from dataclasses import dataclass

from strata_planner.contract.steps import FEWEST_PROMPTS, WATERMARK

AHEAD = 2  # tokens of each that must fit: the one on its way, and the one after it until who was asked to leave is back


def prompts_under_way(stages: int) -> int:
    """As many steps as stages are under way in ours, and each takes so many prompts if they are there."""
    return stages * FEWEST_PROMPTS


@dataclass
class Sequence:
    """Tokens. `rank`: in the order of arrival. `answer`: how many it will produce, which only the simulator asks for."""

    rank: int
    prompt: int
    answer: int
    produced: int = 0
    decodes: bool = False
    leaves: bool = False

    @property
    def tokens(self) -> int:
        return self.prompt + self.produced


class Admission:
    """`capacity`: tokens that the tightest stage holds. `most_prompts`: on their way at once. `longest`: a prompt that every stage takes.
    `lengths`: prompt and answer of all requests, which wait from the beginning.
    """

    def __init__(self, capacity: int, most_prompts: int, longest: int, lengths: Iterable[tuple[int, int]]) -> None:
        self._capacity = capacity
        self._most_prompts = most_prompts
        self._longest = longest
        self._coming = (Sequence(rank, *each) for rank, each in enumerate(lengths))
        self._waiting: list[Sequence] = []  # by rank: preempted ones, and the next that has come
        self._running: list[Sequence] = []  # by rank
        self._prompts = 0  # on their way
        self._leaving = 0  # tokens of those that were asked to
        self.held = 0  # tokens of the running, those of prompts that are not computed yet included
        self.preempted = 0

    @property
    def running(self) -> int:
        return len(self._running)

    def admit(self) -> list[Sequence]:
        """Those that begin now, with all their tokens as a prompt."""
        begun = []
        while (first := self._first()) and (not self._running or self._fits(first)):
            begun.append(self._waiting.pop(0))
            insort(self._running, first, key=_rank)
            self.held += first.tokens
            self._prompts += 1
        return begun

    def goes_on(self, sequence: Sequence) -> bool:
        """Whether it does, now that its prompt or a token of it is back. Where not, it waits again."""
        self._count(sequence)
        self._make_room()
        self._prompts -= not sequence.decodes
        sequence.decodes = True  # now: whose prompt has just come back is asked for room with its first token
        if not sequence.leaves:
            return True
        self._leaving -= sequence.tokens
        self._stop(sequence)
        self.preempted += 1
        sequence.decodes = sequence.leaves = False
        insort(self._waiting, sequence, key=_rank)
        return False

    def end(self, sequence: Sequence) -> None:
        """Its last token is back."""
        self._count(sequence)
        self._leaving -= sequence.tokens * sequence.leaves
        self._stop(sequence)

    def _first(self) -> Sequence | None:
        if not self._waiting:
            self._waiting = [each for each in [next(self._coming, None)] if each]
        return self._waiting[0] if self._waiting else None

    def _fits(self, sequence: Sequence) -> bool:
        spare = self._capacity - self.held - sequence.tokens
        return self._prompts < self._most_prompts and spare >= max(
            WATERMARK * self._capacity, AHEAD * (len(self._running) + 1)
        )

    def _count(self, sequence: Sequence) -> None:
        token = int(sequence.decodes)  # what a prompt samples first is not in the KV yet
        sequence.produced += token
        self.held += token
        self._leaving += token * sequence.leaves

    def _make_room(self) -> None:
        """Ask the last to come to leave. A prompt on its way cannot be called back, and one longer than stages take not computed again."""
        ahead = AHEAD * len(self._running)
        for last in reversed(self._running):
            if self.held - self._leaving + ahead <= self._capacity:
                return
            if last.decodes and not last.leaves and last.tokens < self._longest:
                last.leaves = True
                self._leaving += last.tokens

    def _stop(self, sequence: Sequence) -> None:
        del self._running[bisect(self._running, sequence.rank, key=_rank) - 1]
        self.held -= sequence.tokens


def _rank(sequence: Sequence) -> int:
    return sequence.rank
