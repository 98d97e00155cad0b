"""A model folder's tokenizer as transformers reads it. Used by the gateway and for grammars.

Does not import torch for models that ship a `tokenizer.json`; others are converted by AutoTokenizer, which does.
"""

from pathlib import Path
from typing import Any


def read_tokenizer(folder: Path) -> Any:
    """Raises OSError, ValueError or ImportError as transformers does."""
    if has_fast_tokenizer(folder):
        from transformers import PreTrainedTokenizerFast as Loader  # noqa: PLC0415 (half a second)
    else:
        from transformers import AutoTokenizer as Loader  # noqa: PLC0415 (imports torch)
    return Loader.from_pretrained(str(folder))


def has_fast_tokenizer(folder: Path) -> bool:
    return (folder / "tokenizer.json").is_file()
