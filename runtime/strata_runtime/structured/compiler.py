"""Grammars compiled over a model's vocabulary, by xgrammar (Dong et al. 2024). Used by last stages, and by `trial` in a process of its own.

xgrammar imports torch and transformers, and reading a tokenizer takes a second: nothing of it happens before the first grammar comes.
"""

import functools
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strata_planner.contract.frames import Grammar
from strata_runtime.errors import InputError
from strata_runtime.structured.tokenizer import read_tokenizer

if TYPE_CHECKING:
    import xgrammar

MOST_WHITESPACE = 16  # characters between two parts of JSON: small models would write spaces for ever
CACHE_BYTES = 256 << 20  # of compiled grammars that nobody uses


class GrammarError(InputError):
    """A grammar that is none, or one that cannot be used here."""


def is_installed() -> bool:
    return importlib.util.find_spec("xgrammar") is not None


class Compiler:
    """For the model of one folder. `rows`: columns of its logits. Not for several threads at once."""

    def __init__(self, folder: Path, rows: int) -> None:
        self._folder = folder
        self._rows = rows

    def compile(self, grammar: Grammar) -> "xgrammar.CompiledGrammar":
        """Raises GrammarError for what xgrammar does not take, or where it is missing."""
        try:
            compiled: xgrammar.CompiledGrammar = self._method(grammar.kind)(grammar.text)
        except ImportError as error:
            raise GrammarError(f"xgrammar cannot be imported ({error}): install strata-llm[structured]") from error
        except (RuntimeError, ValueError, TypeError, OSError) as error:  # xgrammar's own are RuntimeErrors
            raise GrammarError(_told(error)) from error

        return compiled

    def _method(self, kind: str) -> Callable[[str], Any]:
        compiler = self._compiler
        methods: dict[str, Callable[[str], Any]] = {
            "json_schema": functools.partial(compiler.compile_json_schema, max_whitespace_cnt=MOST_WHITESPACE),
            "regex": compiler.compile_regex,
            "ebnf": compiler.compile_grammar,
            "lark": compiler.compile_lark,
            "structural_tag": compiler.compile_structural_tag,
        }
        return methods[kind]

    @functools.cached_property
    def _compiler(self) -> Any:
        import xgrammar  # noqa: PLC0415 (seconds)

        info = xgrammar.TokenizerInfo.from_huggingface(read_tokenizer(self._folder), vocab_size=self._rows)
        return xgrammar.GrammarCompiler(info, max_threads=1, cache_limit_bytes=CACHE_BYTES)


def _told(error: Exception) -> str:
    """The sentence of an error without the place in xgrammar's source that it came from."""
    return " ".join(str(error).split())[:500]
