"""The load to plan for. Made by the operator from `spec.workload`, read by the costs; knows no model and no device."""

from strata_planner.contract.values import Value
from strata_planner.errors import WorkloadError


class Workload(Value, frozen=True):
    """A batch of `concurrency` sequences in flight (LLM-PQ's B), each of `prompt_tokens` (s) and `output_tokens` (n)."""

    prompt_tokens: int
    output_tokens: int
    concurrency: int

    def __post_init__(self) -> None:
        for name in ("prompt_tokens", "output_tokens", "concurrency"):
            value = getattr(self, name)
            if value < 1:
                raise WorkloadError(f"workload {name} {value}: at least 1 is needed")

    @property
    def sequence_tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens
