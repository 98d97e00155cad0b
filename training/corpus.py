"""The training text: the running interpreter's own standard library (PSF licence), in a fixed order and with a fixed split.

Called by ``train`` and ``tokenizer``. Knows nothing of tokens or models.

Three kinds of document come out of it: the source files of the library, the language reference that ships as ``pydoc_data.topics``, and short
dialogues made from docstrings ("What does textwrap.dedent do?", answered by the first paragraphs of its docstring). A file is held out when
the hash of its path says so, so the split depends on nothing but names; no dialogue is made from a held-out file.
"""

import ast
import builtins
import hashlib
import importlib
import inspect
import itertools
import math
import random
import sys
import sysconfig
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

HELDOUT_PERCENT = 3
# Third-party code (its licences differ), generated tables and test suites say little about the language and are left out.
EXCLUDED_FOLDERS = frozenset(
    {"__pycache__", "site-packages", "_bundled", "test", "tests", "idle_test", "encodings", "lib-dynload"}
)
EXCLUDED_FILES = frozenset({"pydoc_data/topics.py", "pydoc_data/__init__.py"})  # topics is read as text, not as source
# Sources that are read as text but make dull answers.
UNEXPLAINED_PACKAGES = frozenset({"idlelib", "lib2to3", "turtledemo", "distutils", "this", "antigravity"})
# Written in C: their docstrings are read at run time.
BUILT_IN_MODULES: tuple[ModuleType, ...] = (builtins, itertools, math, sys, time)
# What people ask about most: the last phase of training repeats their docstrings under every question.
FAMILIAR_MODULES = """argparse asyncio base64 bisect builtins calendar collections contextlib copy csv dataclasses datetime enum
    functools glob gzip hashlib heapq http inspect io itertools json logging math os os.path pathlib pickle queue random re
    secrets shlex shutil socket sqlite3 statistics string subprocess tempfile textwrap threading time tokenize traceback
    types urllib.parse uuid zipfile"""
FAMILIAR_TYPES = (str, list, dict, set, int, float, bytes, tuple)
QUESTIONS = (
    "What does {} do?",
    "Explain {}.",
    "What is {}?",
    "How do I use {}?",
    "Tell me about {}.",
    "What is {} for?",
    "Describe {} in Python.",
    "what does {} do",
)
ANSWER_CHARACTERS = 600
FAMILIAR_ANSWER_CHARACTERS = 240

USER, ASSISTANT, END, SEPARATOR = "<|user|>", "<|assistant|>", "<|end|>", "<|endoftext|>"


@dataclass(frozen=True)
class Explained:
    """A name of the library and what its docstring says of it."""

    name: str
    signature: str
    text: str

    def dialogue(self, question: str) -> str:
        """One exchange in the layout of the chat template."""
        answer = f"`{self.name}{self.signature}`: {self.text}"
        return f"{USER}\n{question.format(self.name)}{END}\n{ASSISTANT}\n{answer}{END}\n"


@dataclass(frozen=True)
class Corpus:
    """Documents by use. Training mixes ``library`` and dialogues of ``explained``; ``heldout`` is seen by no part of training."""

    library: tuple[str, ...]
    heldout: tuple[str, ...]
    explained: tuple[Explained, ...]
    familiar: tuple[Explained, ...] = ()

    def epoch(self, seed: int, questions_each: int) -> list[str]:
        """Every library document once and every docstring under ``questions_each`` different questions, shuffled by ``seed``."""
        rng = random.Random(seed)
        dialogues = [e.dialogue(q) for e in self.explained for q in rng.sample(QUESTIONS, questions_each)]
        documents = [*self.library, *dialogues]
        rng.shuffle(documents)
        return documents

    def last_epoch(self, seed: int, library_share: float) -> list[str]:
        """The familiar docstrings under every question, among a share of the library documents, shuffled by ``seed``."""
        rng = random.Random(seed)
        library = rng.sample(self.library, int(len(self.library) * library_share))
        documents = [*library, *(e.dialogue(q) for e in self.familiar for q in QUESTIONS)]
        rng.shuffle(documents)
        return documents


def read_corpus(library_folder: Path | None = None) -> Corpus:
    """Read the library in ``library_folder`` (default: the running interpreter's own)."""
    root = library_folder or Path(sysconfig.get_paths()["stdlib"])
    library, heldout = [], []
    explained: list[Explained] = []
    for path, text in _source_files(root):
        if is_heldout(path):
            heldout.append(text)
            continue
        library.append(text)
        explained.extend(_explained_in_source(path, text))
    for topic, text in _topics(root):
        (heldout if is_heldout(f"topic:{topic}") else library).append(text)
    for module in BUILT_IN_MODULES:
        explained.extend(_explained_in_module(module))
    familiar = tuple(
        e for name in FAMILIAR_MODULES.split() for e in _familiar_in_module(importlib.import_module(name), name)
    )
    return Corpus(tuple(library), tuple(heldout), tuple(explained), familiar)


def is_heldout(name: str) -> bool:
    """Whether the document called ``name`` belongs to the held-out split: a function of the name alone."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % 100 < HELDOUT_PERCENT


def _source_files(root: Path) -> Iterator[tuple[str, str]]:
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if EXCLUDED_FOLDERS.isdisjoint(name.split("/")[:-1]) and name not in EXCLUDED_FILES:
            yield name, path.read_text(encoding="utf-8", errors="replace")


def _topics(root: Path) -> Iterator[tuple[str, str]]:
    tree = ast.parse((root / "pydoc_data" / "topics.py").read_text(encoding="utf-8"))
    table = next(node for node in tree.body if isinstance(node, ast.Assign)).value
    yield from sorted(ast.literal_eval(table).items())


def _explained_in_source(path: str, text: str) -> Iterator[Explained]:
    module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    parts = module.split(".")
    if parts[0] in UNEXPLAINED_PACKAGES or any(part.startswith("_") for part in parts):
        return
    try:
        tree = ast.parse(text)
    except SyntaxError:  # lib2to3 and friends keep files in the syntax of older versions
        return
    if summary := _summary(ast.get_docstring(tree)):
        yield Explained(module, "", summary)
    yield from _explained_in_body(module, tree.body)


def _explained_in_body(prefix: str, body: list[ast.stmt]) -> Iterator[Explained]:
    for node in body:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) or node.name.startswith("_"):
            continue
        name = f"{prefix}.{node.name}"
        if summary := _summary(ast.get_docstring(node)):
            signature = "" if isinstance(node, ast.ClassDef) else f"({ast.unparse(node.args)})"
            yield Explained(name, signature, summary)
        if isinstance(node, ast.ClassDef):
            yield from _explained_in_body(name, node.body)


def _explained_in_module(module: ModuleType) -> Iterator[Explained]:
    prefix = "" if module is builtins else f"{module.__name__}."
    for name, value in sorted(vars(module).items()):
        if name.startswith("_") or not callable(value):
            continue
        if summary := _summary(inspect.getdoc(value)):
            yield Explained(prefix + name, _signature(value), summary)
        if isinstance(value, type) and not issubclass(value, BaseException):
            for method in sorted(set(vars(value))):
                if not method.startswith("_") and (summary := _summary(inspect.getdoc(getattr(value, method)))):
                    yield Explained(f"{prefix}{name}.{method}", "", summary)


def _familiar_in_module(module: ModuleType, name: str) -> Iterator[Explained]:
    """What ``module`` exports under the name that its users write, ``asyncio.sleep`` rather than ``asyncio.tasks.sleep``."""
    prefix = "" if module is builtins else f"{name}."
    for export in sorted(getattr(module, "__all__", vars(module))):
        value = getattr(module, export)
        defined_in = str(getattr(value, "__module__", None) or name)
        if export.startswith("_") or not callable(value) or _is_heldout_module(defined_in):
            continue
        is_class = isinstance(value, type)
        docstring = (
            vars(value).get("__doc__") if is_class else inspect.getdoc(value)
        )  # a class does not speak for its heirs
        if isinstance(docstring, str) and (summary := _summary(docstring)):
            yield Explained(prefix + export, "" if is_class else _signature(value), _opening(summary))
        if module is builtins and value in FAMILIAR_TYPES:
            for method in sorted(m for m in vars(value) if not m.startswith("_")):
                yield Explained(f"{export}.{method}", "", _opening(_summary(inspect.getdoc(getattr(value, method)))))


def _is_heldout_module(module: str) -> bool:
    path = module.replace(".", "/")
    return is_heldout(f"{path}.py") or is_heldout(f"{path}/__init__.py")


def _opening(summary: str) -> str:
    """The first paragraph, in one line, cut behind a sentence where it is long."""
    paragraph = " ".join(summary.split("\n\n", maxsplit=1)[0].split())
    if len(paragraph) <= FAMILIAR_ANSWER_CHARACTERS:
        return paragraph
    sentences = paragraph[:FAMILIAR_ANSWER_CHARACTERS].rpartition(". ")
    return f"{sentences[0]}." if sentences[0] else paragraph[:FAMILIAR_ANSWER_CHARACTERS]


def _signature(value: Callable[..., object]) -> str:
    try:
        return str(inspect.signature(value))
    except (TypeError, ValueError):  # some built-ins publish none
        return ""


def _summary(docstring: str | None) -> str:
    """As many leading paragraphs as fit in ``ANSWER_CHARACTERS``; at least the first, cut at a line."""
    if not docstring:
        return ""
    paragraphs = textwrap.dedent(docstring).strip().split("\n\n")
    kept = paragraphs[0][: 2 * ANSWER_CHARACTERS]
    for paragraph in paragraphs[1:]:
        if len(kept) + len(paragraph) > ANSWER_CHARACTERS:
            break
        kept += "\n\n" + paragraph
    return kept.strip()
