"""Grammars compiled over a model's vocabulary, by xgrammar (Dong et al. 2024). Used by last stages, and by `trial` in a process of its own.

xgrammar imports torch and transformers, and reading a tokenizer takes a second: nothing of it happens before the first grammar comes.
"""

import functools
import importlib.util
import re
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from strata_planner.contract.frames import Grammar
from strata_runtime.errors import InputError
from strata_runtime.structured.schemas import MOST_WHITESPACE
from strata_runtime.structured.tokenizer import read_tokenizer

if TYPE_CHECKING:
    import xgrammar

Bits = npt.NDArray[np.int32]
_PLACE = re.compile(r"^\[\d\d:\d\d:\d\d\] \S+:\d+: (Check failed: \(.*?\) is false: )?")
CACHE_BYTES = 64 << 20  # of compiled grammars that nobody uses
RECENT_BYTES = 32 << 20  # and of those that are compiled alone
CALL_SECONDS = 0.02  # of a processor that each call for a text may take, ...
MOST_SECONDS = 0.5  # ... and what all of them may be behind with together: every stream of the replica waits as long
LONG = 200  # characters: of the bounds that were tried the one that leaves least to compile for the others
_ALONE = re.compile(r'"grammar"|[Tt]oken')  # parts of structural tags


class GrammarError(InputError):
    """A grammar that is none, or one that cannot be used here."""


def is_installed() -> bool:
    return importlib.util.find_spec("xgrammar") is not None


class Compiler:
    """For the model of one folder. `rows`: columns of its logits. Not for several threads at once."""

    def __init__(self, folder: Path, rows: int) -> None:
        self._folder = folder
        self.rows = rows
        self._recent: OrderedDict[Grammar, xgrammar.CompiledGrammar] = OrderedDict()  # compiled alone, the latest last

    def compile(self, grammar: Grammar) -> "xgrammar.CompiledGrammar":
        """Raises GrammarError for what xgrammar does not take, or where it is missing."""
        try:
            return self._alone(grammar) if _is_alone(grammar) else self._compiled(self._compiler, grammar)
        except ImportError as error:
            raise GrammarError(f"xgrammar cannot be imported ({error}): install strata-llm[structured]") from error
        except (RuntimeError, ValueError, TypeError, OSError) as error:  # xgrammar's own are RuntimeErrors
            raise GrammarError(told(str(error))) from error

    def prepare(self) -> None:
        """Read the vocabulary, which the first grammar would wait for."""
        assert self._compiler is not None
        assert self._alone_compiler is not None

    def prepare_lengths(self) -> None:
        """What texts of a bounded length need. Over 128,000 tokens it takes 7 s here, what others need beside it 2 s at most."""
        self._compiler.compile_json_schema(
            f'{{"type": "string", "maxLength": {LONG}}}', max_whitespace_cnt=MOST_WHITESPACE
        )

    def begin(self, grammar: Grammar) -> "Text":
        """A text of the grammar. Raises GrammarError."""
        return Text(self.compile(grammar), grammar.ends)

    def _alone(self, grammar: Grammar) -> "xgrammar.CompiledGrammar":
        """With nothing of other grammars: their rules may refer to each other, which xgrammar 0.2.8 does not tell apart."""
        found = self._recent.pop(grammar, None)
        self._recent[grammar] = found or self._compiled(self._alone_compiler, grammar)
        while len(self._recent) > 1 and sum(each.memory_size_bytes for each in self._recent.values()) > RECENT_BYTES:
            self._recent.popitem(last=False)
        return self._recent[grammar]

    @staticmethod
    def _compiled(compiler: Any, grammar: Grammar) -> "xgrammar.CompiledGrammar":
        methods: dict[str, Callable[[str], xgrammar.CompiledGrammar]] = {
            "json_schema": functools.partial(compiler.compile_json_schema, max_whitespace_cnt=MOST_WHITESPACE),
            "regex": compiler.compile_regex,
            "ebnf": compiler.compile_grammar,
            "lark": compiler.compile_lark,
            "structural_tag": compiler.compile_structural_tag,
        }
        return methods[grammar.kind](grammar.text)

    @functools.cached_property
    def _compiler(self) -> Any:
        """Keeps parts of what it has compiled, for all grammars that have them."""
        import xgrammar  # noqa: PLC0415 (seconds)

        return xgrammar.GrammarCompiler(self._vocabulary, max_threads=1, cache_limit_bytes=CACHE_BYTES)

    @functools.cached_property
    def _alone_compiler(self) -> Any:
        import xgrammar  # noqa: PLC0415 (seconds)

        return xgrammar.GrammarCompiler(self._vocabulary, max_threads=1, cache_enabled=False)

    @functools.cached_property
    def _vocabulary(self) -> Any:
        import xgrammar  # noqa: PLC0415 (seconds)

        return xgrammar.TokenizerInfo.from_huggingface(read_tokenizer(self._folder), vocab_size=self.rows)


class Text:
    """A text of a grammar, token by token."""

    def __init__(self, compiled: "xgrammar.CompiledGrammar", ends: tuple[int, ...]) -> None:
        from xgrammar import GrammarMatcher  # noqa: PLC0415 (imported by now)

        self._matcher = GrammarMatcher(compiled, override_stop_tokens=list(ends))
        # Without a text: no grammar has them, and asked for one xgrammar complains in the log.
        self._silent = frozenset(compiled.tokenizer_info.special_token_ids).difference(ends)
        self._behind = 0.0  # seconds of a processor

    @property
    def is_slow(self) -> bool:
        """Whether its tokens take so long that others must not wait for more of them."""
        return self._behind > MOST_SECONDS

    @property
    def is_over(self) -> bool:
        """An end has been accepted: nothing follows."""
        return bool(self._matcher.is_terminated())

    def allow(self, bits: Bits, row: int = 0) -> None:
        """Set a row of [rows, words of 32 bits]: a bit for each token, set where it may come next. All must be set before."""
        started = time.thread_time()
        self._matcher.fill_next_token_bitmask(bits, row)
        self._took(started)

    def accept(self, token: int) -> bool:
        """Whether it may come next; then it has."""
        if token in self._silent:
            return False
        started = time.thread_time()
        is_accepted = bool(self._matcher.accept_token(token))
        self._took(started)
        return is_accepted

    def go_back(self, count: int) -> None:
        """The last tokens that were accepted are not there."""
        self._matcher.rollback(count)

    def _took(self, started: float) -> None:
        self._behind = max(0.0, self._behind + time.thread_time() - started - CALL_SECONDS)


def all_allowed(rows: int, vocabulary: int) -> Bits:
    """[rows, words of 32 bits]"""
    return np.full((rows, -(-vocabulary // 32)), -1, dtype=np.int32)


def tokens_of(bits: Bits, vocabulary: int) -> list[npt.NDArray[np.int64]]:
    """Of each row those that are allowed, in order."""
    allowed = np.unpackbits(bits.view(np.uint8), axis=1, count=vocabulary, bitorder="little").view(np.bool_)
    return [row.nonzero()[0] for row in allowed]


def _is_alone(grammar: Grammar) -> bool:
    return grammar.kind in {"ebnf", "lark"} or (grammar.kind == "structural_tag" and bool(_ALONE.search(grammar.text)))


def told(text: str) -> str:
    """A sentence of xgrammar's without the time and the place in its source that it came from."""
    return _PLACE.sub("", " ".join(text.split()))[:500]
