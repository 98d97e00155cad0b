"""The sampler: from the last stage's logits to the tokens of a step. Used by the stage executor; it keeps what open sequences asked for."""

import functools
import logging
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from strata_planner.contract.frames import NEVER, Grammar, Open, SampledToken, Sampling, Segment
from strata_runtime.errors import InputError, StepError
from strata_runtime.loading.uri import resolve_model
from strata_runtime.stage.logit_rules import RuledSequence
from strata_runtime.stage.sampling import choose, is_filtered, log_probabilities
from strata_runtime.structured.compiler import Compiler, all_allowed, tokens_of

if TYPE_CHECKING:
    import xgrammar

log = logging.getLogger(__name__)

PATIENCE_SECONDS = 0.02  # how long a step in which nothing else is drawn waits for a grammar

_compiling = ThreadPoolExecutor(1, "grammar compiler")  # its thread begins with the first grammar


class _Row(NamedTuple):
    """Of the logits: the token behind `position` of a sequence is drawn from row number `row`."""

    row: int
    sequence: int
    position: int


class Sampler:
    """For the sequences of one replica. `vocabulary`: columns of the logits."""

    def __init__(self, model_uri: str, vocabulary: int) -> None:
        self._model_uri = model_uri
        self._vocabulary = vocabulary
        self._samplings: dict[int, Sampling] = {}
        self._ruled: dict[int, RuledSequence] = {}
        self._prompts: dict[int, tuple[int, ...]] = {}  # of sequences that want scores of theirs

    def open(self, operation: Open) -> None:
        """A grammar is compiled from now on, while the prompt is computed."""
        sampling = operation.sampling
        self._samplings[operation.sequence] = sampling
        if sampling.prompt_logprobs >= 0 and operation.prompt_length:
            self._prompts[operation.sequence] = operation.tokens[: operation.prompt_length]
        if (rules := sampling.rules) is not None:
            compiled = None
            if rules.grammar is not None:
                compiled = _compiling.submit(_compile, self._model_uri, self._vocabulary, rules.grammar)
            ruled = RuledSequence(rules, operation.tokens, operation.prompt_length, compiled)
            self._ruled[operation.sequence] = ruled

    def free(self, sequence: int) -> None:
        self._samplings.pop(sequence, None)
        self._ruled.pop(sequence, None)
        self._prompts.pop(sequence, None)

    def sample(self, segments: Sequence[Segment], logits: torch.Tensor) -> list[SampledToken]:
        """logits: [rows, vocab] float32, a row for each token that a segment wants sampled, in order."""
        wanted = [(segment.sequence, position) for segment in segments for position in segment.sampled]
        if not wanted:
            return []
        rows = [_Row(row, *each) for row, each in enumerate(wanted)]
        own = [self._own(each) for each in rows] if self._prompts else [None] * len(rows)
        behind = [each for each, token in zip(rows, own, strict=True) if token is None]
        drawn = iter(self._draw(logits, behind) if behind else ())
        tokens = [next(drawn) if token is None else token for token in own]
        counts = [self._count(each, is_own=token is not None) for each, token in zip(rows, own, strict=True)]
        scored = [each.row for each in rows if counts[each.row] >= 0]
        chosen = [max(tokens[row], 0) for row in scored]
        scores = iter(log_probabilities(logits[scored], chosen, [counts[row] for row in scored]) if scored else ())
        return [
            SampledToken(each.sequence, each.position, token, *(next(scores) if count >= 0 else (0.0, [])))
            for each, token, count in zip(rows, tokens, counts, strict=True)
        ]

    def _own(self, row: _Row) -> int | None:
        """The prompt's token behind this position, where it goes on and is to be scored."""
        prompt = self._prompts.get(row.sequence, ())
        return prompt[row.position + 1] if 0 <= row.position + 1 < len(prompt) else None

    def _count(self, row: _Row, *, is_own: bool) -> int:
        """Most likely tokens to report beside the chosen one; -1: none."""
        sampling = self._sampling(row.sequence)
        return sampling.prompt_logprobs if is_own else sampling.logprobs

    def _draw(self, logits: torch.Tensor, rows: list[_Row]) -> list[int]:
        """A token for each row, or why there is none."""
        free = [each for each in rows if each.sequence not in self._ruled]
        if len(free) == len(logits):
            return self._choose(logits, rows)
        tokens: dict[_Row, int] = {}
        if free:
            tokens.update(zip(free, self._choose(logits[[each.row for each in free]], free), strict=True))
        self._wait_if_idle(rows)
        groups = [list(group) for _, group in groupby(rows, lambda each: each.sequence)]
        for wave in _waves([group for group in groups if group[0].sequence in self._ruled]):
            tokens.update(self._draw_ruled(logits, wave))
        return [tokens[each] for each in rows]

    def _draw_ruled(self, logits: torch.Tensor, wave: list[_Row]) -> dict[_Row, int]:
        """One row of each sequence: drawn from all tokens, and once more from those that its grammar allows where the first is none of them.

        So a token has the probability that it has among the allowed ones (von Neumann's rejection, 1951), and the likeliest of all is the likeliest
        of them wherever it is allowed. Where a filter looks at how likely others are, the others are the allowed ones: there the first draw is from these.
        """
        tokens: dict[_Row, int] = {}
        for each in wave:
            if (hindrance := self._ruled[each.sequence].go_to(each.position)) is not None:
                tokens[each] = hindrance
        rows = [each for each in wave if each not in tokens]
        if not rows:
            return tokens
        changed = self._changed(logits, rows)
        masked = {place for place, each in enumerate(rows) if self._is_masked_first(each.sequence)}
        refused = []
        if first := [place for place in range(len(rows)) if place not in masked]:
            for place, token in zip(first, self._draw_some(changed, rows, first), strict=True):
                if token == NEVER or self._ruled[rows[place].sequence].append(token):
                    tokens[rows[place]] = token
                else:
                    refused.append(place)
        for draw, places in enumerate((sorted(masked), refused)):
            if places:
                tokens.update(self._draw_allowed(changed, rows, places, draw))
        return tokens

    def _draw_allowed(self, changed: torch.Tensor, rows: list[_Row], places: list[int], draw: int) -> dict[_Row, int]:
        """What grammars allow. `draw`: which one it is there."""
        bits = all_allowed(len(places), changed.shape[1])
        those = [rows[place] for place in places]
        ruled = [self._ruled[each.sequence] for each in those]
        for row, one in enumerate(ruled):
            one.allow(bits, row)
        allowed = tokens_of(bits, changed.shape[1])
        drawn = self._draw_some(_logits_of(changed, places, allowed), those, range(len(those)), draw)
        tokens = {}
        for each, one, choice, place in zip(those, ruled, allowed, drawn, strict=True):
            token = int(choice[place]) if choice.size and place != NEVER else NEVER
            tokens[each] = token if token != NEVER and one.append(token) else NEVER
        return tokens

    def _draw_some(self, logits: torch.Tensor, rows: list[_Row], places: Sequence[int], draw: int = 0) -> list[int]:
        """Of the rows in these places; NEVER where rules have left no token."""
        some = logits if len(places) == len(logits) else logits[places]
        those = [rows[place] for place in places]
        drawn = self._choose(some, those, draw)
        if not any(self._ruled[each.sequence].changes for each in those):
            return drawn
        nothing = (some.amax(dim=-1) == -torch.inf).tolist()
        return [NEVER if is_nothing else token for token, is_nothing in zip(drawn, nothing, strict=True)]

    def _changed(self, logits: torch.Tensor, rows: list[_Row]) -> torch.Tensor:
        """By all rules but grammars. A copy then, since log probabilities are those of the model. [len(rows), vocab]"""
        changing = [place for place, each in enumerate(rows) if self._ruled[each.sequence].changes]
        if not changing and len(rows) == len(logits):
            return logits
        changed = logits[[each.row for each in rows]]
        for place in changing:
            self._ruled[rows[place].sequence].change(changed[place])
        return changed

    def _is_masked_first(self, sequence: int) -> bool:
        return self._ruled[sequence].has_grammar and is_filtered(self._sampling(sequence))

    def _choose(self, logits: torch.Tensor, rows: Sequence[_Row], draw: int = 0) -> list[int]:
        positions = [each.position for each in rows]
        return choose(logits, [self._sampling(each.sequence) for each in rows], positions, draw)

    def _wait_if_idle(self, rows: list[_Row]) -> None:
        """Where every sequence waits for its grammar, the next step would find what this one does."""
        ruled = (self._ruled.get(each.sequence) for each in rows)
        pending = [None if each is None else each.pending for each in ruled]
        if None not in pending:
            wait([each for each in pending if each is not None], PATIENCE_SECONDS, FIRST_COMPLETED)

    def _sampling(self, sequence: int) -> Sampling:
        if sequence not in self._samplings:
            raise StepError(f"sequence {sequence} was never opened, or is over: its sampling parameters are unknown")
        return self._samplings[sequence]


def _waves(groups: list[list[_Row]]) -> list[list[_Row]]:
    """The first row of each sequence, then the second of each that has two, ...: what rules say depends on what was drawn before."""
    longest = max(map(len, groups), default=0)
    return [[group[place] for group in groups if place < len(group)] for place in range(longest)]


def _logits_of(logits: torch.Tensor, rows: list[int], tokens: list[npt.NDArray[np.int64]]) -> torch.Tensor:
    """Of some tokens of each of these rows, behind them -inf. [len(rows), most tokens of a row]"""
    width = max(1, *(those.size for those in tokens))
    if logits.device.type != "cpu":
        return _gathered(logits, rows, tokens, width)
    found = np.full((len(rows), width), -np.inf, np.float32)  # few and small calls: torch's take twice as long
    for place, (row, those) in enumerate(zip(rows, tokens, strict=True)):
        found[place, : those.size] = logits[row].numpy()[those]
    return torch.from_numpy(found)


def _gathered(logits: torch.Tensor, rows: list[int], tokens: list[npt.NDArray[np.int64]], width: int) -> torch.Tensor:
    """The same where the logits lie."""
    index = np.zeros((len(rows), width), np.int64)
    for place, those in enumerate(tokens):
        index[place, : those.size] = those
    some = logits[torch.tensor(rows, device=logits.device)[:, None], torch.from_numpy(index).to(logits.device)]
    for place, those in enumerate(tokens):
        some[place, those.size :] = -torch.inf
    return some


def _compile(model_uri: str, vocabulary: int, grammar: Grammar) -> "xgrammar.CompiledGrammar":
    try:
        return _compiler_of(model_uri, vocabulary).compile(grammar)
    except InputError as error:
        log.error("a request ends, its grammar cannot be used here: %s", error)  # noqa: TRY400 (its reason is all)
        raise


@functools.lru_cache(maxsize=1)
def _compiler_of(model_uri: str, vocabulary: int) -> Compiler:
    return Compiler(resolve_model(model_uri), vocabulary)
