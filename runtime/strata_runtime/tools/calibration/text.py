"""The calibration text as windows of tokens: those that statistics are taken of, and those held back to measure losses on.

Called by `calibrate`. Every second window is held back, so that both halves come from all parts of the text.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoTokenizer

from strata_runtime.errors import InputError

DOCUMENT_SEPARATOR = "\n\f\n"  # a form feed on a line of its own: no window reaches over it
_LEAST_TOKENS = 16  # of a window: with less context a text is hardly predicted


@dataclass(frozen=True)
class Windows:
    """Token ids [tokens] each. `held_back` may be empty where the text is short or nothing is to be measured."""

    calibration: tuple[torch.Tensor, ...]
    held_back: tuple[torch.Tensor, ...]


def read_windows(folder: Path, text: Path, window: int, tokens: int, held_back_tokens: int) -> Windows:
    """Up to `tokens` and `held_back_tokens` tokens of the file `text`, in windows of `window`, each behind the model's first
    token where it has one. Raises InputError for a file that cannot be read or is too short.
    """
    try:
        documents = text.read_text(encoding="utf-8").split(DOCUMENT_SEPARATOR)
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"calibration text {text}: {error}; name a UTF-8 file") from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise InputError(f"{folder} has no tokenizer that can be loaded ({error}): fetch the model again") from error
    encoded = tokenizer(documents, add_special_tokens=False, verbose=False)["input_ids"]
    first = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    return split(cut(encoded, first, window), text.name, tokens, held_back_tokens)


def cut(documents: Sequence[Sequence[int]], first: Sequence[int], window: int) -> list[torch.Tensor]:
    """Whole windows of `window` tokens, `first` included; the rest of a document only where no document fills a window."""
    step = window - len(first)
    pieces = [
        torch.tensor([*first, *document[start : start + step]])
        for document in documents
        for start in range(0, len(document), step)
    ]
    whole = [piece for piece in pieces if len(piece) == window]
    return whole or [piece for piece in pieces if len(piece) >= _LEAST_TOKENS]


def split(windows: Sequence[torch.Tensor], name: str, tokens: int, held_back_tokens: int) -> Windows:
    """Every second window is held back, where any are wanted; each half up to its number of tokens, at least one window."""
    if not windows:
        raise InputError(f"calibration text {name} has fewer than {_LEAST_TOKENS} tokens: give a longer text")
    if not held_back_tokens:
        return Windows(_spread(windows, tokens), ())
    if len(windows) < 2:
        raise InputError(
            f"calibration text {name} fills one window, and losses are measured on others than statistics: give a longer "
            "text, or ask for none with --held-back-tokens 0"
        )
    return Windows(_spread(windows[::2], tokens), _spread(windows[1::2], held_back_tokens))


def _spread(windows: Sequence[torch.Tensor], tokens: int) -> tuple[torch.Tensor, ...]:
    """Evenly spaced windows with together at most `tokens` tokens."""
    count = min(len(windows), max(1, tokens // max(len(window) for window in windows)))
    return tuple(windows[place * len(windows) // count] for place in range(count))
