"""Tokens to text, one by one, without ever showing half a character.

Used by `choice`. A token alone has no text: a character may take several tokens, and some tokenizers treat the first
token of a text differently. So a window of tokens is decoded again and what is new is emitted once it is settled (the
way of Hugging Face's text-generation-inference, `decode_token`).
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile

Decode = Callable[[Sequence[int]], str]

REPLACEMENT = "\ufffd"  # what decoders show for bytes that are no character (yet)
LONGEST_CHARACTER = 4  # bytes in UTF-8, so at most as many tokens


class Detokenizer:
    """Emits pieces whose concatenation is the decoded text of all tokens."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._window: list[int] = []  # tokens that the next piece is decoded with
        self._settled = 0  # how many of them were emitted in whole
        self._emitted = 0  # characters of the window's text that were emitted
        self._unsettled: deque[str] = deque(maxlen=LONGEST_CHARACTER)  # the window's newest texts since it was settled

    def push(self, token: int) -> str:
        """The text that this token settles; empty while a character is incomplete."""
        self._window.append(token)
        text = self._decode(self._window)
        if not text.endswith(REPLACEMENT):
            piece = text[self._emitted :]
            self._slide(text)
            return piece
        if self._unsettled and text == self._unsettled[-1] and not self._decode([token]):
            self._window.pop()  # a special token within a character: no part of it
            return ""
        self._unsettled.append(text)
        if len(self._unsettled) < LONGEST_CHARACTER:
            return ""
        # No character takes that many tokens: what all these texts begin with is broken for good, or is really U+FFFD.
        # What follows may still change: byte fallback shows every byte of a run as broken until its last is there.
        return self._emit(_common_start(self._unsettled))

    def flush(self) -> str:
        """The answer is over: an incomplete character will not be completed."""
        return self._emit(self._decode(self._window))

    def _emit(self, text: str) -> str:
        piece = text[self._emitted :]
        self._emitted = max(self._emitted, len(text))
        return piece

    def _slide(self, text: str) -> None:
        """Keep only the newest settled tokens: enough context for the next one."""
        self._unsettled.clear()
        context = self._window[self._settled :]
        context_text = self._decode(context)
        if text.endswith(context_text) and context_text:
            self._window, self._settled, self._emitted = context, len(context), len(context_text)
        else:  # these tokens say nothing alone (special tokens, a leading space): keep the older ones as well
            self._settled, self._emitted = len(self._window), len(text)


def _common_start(texts: Iterable[str]) -> str:
    return "".join(
        letters[0] for letters in takewhile(lambda letters: len(set(letters)) == 1, zip(*texts, strict=False))
    )
