"""Incremental detokenization: pieces add up to the whole text, and no piece ends in half a character."""

from collections.abc import Callable, Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as BackendTokenizer

from strata_runtime.gateway.text.detokenizer import LONGEST_CHARACTER, MOST_TOKENS, REPLACEMENT, Detokenizer
from strata_runtime.gateway.text.tokenizer import Tokenizer
from tests.laws import share

Decode = Callable[[Sequence[int]], str]


def pieces_of(decode: Decode, tokens: Sequence[int]) -> list[str]:
    detokenizer = Detokenizer(decode)
    return [*(detokenizer.push(token) for token in tokens), detokenizer.flush()]


@pytest.fixture(scope="module")
def sentencepiece() -> Decode:
    """Decodes as Llama's first tokenizers do: spaces as U+2581, the first one stripped, bytes as a fallback."""
    words = ["<unk>", "\u2581hello", "\u2581world", "lo", "\u2581", "!", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = BackendTokenizer(models.BPE({word: i for i, word in enumerate(words)}, [], unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence([
        decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)
    ])  # fmt: skip
    tokenizer.add_special_tokens([AddedToken(f"<{name}>", special=True) for name in "st"])
    return lambda tokens: str(tokenizer.decode(list(tokens)))


@settings(deadline=None)  # the machine may be busy
@given(data=st.data())
def test_any_tokens_add_up_to_their_text(tokenizer: Tokenizer, data: st.DataObject) -> None:
    tokens = data.draw(st.lists(st.integers(0, tokenizer.vocabulary_size - 1), max_size=40))
    assert "".join(pieces_of(tokenizer.decode, tokens)) == tokenizer.decode(tokens)


@settings(deadline=None)  # the machine may be busy
@given(text=st.text(max_size=30))
def test_a_text_never_shows_half_a_character(tokenizer: Tokenizer, text: str) -> None:
    pieces = pieces_of(tokenizer.decode, tokenizer.encode(text))
    assert "".join(pieces) == text
    assert REPLACEMENT in text or not any(REPLACEMENT in piece for piece in pieces)


@settings(deadline=None)  # the machine may be busy
@given(st.lists(st.one_of(st.sampled_from([1, 2, 3, 4, 5]), st.characters(codec="utf-8")), max_size=12))
@example(["\ufffd", "\x80"])  # a text that shows U+FFFD, and then a character of several bytes
@example(["\ufffd", "\ufffd", "\U0001f99d"])
def test_sentencepiece_spaces_and_bytes(sentencepiece: Decode, parts: list[int | str]) -> None:
    tokens: list[int] = []
    for part in parts:
        tokens += [part] if isinstance(part, int) else [6 + byte for byte in part.encode()]
    whole = sentencepiece(tokens)
    pieces = pieces_of(sentencepiece, tokens)
    assert "".join(pieces) == whole
    assert REPLACEMENT in whole or not any(REPLACEMENT in piece for piece in pieces)


def test_a_character_comes_with_its_last_byte(tokenizer: Tokenizer) -> None:
    tokens = [tokenizer.encode("a")[0], *tokenizer.encode("\U0001f99d")]
    pieces = pieces_of(tokenizer.decode, tokens)
    assert pieces == ["a", "", "", "", "\U0001f99d", ""]


def test_bytes_that_never_become_a_character_do_not_stall_the_text(tokenizer: Tokenizer) -> None:
    lone = tokenizer.encode("\U0001f99d")[0]
    pieces = pieces_of(tokenizer.decode, [lone] * 20)
    assert any(pieces[:8])
    assert "".join(pieces) == REPLACEMENT * 20


def test_text_comes_at_once_when_characters_are_complete(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("hello world, this is a test")
    assert all(pieces_of(tokenizer.decode, tokens)[:-1])


BYTE = 6  # the id of <0x00> in `sentencepiece`
HELLO, SPACE, S, T = 1, 4, BYTE + 256, BYTE + 257


def fallback(data: bytes) -> list[int]:
    return [BYTE + byte for byte in data]


@pytest.mark.parametrize(
    ("before", "repeated"),
    [
        pytest.param([HELLO], fallback(b"\x80"), id="a lone byte"),
        pytest.param([HELLO], fallback(b"\x80a"), id="a lone byte and a letter"),
        pytest.param([HELLO], fallback("\ufffd".encode()), id="a real U+FFFD"),
        pytest.param(fallback(b"\x80"), fallback("\u20ac".encode()), id="characters in a run that is broken"),
        pytest.param([HELLO], [S], id="a special token"),
        pytest.param([HELLO], [S, T], id="two special tokens"),
        pytest.param([], [S], id="a special token from the start"),
        pytest.param([], [SPACE, S], id="a space that shows nothing alone"),
        pytest.param([HELLO], [SPACE], id="spaces"),
        pytest.param([HELLO, *fallback(b"\x80")], [S], id="a special token in half a character"),
    ],
)
def test_the_window_does_not_grow(sentencepiece: Decode, before: list[int], repeated: list[int]) -> None:
    """An answer may repeat itself to its end: each token decodes a bounded number of them."""
    decoded: list[int] = []

    def decode(tokens: Sequence[int]) -> str:
        decoded.append(len(tokens))
        return sentencepiece(tokens)

    tokens = [*before, *repeated * (3 * MOST_TOKENS), HELLO]
    assert "".join(pieces_of(decode, tokens)) == sentencepiece(tokens)
    assert max(decoded) <= MOST_TOKENS + LONGEST_CHARACTER
    assert len(decoded) < 4 * len(tokens)


@settings(deadline=None, max_examples=share(30))
@given(data=st.data())
def test_neither_does_it_with_what_repeats_in_bytes(tokenizer: Tokenizer, data: st.DataObject) -> None:
    """Byte-level decoders show broken bytes as they are, so that the text is exact whatever repeats."""
    lone = st.sampled_from([tokenizer.encode("\U0001f99d\ufffd\u20ac")[index] for index in range(8)])
    drawn = st.one_of(lone, st.integers(0, tokenizer.vocabulary_size - 1))
    repeated = data.draw(st.lists(drawn, min_size=1, max_size=3))
    tokens = repeated * (2 * MOST_TOKENS) + data.draw(st.lists(drawn, max_size=6))
    lengths: list[int] = []

    def decode(tokens: Sequence[int]) -> str:
        lengths.append(len(tokens))
        return tokenizer.decode(tokens)

    assert "".join(pieces_of(decode, tokens)) == tokenizer.decode(tokens)
    assert max(lengths) <= MOST_TOKENS + LONGEST_CHARACTER
