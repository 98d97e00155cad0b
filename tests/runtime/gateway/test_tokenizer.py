"""The model's token conventions as the gateway reads them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from strata_runtime.gateway.errors import StartError
from strata_runtime.gateway.text.tokenizer import Tokenizer, read_stop_tokens


@pytest.mark.parametrize("text", ["hello world", " \u00e9t\u00e9 \u4e2d\u6587", "a\n\nb", "</s>"])
def test_tokens_are_those_of_auto_tokenizer(tokenizer: Tokenizer, model_folder: Path, text: str) -> None:
    reference = AutoTokenizer.from_pretrained(model_folder)
    assert tokenizer.encode(text) == reference.encode(text)


def test_bytes_of_tokens_add_up_to_the_text(tokenizer: Tokenizer) -> None:
    text = "\u00e9t\u00e9 \U0001f99d fox"
    assert b"".join(tokenizer.token_bytes(token) for token in tokenizer.encode(text)).decode() == text
    assert tokenizer.token_bytes(1) == b"</s>"
    assert tokenizer.token_bytes(tokenizer.vocabulary_size + 5) == b""


def test_bytes_of_a_token_are_looked_up_once(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Log probabilities ask for twenty-one a token."""
    fresh = Tokenizer(tokenizer._tokenizer, ())
    look_up = tokenizer._tokenizer.convert_ids_to_tokens
    asked: list[int] = []
    monkeypatch.setattr(
        tokenizer._tokenizer, "convert_ids_to_tokens", lambda token: asked.append(token) or look_up(token)
    )
    assert [fresh.token_bytes(token) for token in (1, 1, 5, 5, 1)].count(b"</s>") == 3
    assert asked == [1, 5]


@pytest.mark.parametrize(
    ("generation_config", "config", "tokenizers_own", "expected"),
    [
        pytest.param({"eos_token_id": [1, 2]}, {"eos_token_id": 3}, 4, (1, 2), id="generation config first"),
        pytest.param({}, {"eos_token_id": 3}, 4, (3,), id="then the model's"),
        pytest.param({}, {}, 4, (4,), id="then the tokenizer's"),
        pytest.param({}, {}, None, (), id="none"),
    ],
)
def test_stop_tokens(
    tmp_path: Path, generation_config: dict[str, object], config: dict[str, object],
    tokenizers_own: int | None, expected: tuple[int, ...],
) -> None:  # fmt: skip
    (tmp_path / "generation_config.json").write_text(json.dumps(generation_config))
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_stop_tokens(tmp_path, tokenizers_own) == expected


@pytest.mark.parametrize("ids", [[2, None], [2.0], "</s>", [True], -1, [1 << 40], {"a": 1}])
def test_stop_tokens_that_are_none_are_named(tmp_path: Path, ids: object) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    with pytest.raises(StartError, match=r"generation_config\.json: eos_token_id is .*: write the id of a token"):
        read_stop_tokens(tmp_path, 4)


def test_broken_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(StartError, match=r"config\.json is not valid JSON"):
        read_stop_tokens(tmp_path, None)


@pytest.mark.slow  # a process
def test_the_process_does_without_torch(model_folder: Path) -> None:
    """Importing torch would more than double the time to start and take ten times the memory."""
    program = (
        "import sys, pathlib, strata_runtime.gateway.__main__ as gateway\n"
        "tokenizer = gateway.load_tokenizer(pathlib.Path(sys.argv[1]))\n"
        "tokenizer.render_chat([{'role': 'user', 'content': 'hello'}])\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program, str(model_folder)], check=True)
