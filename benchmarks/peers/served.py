"""What every engine's process does: load once, then answer one question a line. Runs in any environment: the standard library alone.

A question is a cell: so many sequences, tokens of each prompt, tokens of each answer. An engine may have several settings; the first time a cell is asked for, all are
timed and the fastest stays. The answer goes to the standard output that the process was started with; what libraries print goes to standard error.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol, TextIO

TRIALS = 2  # of each setting, after one that makes kernels
VOCABULARY = 1000  # prompts use the first tokens


@dataclass(frozen=True)
class Wish:
    """What to serve and with what. `scratch`: a folder for the checkpoint as this engine wants it."""

    model: Path
    bits: int
    threads: int
    scratch: Path


class Moments(NamedTuple):
    """Seconds from the start until every sequence has its first token, and until all have their last one."""

    first: float
    last: float


class Engine(Protocol):
    """One setting of an engine."""

    def run(self, prompts: Sequence[Sequence[int]], answer: int) -> Moments:
        """All prompts at once, `answer` tokens for each; nothing is kept from an earlier run."""


def prompts_of(sequences: int, length: int) -> list[list[int]]:
    return [[(7 * number + place) % VOCABULARY for place in range(length)] for number in range(sequences)]


def timed_steps(first: Callable[[], object], step: Callable[[], object], answer: int) -> Moments:
    """One call for the prompts, one for each further token."""
    started = time.perf_counter()
    first()
    begun = time.perf_counter()
    for _ in range(answer - 1):
        step()
    return Moments(begun - started, time.perf_counter() - started)


def main(make: Callable[[Wish], Mapping[str, Engine]]) -> None:
    """`make`: the settings of this engine by name."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--bits", type=int, required=True)
    parser.add_argument("--scratch", type=Path, required=True)
    parser.add_argument("--threads", type=int, required=True)
    chosen = parser.parse_args()
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    engines = make(Wish(chosen.model, chosen.bits, chosen.threads, chosen.scratch))
    _answer(engines, answers)


def _answer(engines: Mapping[str, Engine], answers: TextIO) -> None:
    chosen: dict[tuple[int, int, int], str] = {}
    _say(answers, {"ready": sorted(engines)})
    for line in sys.stdin:
        asked = json.loads(line)
        cell = asked["sequences"], asked["prompt"], asked["answer"]
        prompts, answer = prompts_of(*cell[:2]), cell[2]
        if cell not in chosen:
            chosen[cell] = _fastest(engines, prompts, answer)
        moments = engines[chosen[cell]].run(prompts, answer)
        _say(answers, {"first": moments.first, "last": moments.last, "setting": chosen[cell]})


def _fastest(engines: Mapping[str, Engine], prompts: Sequence[Sequence[int]], answer: int) -> str:
    """By the prompts' seconds where nothing else is asked for, else by those of the tokens after the first."""

    def seconds(engine: Engine) -> float:
        _, *runs = [engine.run(prompts, answer) for _ in range(1 + TRIALS)]
        return min(first if answer == 1 else last - first for first, last in runs)

    return min(engines, key=lambda name: seconds(engines[name]))


def _say(answers: TextIO, message: Mapping[str, object]) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()
