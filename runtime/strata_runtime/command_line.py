"""The kinds of numbers that the runtime's command lines take: `type=` of argparse, with the rule in the error. A leaf: imports none of ours."""

from argparse import ArgumentTypeError

LEAST_WINDOW = 32


def natural(text: str) -> int:
    return _at_least(0, text)


def positive(text: str) -> int:
    return _at_least(1, text)


def window_tokens(text: str) -> int:
    """How many tokens of a text are seen together: fewer than LEAST_WINDOW say nothing of a model."""
    if positive(text) < LEAST_WINDOW:
        raise ArgumentTypeError(f"{text!r}: a window has at least {LEAST_WINDOW} tokens")
    return int(text)


def _at_least(least: int, text: str) -> int:
    if not (text.isascii() and text.isdigit()) or int(text) < least:
        raise ArgumentTypeError(f"{text!r} is not a whole number of at least {least}: use {least} or more")
    return int(text)
