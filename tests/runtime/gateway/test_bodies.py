"""Bodies are bounded: whatever is in them, reading them costs little, and ends in a body or in a refusal by name."""

import sys
import tracemalloc
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as BackendTokenizer
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from strata_runtime.gateway.errors import InvalidRequestError
from strata_runtime.gateway.http.bodies import parse_body
from strata_runtime.gateway.http.parameters import UNSUPPORTED, ChatBody, CompletionBody
from strata_runtime.gateway.http.prompts import MOST_SCORES, Bounds, Prepared, prepare_chat, prepare_completion
from strata_runtime.gateway.settings import Limits
from strata_runtime.gateway.text.tokenizer import SLICE, Tokenizer
from tests.laws import share
from tests.runtime.gateway.models import CHAT_TEMPLATE

BOUNDS = Bounds(tokens=512, answers=64)
NAMES = sorted({*CompletionBody.__struct_fields__, *ChatBody.__struct_fields__, *UNSUPPORTED, "unknown"})

numbers = st.integers() | st.floats() | st.sampled_from([-1, 0, 1, 1e-40, 2**31, 2**63, 2**64, -(2**64), 1e308])
values = st.recursive(
    st.none() | st.booleans() | numbers | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "system", "x"]) | values, "content": st.text(max_size=9) | values},
        optional={"name": values, "tool_calls": values},
    ),
    max_size=3,
)
bodies = st.fixed_dictionaries(
    {"model": st.just("tiny")},
    optional={name: values for name in NAMES if name not in {"model", "messages"}} | {"messages": messages | values},
)


def prepare(data: bytes, kind: type[Any], tokenizer: Tokenizer) -> Prepared:
    body = parse_body(data, kind)
    return (prepare_chat if kind is ChatBody else prepare_completion)(body, tokenizer, BOUNDS)


@settings(max_examples=share(60), deadline=None)
@given(body=bodies, kind=st.sampled_from([CompletionBody, ChatBody]))
def test_any_body_is_taken_within_bounds_or_refused_by_name(tokenizer: Tokenizer, body: Any, kind: type[Any]) -> None:
    try:
        prepared = prepare(msgspec.json.encode(body), kind, tokenizer)
    except InvalidRequestError:
        return
    assert 1 <= len(prepared.requests) <= BOUNDS.answers
    for request in prepared.requests:
        assert 1 <= len(request.prompt) + request.max_tokens <= BOUNDS.tokens
        assert all(0 <= token < tokenizer.rows for token in (*request.prompt, *request.stop_tokens))
        assert 0 <= request.sampling.top_k <= tokenizer.rows
        assert 0 <= request.sampling.seed < 2**63


HALF_A_MEGABYTE = 2**19


def list_of(element: str) -> bytes:
    return ("[" + ",".join([element] * (HALF_A_MEGABYTE // (len(element) + 1))) + "]").encode()


@pytest.mark.parametrize(
    "prompt",
    [
        *(list_of(element) for element in ("1.5", "-1", "7", '""', "[]", "[7]", "{}", "null", '"a"')),
        b'"' + b"a " * (HALF_A_MEGABYTE // 2) + b'"',
        b'{"a":' * (HALF_A_MEGABYTE // 5),
    ],
    ids=lambda prompt: prompt[:6].decode(),
)
def test_half_a_hostile_megabyte_costs_little_memory(tokenizer: Tokenizer, prompt: bytes) -> None:
    data = b'{"model":"tiny","n":128,"prompt":' + prompt + b"}"
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequestError):
            prepare(data, CompletionBody, tokenizer)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 25 * 2**20


@pytest.mark.parametrize("element", ["{}", "[]", "1", '{"role":"user","content":"a"}'])
def test_so_does_half_a_megabyte_of_messages(tokenizer: Tokenizer, element: str) -> None:
    data = b'{"model":"tiny","messages":' + list_of(element) + b"}"
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequestError):
            prepare(data, ChatBody, tokenizer)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 25 * 2**20


def test_answers_are_counted_before_they_are_made(tokenizer: Tokenizer) -> None:
    data = b'{"model":"tiny","n":128,"prompt":' + msgspec.json.encode(["a"] * 5000) + b"}"
    with pytest.raises(InvalidRequestError, match="make 640000 answers, the most at once is 64"):
        prepare(data, CompletionBody, tokenizer)


def test_text_that_cannot_fit_is_not_tokenized(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "encode", None)
    monkeypatch.setattr(tokenizer, "render_chat", None)
    long = "a" * (BOUNDS.tokens * tokenizer.most_bytes_per_token + 1)
    with pytest.raises(InvalidRequestError, match="bytes of text"):
        prepare(msgspec.json.encode({"model": "tiny", "prompt": ["a", long][1:]}), CompletionBody, tokenizer)
    chat = {"model": "tiny", "messages": [{"role": "user", "content": long}]}
    with pytest.raises(InvalidRequestError, match="bytes of text"):
        prepare(msgspec.json.encode(chat), ChatBody, tokenizer)


@pytest.fixture(scope="module")
def spaces() -> Tokenizer:
    """A vocabulary with runs of spaces, as models of program text have them: bytes say little about its tokens."""
    runs = ["\u0120" * 2**power for power in range(8)]
    words = [*sorted(set(pre_tokenizers.ByteLevel.alphabet()) - {runs[0]}), *runs]
    backend = BackendTokenizer(models.BPE({word: i for i, word in enumerate(words)}, [(run, run) for run in runs[:-1]]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=CHAT_TEMPLATE), ())


@pytest.mark.parametrize("kind", [CompletionBody, ChatBody])
def test_nor_is_more_of_it_than_tells_that_it_cannot(
    spaces: Tokenizer, kind: type[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens take hundreds of bytes each while they are made: a body of some megabytes would take a gigabyte."""
    encode = spaces.encode
    encoded: list[int] = []

    def counted(text: str, **options: bool) -> list[int]:
        encoded.append(len(text))
        return encode(text, **options)

    monkeypatch.setattr(spaces, "encode", counted)
    text = "a!" * (BOUNDS.tokens * spaces.most_bytes_per_token // 2 - SLICE)
    body = {"prompt": text} if kind is CompletionBody else {"messages": [{"role": "user", "content": text}]}
    with pytest.raises(InvalidRequestError, match="characters of text, more than 512 tokens"):
        prepare(msgspec.json.encode({"model": "tiny", **body}), kind, spaces)
    assert encoded == [SLICE]


@settings(max_examples=share(8), deadline=None)
@given(
    head=st.text(max_size=3),
    unit=st.text(st.characters(codec="utf-8") | st.sampled_from(" a\n"), min_size=1, max_size=9),
)
@example(head="", unit="a" + " " * 127)  # every cut is within a token
def test_what_fits_is_never_refused_for_its_slices(
    tokenizer: Tokenizer, spaces: Tokenizer, head: str, unit: str
) -> None:
    text = head + unit * (3 * SLICE // (2 * len(unit)))
    for one in (tokenizer, spaces):
        assert not one.exceeds(text, len(one.encode(text)))


@settings(max_examples=share(50), deadline=None)
@given(text=st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=60))
def test_no_token_stands_for_more_bytes_than_that(tokenizer: Tokenizer, text: str) -> None:
    assert len(text.encode()) <= len(tokenizer.encode(text)) * tokenizer.most_bytes_per_token


def test_a_token_beyond_the_embedding_is_refused_wherever_it_comes_from(tokenizer: Tokenizer) -> None:
    """As with an added token of a fine-tune whose embedding was not resized: text reaches it too."""
    rows = max(tokenizer.encode("hello"))
    small = Tokenizer(tokenizer._tokenizer, tokenizer.stop_tokens, rows)
    for body in ({"prompt": "hello"}, {"prompt": [[2], [rows]]}, {"prompt": "a", "stop_token_ids": [rows]}):
        with pytest.raises(InvalidRequestError, match=f"vocabulary ends at {rows - 1}"):
            prepare(msgspec.json.encode({"model": "tiny", **body}), CompletionBody, small)
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
    with pytest.raises(InvalidRequestError, match=f"vocabulary ends at {rows - 1}"):
        prepare(msgspec.json.encode(chat), ChatBody, small)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        pytest.param(CompletionBody, {"prompt": "hello", "n": 128, "logprobs": 20}, id="completion"),
        pytest.param(CompletionBody, {"prompt": ["hello"] * 128, "logprobs": 20}, id="prompts"),
        pytest.param(ChatBody, {"n": 128, "logprobs": True, "top_logprobs": 20}, id="chat"),
    ],
)
def test_log_probabilities_of_a_whole_answer_are_bounded(
    tokenizer: Tokenizer, kind: type[Any], fields: dict[str, Any]
) -> None:
    """They are held until its last token; those of a stream are not."""

    def prepared(**more: Any) -> Prepared:
        messages = {"messages": [{"role": "user", "content": "hello"}]} if kind is ChatBody else {}
        body = parse_body(msgspec.json.encode({"model": "tiny", **messages, **fields, **more}), kind)
        return (prepare_chat if kind is ChatBody else prepare_completion)(body, tokenizer, Bounds(8192, 128))

    most = MOST_SCORES // (128 * 21)
    assert len(prepared(max_tokens=most).requests) == 128
    with pytest.raises(InvalidRequestError, match=f"make {128 * 21 * (most + 1)}; .* send stream=true"):
        prepared(max_tokens=most + 1)
    assert len(prepared(max_tokens=most + 1, stream=True).requests) == 128


@pytest.mark.parametrize("kind", [CompletionBody, ChatBody])
def test_what_is_prepared_keeps_no_body(tokenizer: Tokenizer, kind: type[Any]) -> None:
    """It lives as long as the answer takes."""
    body = {"prompt": "hello"} if kind is CompletionBody else {"messages": [{"role": "user", "content": "hello"}]}
    data = msgspec.json.encode({"model": "tiny", **body})
    before = sys.getrefcount(data)
    prepared = prepare(data, kind, tokenizer)
    assert sys.getrefcount(data) == before
    assert len(prepared.requests) == 1


def test_the_largest_body_follows_the_route() -> None:
    assert [Limits().body_bytes(tokens) for tokens in (0, 512, 8192, 2**20)] == [2**18, 2**18, 2**21, 2**24]
    assert Limits(max_body_bytes=100).body_bytes(8192) == 100
    assert Limits(max_held_body_bytes=2**20).held_body_bytes(8192) == 2**21
