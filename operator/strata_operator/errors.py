"""The operator's errors, named by what the caller should do next.

OperatorError
├── InvalidInputError    change the object or file; retrying does not help
└── NotReadyError        something outside is not there yet; try again
"""

from collections.abc import Sequence


class OperatorError(Exception):
    """The base: catches everything that the operator raises on purpose."""


class InvalidInputError(OperatorError):
    """An object or file breaks rules. `problems` are whole sentences: path, value, rule and fix."""

    def __init__(self, source: str, problems: Sequence[str]) -> None:
        self.source = source
        self.problems = tuple(problems)
        super().__init__("\n".join([f"{source}: not accepted", *(f"  - {problem}" for problem in self.problems)]))


class NotReadyError(OperatorError):
    """Something that others provide is absent or does not answer. Nothing was changed; trying again may help."""
