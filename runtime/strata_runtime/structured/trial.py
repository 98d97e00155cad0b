"""A process in which grammars are tried before anybody serves them: what takes too long or too much there, ends there.

    python -m strata_runtime.structured.trial <model folder> <rows of its embedding>

Each line of its input is a grammar; each line of its output answers one: `{"problem": null}`, or why it cannot be used. A grammar is compiled, and a
text of it begun, in a fork of its own, whose memory and time are bounded: C++ can be neither interrupted nor trusted with what strangers send.
"""

import os
import random
import re
import resource
import select
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import numpy as np

from strata_planner.contract.frames import Grammar
from strata_runtime.structured.compiler import Compiler, GrammarError, all_allowed, tokens_of, told
from strata_runtime.structured.lean_imports import import_xgrammar
from strata_runtime.structured.tokenizer import has_fast_tokenizer

MOST_SECONDS = 5  # of a processor, to compile it and to begin a text
MOST_WALL_SECONDS = 15  # where processors have other work
MOST_MEMORY_BYTES = 1 << 30  # beside what the process has
MOST_COMPILED_BYTES = 64 << 20
TRIED_TOKENS = 64
MOST_HEARD_BYTES = 1 << 16  # of what the compiler says: a grammar can make it say gigabytes
_KNOWN_REMARKS = ("oneOf with overlapping",)  # taken as anyOf: docs/answers-with-a-form.md
_LENGTHS = re.compile("minLength|maxLength")
_FIX = "send a simpler one"


class Answer(msgspec.Struct, frozen=True):
    """A line of the output."""

    problem: str | None


def main(arguments: list[str]) -> None:
    """Until its input ends."""
    folder, rows = arguments
    if has_fast_tokenizer(Path(folder)):  # others are read with torch
        import_xgrammar()
    compiler = Compiler(Path(folder), int(rows))
    compiler.prepare()
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what libraries print is none
    decoder = msgspec.json.Decoder(Grammar)
    has_lengths = False
    for line in sys.stdin.buffer:
        grammar = decoder.decode(line)
        if not has_lengths and _LENGTHS.search(grammar.text):
            compiler.prepare_lengths()
            has_lengths = True  # and so has every fork
        problem = in_a_fork(lambda grammar=grammar: problem_of(compiler, grammar) or "")  # type: ignore[misc]
        answers.write(msgspec.json.encode(Answer(problem or None)) + b"\n")


def problem_of(compiler: Compiler, grammar: Grammar) -> str | None:
    """Why it cannot be used; None where it can."""
    heard: list[str] = []
    try:
        with _listening(heard):
            compiled = compiler.compile(grammar)
    except GrammarError as error:
        return str(error)
    remarks = (told(line).partition("Warning: ")[2] for line in heard)
    if passed_over := next((each for each in remarks if each and not each.startswith(_KNOWN_REMARKS)), None):
        return f"{passed_over}: leave it out"
    if compiled.memory_size_bytes > MOST_COMPILED_BYTES:
        mebibytes = compiled.memory_size_bytes >> 20
        return f"compiled it takes {mebibytes} MiB; {MOST_COMPILED_BYTES >> 20} are the most here: {_FIX}"
    return _problem_of_text(compiler, grammar)


@contextmanager
def _listening(heard: list[str]) -> Iterator[None]:
    """To the lines that libraries write to standard error: what xgrammar does not take it may pass over, and only say so there."""
    readable, writable = os.pipe2(os.O_NONBLOCK)  # what is too much is dropped
    kept = os.dup(2)
    os.dup2(writable, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(writable)
        with suppress(BlockingIOError), os.fdopen(readable, "rb") as end:
            heard.extend(end.read(MOST_HEARD_BYTES).decode("utf-8", "replace").splitlines())


def _problem_of_text(compiler: Compiler, grammar: Grammar) -> str | None:
    """Begin a text, each token any that is allowed but its end: ambiguous grammars take longer with every token."""
    text = compiler.begin(grammar)
    chosen = random.Random(0)
    for count in range(TRIED_TOKENS):
        bits = all_allowed(1, compiler.rows)
        text.allow(bits)
        (allowed,) = tokens_of(bits, compiler.rows)
        further = np.setdiff1d(allowed, grammar.ends)
        if not allowed.size:
            return f"behind {count} tokens of a text nothing is allowed that this model's vocabulary has: {_FIX}"
        if not further.size:
            break
        text.accept(int(chosen.choice(further)))
        if text.is_slow:
            return f"{count + 1} tokens of a text take too long, and all other answers would wait for them: {_FIX}"
    return None


def in_a_fork(work: Callable[[], str]) -> str:
    """What `work` returns, or why it did not: its processor time and its memory are bounded."""
    readable, writable = os.pipe()
    child = os.fork()
    if child == 0:
        _bounded(work, writable)
    os.close(writable)
    with os.fdopen(readable, "rb") as answer:
        in_time = bool(select.select([answer], [], [], MOST_WALL_SECONDS)[0])
        said = answer.read() if in_time else b""
    if not in_time:
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0:
        return said.decode()
    if not in_time or (os.WIFSIGNALED(status) and os.WTERMSIG(status) in {signal.SIGXCPU, signal.SIGKILL}):
        return f"it takes more than {MOST_SECONDS} s to compile: {_FIX}"
    return f"it takes more than {MOST_MEMORY_BYTES >> 20} MiB to compile: {_FIX}"


def _bounded(work: Callable[[], str], writable: int) -> None:
    """The fork's part; it never returns."""
    code = 1
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        most = pages * resource.getpagesize() + MOST_MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        resource.setrlimit(resource.RLIMIT_CPU, (MOST_SECONDS, MOST_SECONDS + 1))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.write(writable, work().encode()[: select.PIPE_BUF])
        code = 0
    finally:
        os._exit(code)


if __name__ == "__main__":
    main(sys.argv[1:])
