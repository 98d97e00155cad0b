"""What only the runtime can tell about a model before anything is loaded: `python -m strata_runtime.gateway.preflight MODEL_URI`.

Started by `strata up` beside planning. Prints `{"problems": [...]}`, a sentence each, empty where the tokenizer loads; exit code 0
in both cases. Reads no weights.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from strata_runtime.errors import InputError
from strata_runtime.loading.uri import resolve_model

# Of what AutoTokenizer reads; where none is there, nothing needs to be imported to say so.
_TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt", "spiece.model"),
    "sentencepiece.bpe.model",
)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("model_uri")
    uri = parser.parse_args(arguments).model_uri
    sys.stdout.write(json.dumps({"problems": [*problems(uri)]}) + "\n")
    return 0


def problems(model_uri: str) -> Iterator[str]:
    try:
        folder = resolve_model(model_uri)
    except InputError as error:
        yield str(error)
        return
    yield from _tokenizer_problems(folder)


def _tokenizer_problems(folder: Path) -> Iterator[str]:
    """As the gateway will load it. A tokenizer's file can fail in any way: the library raises plain exceptions."""
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        yield f"{folder} holds no tokenizer: put tokenizer.json there (or the files that AutoTokenizer reads)"
        return
    from strata_runtime.gateway.text.tokenizer import load_tokenizer  # noqa: PLC0415 (transformers, seconds)

    try:
        load_tokenizer(folder)
    except Exception as error:  # noqa: BLE001  whatever it is, the gateway could not start
        said = " ".join(str(error).split())
        yield (
            said
            if isinstance(error, InputError)
            else (f"the tokenizer in {folder} does not load ({type(error).__name__}: {said}): restore tokenizer.json")
        )


if __name__ == "__main__":
    sys.exit(main())
