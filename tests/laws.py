"""How much of a slow law `make test` draws: an eighth of its examples or less and nine architectures or three; `make test-all` draws all.

Which of the two it is says hypothesis' profile: `--hypothesis-profile=all` (the Makefile sets it, with `-m ""` for what is marked slow).
"""

import importlib
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import settings

ALL = "all"


def share(examples: int, part: int = 8) -> int:
    """Of a law: one in `part`, more of it where each takes seconds. Those that say no number have a quarter of hypothesis' own, by the profile."""
    return examples if settings.get_current_profile_name() == ALL else max(1, examples // part)


class Lazy:
    """The module, imported where it is first used: of all workers, which collect every file, by that one which runs its tests."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # pytest asks whatever a file has for such names (`_mock_name`), which is no use of it
            raise AttributeError(name)
        return getattr(importlib.import_module(self._name), name)


def swept(names: Iterable[Any], always: Iterable[Any]) -> list[Any]:
    """Parameters of a sweep: those that always run, and the others marked as slow."""
    kept = set(always)
    return [name if name in kept else pytest.param(name, marks=pytest.mark.slow) for name in names]
