"""Which exit code an error means. The one place that knows the error trees of planner, operator and contract."""

from strata_operator.errors import InvalidInputError, OperatorError
from strata_planner.contract.architectures import UnsupportedModelError
from strata_planner.contract.values import ContractError
from strata_planner.errors import InputError, PlannerError

WRONG_INPUT = 2
CANNOT = 1
_WRONG_INPUT = (InvalidInputError, InputError, UnsupportedModelError, ContractError)


def exit_code(error: BaseException) -> int | None:
    """None for what no user can act on."""
    if isinstance(error, _WRONG_INPUT):
        return WRONG_INPUT
    if isinstance(error, OperatorError | PlannerError):
        return int(getattr(error, "exit_code", CANNOT))
    return None


def message(error: BaseException) -> str:
    """The error's own sentence and its notes."""
    return "\n".join([str(error), *getattr(error, "__notes__", [])])
