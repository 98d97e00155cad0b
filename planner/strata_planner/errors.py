"""What can go wrong while planning. Raised by every module of the planner, shown by `strata plan` and in status.

    PlannerError                 base: planning gave no plan; the message has the value, the rule and the fix
    ├── InputError               a file or field is wrong: correct it, retrying does not help
    │   ├── ClusterError         the cluster description, or a device type that no profile is known for
    │   ├── ModelError           config.json, or a request that the model cannot serve (a context too long)
    │   └── WorkloadError        the load to plan for, or the wishes about the plan
    ├── InfeasibleError          nothing fits: `reasons` say by how much and what would; other devices or wishes help
    └── OutOfTimeError           nothing was found so soon, which says nothing of what there is: more time helps

UnsupportedModelError (contract.architectures) is raised as it is: the engine lacks something that the model needs.
"""

from collections.abc import Sequence


class PlannerError(Exception):
    """No plan was made."""


class InputError(PlannerError, ValueError):
    """Correct what was given."""


class ClusterError(InputError):
    """The cluster description is wrong. `problems`: every one that was found, a sentence each."""

    def __init__(self, *problems: str) -> None:
        self.problems = problems
        super().__init__("; ".join(problems))


class ModelError(InputError):
    """The model description is wrong, or does not allow what is asked for."""


class WorkloadError(InputError):
    """The workload or the wishes about the plan are wrong."""


class InfeasibleError(PlannerError):
    """No plan satisfies the constraints. `reasons`: sentences a person can act on."""

    def __init__(self, reasons: Sequence[str]) -> None:
        self.reasons = tuple(reasons)
        super().__init__("; ".join(self.reasons))


class OutOfTimeError(PlannerError):
    """The clock ended the search before it had found any plan."""
