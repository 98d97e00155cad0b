"""Where a JSON value ends in text that comes in pieces.

Used by `answer_parser`. Knows strings and nesting, not the whole grammar: `[1,,]` passes, `[1}` and `['a']` do not.
"""

import re

_IN_STRING = re.compile(r'[^"\\]*')
_BETWEEN_BRACKETS = re.compile(r"[ \t\r\n0-9A-Za-z:,.+\-]*")
_SCALAR = re.compile(r"[0-9A-Za-z.+\-]*")
_CLOSING = {"{": "}", "[": "]"}


class JsonScanner:
    """Scans one value, or what is left of one whose `opened` brackets were read before."""

    def __init__(self, opened: str = "") -> None:
        self._expected = [_CLOSING[bracket] for bracket in opened]  # closing brackets, innermost last
        self._in_string = False
        self._escaped = False
        self._in_scalar = False
        self.complete = False
        self.malformed = False

    def scan(self, text: str, start: int) -> int:
        """The end of the value's text in `text[start:]`; then `complete`, `malformed`, or neither: more may come.

        Only the character behind a number or a literal completes it, and is not part of it.
        """
        at = start
        while at < len(text) and not (self.complete or self.malformed):
            if self._in_string:
                at = self._scan_string(text, at)
            elif self._expected:
                at = self._scan_nested(text, at)
            else:
                at = self._scan_outermost(text, at)
        return at

    def _scan_string(self, text: str, at: int) -> int:
        if self._escaped:
            self._escaped = False
            return at + 1
        at = _end(_IN_STRING, text, at)
        if at == len(text):
            return at
        if text[at] == "\\":
            self._escaped = True
        else:
            self._in_string = False
            self.complete = not self._expected
        return at + 1

    def _scan_nested(self, text: str, at: int) -> int:
        at = _end(_BETWEEN_BRACKETS, text, at)
        if at == len(text):
            return at
        if text[at] == self._expected[-1]:
            self._expected.pop()
            self.complete = not self._expected
            return at + 1
        return self._open(text, at)

    def _scan_outermost(self, text: str, at: int) -> int:
        end = _end(_SCALAR, text, at)
        if end > at:
            self._in_scalar = True
            return end
        if self._in_scalar:
            self.complete = True
            return at
        return self._open(text, at)

    def _open(self, text: str, at: int) -> int:
        if text[at] == '"':
            self._in_string = True
        elif text[at] in _CLOSING:
            self._expected.append(_CLOSING[text[at]])
        else:
            self.malformed = True
            return at
        return at + 1


def _end(pattern: re.Pattern[str], text: str, at: int) -> int:
    match = pattern.match(text, at)
    assert match is not None, "these patterns match the empty text"
    return match.end()
