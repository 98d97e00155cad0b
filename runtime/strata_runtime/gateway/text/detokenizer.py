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
MOST_TOKENS = 64  # in the window: every token decodes it again
_KEPT_TOKENS = MOST_TOKENS // 2  # where it has grown beyond that


class Detokenizer:
    """Emits pieces whose concatenation is the decoded text of all tokens.

    One exception: decoders with byte fallback show a run of bytes as broken when one of them is. Behind `MOST_TOKENS` bytes
    of such a run, what would be characters by itself may be shown as such.
    """

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
        if self._says_nothing(token, text):
            self._window.pop()
            return ""
        if not text.endswith(REPLACEMENT):
            piece = text[self._emitted :]
            self._slide(text)
            return piece
        self._unsettled.append(text)
        if len(self._unsettled) < LONGEST_CHARACTER:
            return ""
        # No character takes that many tokens: what all these texts begin with is broken for good, or is really U+FFFD.
        # What follows may still change: byte fallback shows every byte of a run as broken until its last is there.
        piece = self._emit(_common_start(self._unsettled))
        if len(self._window) > MOST_TOKENS:
            self._shorten_unsettled()
        return piece

    def flush(self) -> str:
        """The answer is over: an incomplete character will not be completed."""
        return self._emit(self._decode(self._window))

    def _emit(self, text: str) -> str:
        piece = text[self._emitted :]
        self._emitted = max(self._emitted, len(text))
        return piece

    def _says_nothing(self, token: int, text: str) -> bool:
        """Whether the window shows as much without its newest token: a special one, in a character or once again.

        Between characters the first of its kind stays: a space shows nothing alone either where decoders strip the first.
        """
        if self._unsettled:
            return text == self._unsettled[-1] and not self._decode([token])
        return len(text) == self._emitted and token in self._window[:-1] and not self._decode([token])

    def _slide(self, text: str) -> None:
        """Keep only the newest settled tokens: enough context for the next one."""
        self._unsettled.clear()
        context = self._window[self._settled :]
        context_text = self._decode(context)
        if text.endswith(context_text) and context_text:
            self._window, self._settled, self._emitted = context, len(context), len(context_text)
            return
        # These tokens say nothing alone (special tokens, a leading space): keep the older ones as well.
        self._settled, self._emitted = len(self._window), len(text)
        if len(self._window) > MOST_TOKENS:
            self._shorten(text, len(self._window))

    def _shorten_unsettled(self) -> None:
        """The same where the text ends in U+FFFD. The shortest of the newest texts is the one with the fewest half characters."""
        shortest = min(self._unsettled, key=len)
        ends = range(len(self._window) - LONGEST_CHARACTER + 1, len(self._window) + 1)
        self._shorten(shortest, ends[self._unsettled.index(shortest)])
        ends = range(len(self._window) - LONGEST_CHARACTER + 1, len(self._window) + 1)
        self._unsettled.extend([self._decode(self._window[:end]) for end in ends])

    def _shorten(self, text: str, end: int) -> None:
        """Forget the oldest tokens, if it can be between two characters. `text` is that of the first `end` tokens."""
        newest = len(self._window) - _KEPT_TOKENS
        for cut in range(newest, newest + LONGEST_CHARACTER):
            kept = self._decode(self._window[cut:end])
            if self._decode(self._window[:cut]) + kept == text:
                break
        if kept:  # else these are only special tokens: what is before them is the context of what follows
            self._window, self._settled = self._window[cut:], max(0, self._settled - cut)
            self._emitted = max(0, self._emitted - (len(text) - len(kept)))


def _common_start(texts: Iterable[str]) -> str:
    return "".join(
        letters[0] for letters in takewhile(lambda letters: len(set(letters)) == 1, zip(*texts, strict=False))
    )
