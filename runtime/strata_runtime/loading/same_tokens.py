"""Whether two models mean the same by a token: what one drafts the other can verify. Called where a draft model is loaded.

Tables of embeddings are padded, so that models of one family may have more or fewer rows; tokens that both have must be the same.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from strata_runtime.errors import InputError

TOKENIZER, _OTHER_FILES = "tokenizer.json", ("tokenizer.model", "vocab.json", "vocab.txt")


def check_same_tokens(target: Path, draft: Path, rows: int, draft_rows: int) -> None:
    """`rows`: of the embeddings. Raises InputError for models whose tokens differ; without files of tokenizers, for unlike numbers of rows."""
    if (target / TOKENIZER).is_file() and (draft / TOKENIZER).is_file():
        _check_tables(_tokens(target), _tokens(draft), min(rows, draft_rows))
        return
    for name in _OTHER_FILES:
        if (target / name).is_file() and (draft / name).is_file():
            if _digest(target / name) != _digest(draft / name):
                raise InputError(
                    f"its {name} is not that of {target}: a draft model has the tokenizer of the model that it drafts for; take one of its family"
                )
            return
    if rows != draft_rows:
        raise InputError(
            f"it has {draft_rows} tokens, the model that it drafts for {rows}: a draft model has the same tokenizer; take one of its family"
        )


def _check_tables(ours: dict[int, str], theirs: dict[int, str], rows: int) -> None:
    both = (token for token in ours.keys() & theirs.keys() if token < rows)
    differing = sorted(token for token in both if ours[token] != theirs[token])
    if differing:
        token = differing[0]
        raise InputError(
            f"token {token} is {theirs[token]!r}, for the model that it drafts for {ours[token]!r}, and {len(differing) - 1} more differ: "
            "a draft model has the same tokenizer; take one of its family"
        )


def _tokens(folder: Path) -> dict[int, str]:
    """Every token of tokenizer.json by its number."""
    file = folder / TOKENIZER
    try:
        content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        table = content["model"]["vocab"]
        pairs = table.items() if isinstance(table, dict) else ((entry[0], at) for at, entry in enumerate(table))
        added = {entry["id"]: entry["content"] for entry in content.get("added_tokens", ())}
        return {number: text for text, number in pairs} | added
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise InputError(f"{file} is no tokenizer: {type(error).__name__} {error}; fetch the model again") from error


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
