"""The load to plan for. Made by the operator from `spec.workload`, read by the costs; knows no model and no device."""

import math

from strata_planner.contract.values import Value
from strata_planner.errors import WorkloadError


class Workload(Value, frozen=True):
    """A batch of at most `concurrency` sequences in flight (LLM-PQ's B), each of `prompt_tokens` (s) and `output_tokens` (n) in the mean;
    `output_deviation` and `prompt_deviation`: the standard deviations of answers and prompts, in tokens.
    """

    prompt_tokens: int
    output_tokens: int
    concurrency: int
    output_deviation: float = 0.0
    prompt_deviation: float = 0.0

    def __post_init__(self) -> None:
        for name in ("prompt_tokens", "output_tokens", "concurrency"):
            value = getattr(self, name)
            if value < 1:
                raise WorkloadError(f"workload {name} {value}: at least 1 is needed")
        for name in ("output_deviation", "prompt_deviation"):
            deviation = getattr(self, name)
            if not 0 <= deviation < float("inf"):
                raise WorkloadError(f"workload {name} {deviation}: a number of at least 0 is needed")

    @property
    def sequence_tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens

    @property
    def answer_in_flight(self) -> float:
        """Tokens of the answers that are under way, at their full length. Long ones are under way for longer, so that they are met more often
        than they come (renewal theory: lengths in proportion to themselves).
        """
        return self.output_tokens + self.output_deviation**2 / self.output_tokens

    @property
    def held_tokens(self) -> int:
        """Positions that a request in flight has pages for, in the mean, with room for one standard deviation of what all prompts in flight are together:
        prompts differ by chance, and the more of them there are the less by each.
        """
        together = self.prompt_deviation / math.sqrt(self.concurrency)
        return self.prompt_tokens + math.ceil(self.answer_in_flight + together)

    @property
    def prompt_variation(self) -> float:
        """Of prompts, the variance over the square of the mean."""
        return (self.prompt_deviation / self.prompt_tokens) ** 2

    @property
    def seen_tokens(self) -> float:
        """Keys that a decoding sequence sees, in the mean: it is found halfway through its answer."""
        return self.prompt_tokens + self.answer_in_flight / 2
