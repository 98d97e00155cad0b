"""What a sequence's rules do to a row of logits: penalties, biases, bad words, a least length, a grammar. Used by the sampler.

All of it is a function of the tokens so far, so that a sequence that is computed again, here or on another replica, or whose drafts are
verified several at a time, is treated as it would be alone. A row of a verification comes behind the tokens that were drawn for the rows
before it: where one of them is no draft that was right, what follows is not used, and the next step says how far the sequence really stands.
"""

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Literal

import torch

from strata_planner.contract.frames import NEVER, NOT_YET, LogitRules
from strata_runtime.structured.compiler import Bits, Text

Compiling = Future[Any]  # of xgrammar's compiled grammar
Hindrance = Literal[-1, -2]  # NOT_YET, NEVER


class RuledSequence:
    """One sequence's rules and the tokens that they are applied behind."""

    def __init__(
        self,
        rules: LogitRules,
        tokens: Sequence[int],
        prompt_length: int,
        compiled: Compiling | None,
    ) -> None:
        self._rules = rules
        self._prompt = frozenset(tokens[:prompt_length])
        self._prompt_length = prompt_length
        self._answer = list(tokens[prompt_length:])
        self._counts = Counter(self._answer)
        self._penalizes = bool(rules.presence_penalty or rules.frequency_penalty or rules.repetition_penalty != 1)
        self.changes = self._penalizes or bool(rules.bias or rules.min_tokens or rules.bad_words)  # beside a grammar
        grammar = rules.grammar
        self._matched = None if compiled is None or grammar is None else _Matched(compiled, grammar.ends)

    def go_to(self, position: int) -> Hindrance | None:
        """To where the token behind `position` is drawn. Returns why none can be."""
        self._go_back(position + 1 - self._prompt_length)
        return None if self._matched is None else self._matched.go_to(self._answer)

    def change(self, logits: torch.Tensor) -> None:
        """Apply the other rules to a row of logits [vocab], in place. In vLLM's order: biases, least length, bad words, then penalties."""
        rules = self._rules
        if rules.bias:
            tokens, values = zip(*rules.bias, strict=True)
            logits[_indices(tokens, logits)] += torch.tensor(values, device=logits.device)
        if len(self._answer) < rules.min_tokens and rules.ends:
            logits[_indices(rules.ends, logits)] = -torch.inf
        if forbidden := [word[-1] for word in rules.bad_words if self._ends_with(word[:-1])]:
            logits[_indices(forbidden, logits)] = -torch.inf
        self._penalize(logits)

    @property
    def has_grammar(self) -> bool:
        return self._matched is not None

    @property
    def pending(self) -> Compiling | None:
        """The grammar, while it is being compiled."""
        return None if self._matched is None or self._matched.compiled.done() else self._matched.compiled

    def allow(self, bits: Bits, row: int) -> None:
        """Clear the bits [rows, words] of what the grammar does not allow here."""
        if self._matched is not None:
            self._matched.allow(bits, row)

    def append(self, token: int) -> bool:
        """What was drawn here. False where the grammar does not allow it: then it is not there."""
        if self._matched is not None and not self._matched.accept(token):
            return False
        self._answer.append(token)
        self._counts[token] += 1
        return True

    def _go_back(self, answered: int) -> None:
        for token in self._answer[answered:]:
            self._counts[token] -= 1
        del self._answer[answered:]

    def _ends_with(self, tokens: tuple[int, ...]) -> bool:
        return not tokens or tuple(self._answer[-len(tokens) :]) == tokens

    def _penalize(self, logits: torch.Tensor) -> None:
        rules = self._rules
        if not self._penalizes:
            return
        counted = [(token, count) for token, count in self._counts.items() if count]
        if rules.repetition_penalty != 1:
            known = _indices(list(self._prompt.union(token for token, _ in counted)), logits)
            some = logits[known]
            logits[known] = torch.where(some > 0, some / rules.repetition_penalty, some * rules.repetition_penalty)
        if counted and (rules.presence_penalty or rules.frequency_penalty):
            tokens, counts = zip(*counted, strict=True)
            times = torch.tensor(counts, dtype=logits.dtype, device=logits.device)
            logits[_indices(tokens, logits)] -= rules.frequency_penalty * times + rules.presence_penalty


class _Matched:
    """A grammar and how far an answer has come in it."""

    def __init__(self, compiled: Compiling, ends: tuple[int, ...]) -> None:
        self.compiled = compiled
        self._ends = ends
        self._text: Text | None = None
        self._accepted = 0  # tokens of the answer, from the first on

    def go_to(self, answer: list[int]) -> Hindrance | None:
        """To the end of the answer."""
        if not self.compiled.done():
            return NOT_YET
        if self.compiled.exception() is not None:
            return NEVER
        text = self._text or self._start(answer)
        if self._accepted > len(answer):
            text.go_back(self._accepted - len(answer))
            self._accepted = len(answer)
        if text.is_over:
            return None  # rows of a verification that nobody uses
        # The answer went on where the grammar does not: nothing of it was drawn here.
        # Or its trial was quicker, and the other sequences of the step wait for it.
        return NEVER if self._accepted < len(answer) or text.is_slow else None

    def allow(self, bits: Bits, row: int) -> None:
        assert self._text is not None
        if not self._text.is_over:
            self._text.allow(bits, row)

    def accept(self, token: int) -> bool:
        """Whether it may come next; then it has."""
        assert self._text is not None
        if not self._text.is_over:
            if not self._text.accept(token):
                return False
            self._accepted += 1
        return True

    def _start(self, answer: list[int]) -> Text:
        self._text = Text(self.compiled.result(), self._ends)
        for token in answer:
            if not self.accept(token):
                break
        return self._text


def _indices(tokens: "list[int] | tuple[int, ...]", logits: torch.Tensor) -> torch.Tensor:
    return torch.tensor(tokens, device=logits.device)
