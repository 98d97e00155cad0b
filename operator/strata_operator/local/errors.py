"""What can go wrong with a local deployment, by what the user should do next. All have an `exit_code`.

LocalError
├── LocalInputError       fix the input, then run again             exit code 2
│   ├── PortInUseError    choose another port
│   ├── NameInUseError    stop the other deployment of this name
│   └── PreflightError    what checks found before anything was started (local.preflight)
├── RefusedError          a slot cannot do what the plan asks       exit code 1
└── CrashedError          a process ends again and again: report    exit code 1
"""

from strata_operator.errors import OperatorError


class LocalError(OperatorError):
    """A local deployment could not go on."""

    exit_code = 1


class LocalInputError(LocalError):
    """The user's input cannot work on this machine."""

    exit_code = 2


class PortInUseError(LocalInputError):
    """The port that was asked for is taken."""


class NameInUseError(LocalInputError):
    """A deployment of this name runs here already."""


class RefusedError(LocalError):
    """A slot refused its roles; the message says which and why."""


class CrashedError(LocalError):
    """A process cannot be kept alive; the message ends with the last lines of its log."""
