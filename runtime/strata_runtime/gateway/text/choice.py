"""One choice of an answer: from a leader's token events to pieces of text with log probabilities and an end.

Used by `answers` for both OpenAI interfaces; pure, knows neither HTTP nor leaders.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from strata_planner.contract.frames import FAILURES, PromptScore, TokenEvent
from strata_runtime.gateway.text.detokenizer import Detokenizer
from strata_runtime.gateway.text.stop_strings import StopStrings
from strata_runtime.gateway.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A chosen token; `top` holds (token, log probability), most likely first. The first of a prompt follows nothing: it has none."""

    token: int
    logprob: float | None
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """What a token event adds to a choice: text that may be shown and the tokens since the piece before.

    `stop_string`: the one that ended it, if one did. `prompt`: what the model made of the prompt, with the first piece.
    """

    text: str
    tokens: tuple[ScoredToken, ...]
    finish_reason: Literal["stop", "length"] | None
    stop_string: str | None = None
    prompt: tuple[PromptScore, ...] = ()


class Choice:
    """Fed with the events of one request, in order."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop_strings: Sequence[str],
        stop_tokens: Sequence[int],
        *,
        min_tokens: int = 0,
        special_tokens: bool = False,
    ) -> None:
        """`min_tokens`: stop strings in the text of so many are no end. `special_tokens`: they are part of the text."""
        self._detokenizer = Detokenizer(partial(tokenizer.decode, special_tokens=special_tokens))
        self._stop_strings = StopStrings(() if min_tokens else stop_strings)
        self._later = (min_tokens, tuple(stop_strings))
        self._stop_tokens = frozenset(stop_tokens)
        self.completion_tokens = 0
        self.cached_tokens = 0  # of the prompt
        self.finished = False

    def push(self, event: TokenEvent) -> Piece:
        """The next token. A stop token ends the answer and is not part of its text."""
        assert event.finish not in FAILURES, "failures carry no token"
        if event.index == 0:
            self.cached_tokens = event.found
        self.completion_tokens += 1
        if self.completion_tokens == self._later[0] + 1 > 1:
            self._stop_strings = StopStrings(self._later[1])  # the one before holds nothing back
        is_text = not (event.finish == "stop" and event.token in self._stop_tokens)
        screened = self._stop_strings.push(self._detokenizer.push(event.token) if is_text else "")
        text = screened.text
        if event.finish is not None and not screened.stopped:
            screened = self._stop_strings.push(self._detokenizer.flush())
            text += screened.text
            text += "" if screened.stopped else self._stop_strings.flush()
        scored = (ScoredToken(event.token, event.logprob, tuple(event.top)),) if is_text else ()
        reason: Literal["stop", "length"] | None = None
        if screened.stopped or event.finish == "stop":
            reason = "stop"
        elif event.finish == "length":
            reason = "length"
        self.finished = reason is not None
        return Piece(text, scored, reason, screened.stop, event.prompt)
