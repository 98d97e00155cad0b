"""How much of a slow law `make test` draws: an eighth of its examples or less and eight architectures; `make test-all` draws all.

Which of the two it is says hypothesis' profile: `--hypothesis-profile=all` (the Makefile sets it, with `-m ""` for what is marked slow).
"""

import importlib.util
import sys
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import settings

ALL = "all"


def share(examples: int, part: int = 8) -> int:
    """Of a law: one in `part`, more of it where each takes seconds. Those that say no number have a quarter of hypothesis' own, by the profile."""
    return examples if settings.get_current_profile_name() == ALL else max(1, examples // part)


def lazily(name: str) -> Any:
    """The module, imported where it is first used: of all workers, which collect every file, that one which runs its tests."""
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.loader is not None
    spec.loader = importlib.util.LazyLoader(spec.loader)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def swept(names: Iterable[Any], always: Iterable[Any]) -> list[Any]:
    """Parameters of a sweep: those that always run, and the others marked as slow."""
    kept = set(always)
    return [name if name in kept else pytest.param(name, marks=pytest.mark.slow) for name in names]
