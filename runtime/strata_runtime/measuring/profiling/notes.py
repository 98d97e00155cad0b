"""Notes of a survey under way: a line per measurement, written as it comes, so that an interrupted survey goes on where it stopped.

Used by `survey`. The first line is the key, everything that would make another measurement differ; notes of another key are
thrown away, and so is a last line that was cut off.
"""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

Name = tuple[str | int, ...]


class Notes:
    """Seconds by name: of each a list of tuples, one per run."""

    def __init__(self, file: Path, key: dict[str, Any]) -> None:
        self._file = file
        self._runs: dict[Name, list[tuple[float, ...]]] = defaultdict(list)
        self._passes: dict[Name, int] = defaultdict(int)
        lines = self._kept(key)
        file.parent.mkdir(parents=True, exist_ok=True)
        self._open = file.open("w", encoding="utf-8")
        self._write(key)
        for line in lines:
            self.add(tuple(line["name"]), [tuple(run) for run in line["runs"]])

    @property
    def resumed(self) -> int:
        return sum(self._passes.values())

    def passes(self, name: Name) -> int:
        """How often `name` has been measured."""
        return self._passes[name]

    def add(self, name: Name, runs: list[tuple[float, ...]]) -> None:
        self._passes[name] += 1
        self._runs[name] += runs
        self._write({"name": name, "runs": runs})

    def quantile(self, name: Name, share: float) -> tuple[float, ...]:
        """Of each figure of the runs: 0 the lowest, 0.5 the one in the middle."""
        return tuple(sorted(column)[int(share * (len(column) - 1))] for column in zip(*self._runs[name], strict=True))

    def close(self, *, done: bool) -> None:
        self._open.close()
        if done:
            self._file.unlink()

    def _write(self, line: dict[str, Any]) -> None:
        self._open.write(json.dumps(line) + "\n")
        self._open.flush()

    def _kept(self, key: dict[str, Any]) -> list[dict[str, Any]]:
        if not self._file.exists():
            return []
        parsed: list[dict[str, Any]] = []
        for line in self._file.read_text(encoding="utf-8").splitlines():
            try:
                parsed.append(json.loads(line))
            except ValueError:
                break  # cut off in the middle of a write
        return parsed[1:] if parsed and parsed[0] == json.loads(json.dumps(key)) else []
