"""The sampler's laws: what rules and grammars say depends on the tokens so far alone, however a text is cut into steps."""

import functools
import hashlib
import json
import math
import re
import time
from collections import Counter
from concurrent.futures import Future
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from strata_planner.contract.frames import NEVER, NOT_YET, Grammar, LogitRules, Open, Sampling, Segment
from strata_runtime.stage import sampler as module
from strata_runtime.stage.logit_rules import RuledSequence
from strata_runtime.stage.sampler import Sampler
from strata_runtime.structured.compiler import Compiler, GrammarError, Text, all_allowed, tokens_of
from strata_runtime.structured.tokenizer import read_tokenizer
from tests.laws import share

MODEL = Path(__file__).parents[3] / "examples" / "models" / "strata-tiny"
VOCABULARY = 4096
END = 3
BYTES = 260  # tokens before this one are single bytes, or no text
WORDS = 24  # tokens of the model without a tokenizer
SEQUENCE = 5
INF = math.inf


def logits_behind(tokens: list[int], vocabulary: int = WORDS) -> torch.Tensor:
    """Of a model that reads all tokens so far. One with a tokenizer likes what forms are made of: single bytes, and its end. [vocab]"""
    seed = int.from_bytes(hashlib.blake2b(repr(tokens).encode(), digest_size=6).digest(), "little")
    row = torch.randn(vocabulary, generator=torch.Generator().manual_seed(seed)) * 2
    row[END : BYTES if vocabulary > WORDS else END] += 5
    return row


def answer_of(
    sampling: Sampling,
    prompt: list[int],
    length: int,
    *,
    delivered: int = 0,
    cuts: Random | None = None,
    vocabulary: int = WORDS,
) -> list[int]:
    """Text as a sampler draws it. `cuts`: verify drafts, some of them right, in segments of several rows, given or drawn by it in steps that draft;
    the tokens that were drawn behind a wrong one are dropped, as the engine does.
    """
    whole = [] if not delivered and cuts is None else answer_of(sampling, prompt, length, vocabulary=vocabulary)
    tokens = prompt + whole[:delivered]
    sampler = Sampler(str(MODEL), vocabulary)
    sampler.open(Open(SEQUENCE, sampling, tuple(tokens), len(prompt)))
    while len(tokens) < len(prompt) + length:
        drafts: list[int] = []
        if cuts is not None:
            right = whole[len(tokens) - len(prompt) :][: cuts.randrange(4)]
            drafts = [token if cuts.random() < 0.7 else cuts.randrange(vocabulary) for token in right]
            if cuts.random() < 0.5:
                drafts = drafted_by(sampler, tokens, cuts, vocabulary)
        rows = torch.stack([logits_behind(tokens + drafts[:count], vocabulary) for count in range(len(drafts) + 1)])
        segment = Segment(SEQUENCE, len(tokens) - 1, len(rows), len(rows))
        for sampled, drafted in zip(sampler.sample([segment], rows), [*drafts, None], strict=True):
            if sampled.token == NOT_YET:
                break
            tokens.append(sampled.token)
            if sampled.token != drafted or sampled.token in (END, NEVER):
                break
        if tokens[-1] in (END, NEVER):
            break
    return tokens[len(prompt) : len(prompt) + length]


def drafted_by(sampler: Sampler, tokens: list[int], cuts: Random, vocabulary: int) -> list[int]:
    """What a model that reads fewer of the tokens draws one after the other."""
    drafts: list[int] = []
    for count in range(cuts.randrange(5)):
        row = logits_behind(tokens + drafts, vocabulary) + (cuts.random() < 0.4) * logits_behind(drafts, vocabulary)
        (sampled,) = sampler.sample([Segment(SEQUENCE, len(tokens) - 1 + count, 1, 1)], row[None])
        if sampled.token < 0:
            break
        drafts.append(sampled.token)
    return drafts


rules = st.builds(
    LogitRules,
    presence_penalty=st.sampled_from([0.0, 0.7, -1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.9, -0.4]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.8]),
    bias=st.lists(st.tuples(st.integers(0, WORDS - 1), st.floats(-5, 5)), max_size=3).map(tuple),
    bad_words=st.lists(st.lists(st.integers(4, WORDS - 1), min_size=1, max_size=3).map(tuple), max_size=4).map(tuple),
    min_tokens=st.integers(0, 6),
    ends=st.just((END,)),
)
samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.8]),
    top_p=st.sampled_from([1.0, 0.9]),
    min_p=st.sampled_from([0.0, 0.1]),
    seed=st.integers(0, 99),
    rules=rules,
)


@settings(max_examples=share(60), deadline=None)
@given(
    sampling=samplings,
    prompt=st.lists(st.integers(0, WORDS - 1), min_size=1, max_size=6),
    seed=st.integers(0, 999),
    delivered=st.integers(0, 9),
)
def test_rules_know_no_steps(sampling: Sampling, prompt: list[int], seed: int, delivered: int) -> None:
    whole = answer_of(sampling, prompt, 16)
    assert answer_of(sampling, prompt, 16, cuts=Random(seed)) == whole
    if delivered < len(whole):
        assert answer_of(sampling, prompt, 16, delivered=delivered, cuts=Random(seed)) == whole


@settings(max_examples=share(60), deadline=None)
@given(sampling=samplings, seed=st.integers(0, 99))
def test_an_answer_keeps_its_rules(sampling: Sampling, seed: int) -> None:
    asked = sampling.rules
    assert asked is not None
    answer = answer_of(sampling, [1, 2, seed % WORDS], 16)
    assert END not in answer[: asked.min_tokens]
    for word in asked.bad_words:
        assert not any(tuple(answer[start : start + len(word)]) == word for start in range(len(answer)))


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        (LogitRules(), [1.0, -1.0, 2.0, 0.5]),
        (LogitRules(presence_penalty=0.5), [1.0, -1.5, 1.5, 0.5]),
        (LogitRules(frequency_penalty=0.5), [1.0, -2.0, 1.5, 0.5]),
        (LogitRules(repetition_penalty=2.0), [0.5, -2.0, 1.0, 0.5]),
        (LogitRules(bias=((0, 3.0), (3, -100.0))), [4.0, -1.0, 2.0, -99.5]),
        (LogitRules(bad_words=((3,), (1, 0), (2, 2))), [-INF, -1.0, 2.0, -INF]),
        (LogitRules(bad_words=((2, 1, 2), (1, 2, 1), (0, 1, 2, 1, 3))), [1.0, -1.0, -INF, 0.5]),
        (LogitRules(min_tokens=4, ends=(3, 0)), [-INF, -1.0, 2.0, -INF]),
        (LogitRules(min_tokens=3, ends=(3, 0)), [1.0, -1.0, 2.0, 0.5]),
    ],
)
def test_rules_change_a_row_as_they_are_defined(rules: LogitRules, expected: list[float]) -> None:
    """Behind the prompt 0 and the answer 1 2 1. Presence, frequency and words: of the answer; repetition: of both."""
    logits = torch.tensor([1.0, -1.0, 2.0, 0.5])
    RuledSequence(rules, [0, 1, 2, 1], 1, None).change(logits)
    assert logits.tolist() == pytest.approx(expected)


def test_where_every_token_is_forbidden_there_is_none() -> None:
    sampling = Sampling(temperature=0, rules=LogitRules(bad_words=tuple((token,) for token in range(WORDS))))
    assert answer_of(sampling, [1], 4) == [NEVER]


def test_min_p_keeps_what_is_likely_enough() -> None:
    logits = torch.tensor([[0.6, 0.3, 0.08, 0.02]]).log()
    for least, kept in ((0.0, {0, 1, 2, 3}), (0.1, {0, 1, 2}), (0.4, {0, 1}), (1.0, {0})):
        for top_p, left in ((1.0, kept), (0.95, kept - {3})):
            seeded = [Sampling(seed=seed, min_p=least, top_p=top_p) for seed in range(400)]
            assert set(module.choose(logits.repeat(400, 1), seeded, [1] * 400)) == left


SCHEMA = '{"type": "object", "properties": {"age": {"type": "integer"}, "names": {"type": "array", "items": {"enum": ["a", "bc"]}, "maxItems": 2}}, "required": ["age", "names"]}'
GRAMMARS = {
    "json_schema": (SCHEMA, r'\{\s*"age"\s*:\s*-?\d+\s*,\s*"names"\s*:\s*\[.*\]\s*\}'),
    "regex": (r"(yes|no)[0-9]{3,5}", r"(yes|no)[0-9]{3,5}"),
    "ebnf": ('root ::= "x" root | "y"', "x*y"),
    "lark": ('start: "up" | "down"', "up|down"),
    "structural_tag": ('{"type": "structural_tag", "format": {"type": "const_string", "value": "hello"}}', "hello"),
}


@pytest.fixture(scope="module")
def grammar_compiler() -> Compiler:
    return Compiler(MODEL, VOCABULARY)


@pytest.mark.parametrize("kind", GRAMMARS)
def test_a_grammar_is_kept_however_the_text_is_cut(kind: str) -> None:
    text, pattern = GRAMMARS[kind]
    sampling = Sampling(
        temperature=0.9, seed=3, rules=LogitRules(grammar=Grammar(kind, text, (END,)), repetition_penalty=1.2)
    )
    answer = answer_of(sampling, [100, 200], 400, vocabulary=VOCABULARY)
    assert answer[-1] == END, "it ends by itself"
    assert re.fullmatch(pattern, read_tokenizer(MODEL).decode(answer[:-1]), re.DOTALL)
    assert answer_of(sampling, [100, 200], 400, cuts=Random(1), vocabulary=VOCABULARY) == answer
    assert (
        answer_of(sampling, [100, 200], 400, cuts=Random(2), delivered=len(answer) // 2, vocabulary=VOCABULARY)
        == answer
    )


leaves = st.sampled_from(
    [
        {"type": "integer", "minimum": -3},
        {"type": "boolean"},
        {"enum": ["red", "green", "greenish"]},
        {"type": "string", "maxLength": 6},
        {"type": "string", "pattern": "^[a-f]{2}(x|yz)*$"},
    ]
)
schemas = st.recursive(
    leaves,
    lambda inner: (
        st.builds(lambda item: {"type": "array", "items": item, "maxItems": 3}, inner)
        | st.builds(
            lambda parts: {"type": "object", "properties": parts, "required": list(parts)},
            st.dictionaries(st.sampled_from(["a", "bc", "def true", "ä"]), inner, min_size=1, max_size=3),
        )
    ),
    max_leaves=4,
)
regexes = st.recursive(
    st.sampled_from(["a", "bc", "[0-9]", "true", " ", "é", "."]),
    lambda inner: (
        st.builds("({}|{})".format, inner, inner)
        | st.builds("{}{}".format, inner, inner)
        | st.builds("({}){{1,3}}".format, inner)
    ),
    max_leaves=5,
)
grammars = st.builds(lambda schema: Grammar("json_schema", json.dumps(schema), (END,)), schemas) | st.builds(
    lambda text: Grammar("regex", text, (END,)), regexes
)
held = st.builds(
    lambda grammar, penalty, bias, least: LogitRules(
        grammar=grammar, repetition_penalty=penalty, bias=bias, min_tokens=least, ends=(END,)
    ),
    grammars,
    st.sampled_from([1.0, 1.0, 1.3]),
    st.sampled_from([(), ((END, 8.0),), ((100, 9.0), (34, 6.0))]),
    st.sampled_from([0, 0, 3]),
)
held_samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.7, 1.5]),
    top_p=st.sampled_from([1.0, 1.0, 0.9]),
    top_k=st.sampled_from([0, 0, 20, VOCABULARY]),
    min_p=st.sampled_from([0.0, 0.0, 0.1]),
    seed=st.integers(0, 99),
    rules=held,
)


def masked_answer_of(compiler: Compiler, sampling: Sampling, prompt: list[int], length: int) -> list[int]:
    """What masks say of every token before any is drawn, plainly."""
    assert sampling.rules is not None
    assert sampling.rules.grammar is not None
    text, answer = compiler.begin(sampling.rules.grammar), list[int]()
    while len(answer) < length and END not in answer:
        row = logits_behind(prompt + answer, VOCABULARY)
        RuledSequence(sampling.rules, prompt + answer, len(prompt), None).change(row)
        bits = all_allowed(1, VOCABULARY)
        text.allow(bits)
        is_allowed = torch.from_numpy(np.unpackbits(bits.view(np.uint8), bitorder="little").astype(bool))
        masked = torch.where(is_allowed, row, -INF)
        if masked.amax() == -INF:
            return [*answer, NEVER]
        where = ([sampling], [len(prompt) + len(answer) - 1])
        if sampling.temperature == 0 or module.is_filtered(sampling):
            (token,) = module.choose(masked[None], *where)
        else:
            (token,) = module.choose(row[None], *where)
            if not is_allowed[token]:
                (token,) = module.choose(masked[None], *where, 1)
        assert text.accept(token)
        answer.append(token)
    return answer


@settings(max_examples=share(80), deadline=None)
@given(sampling=held_samplings, seed=st.integers(0, 999))
def test_a_held_answer_is_that_of_masks(sampling: Sampling, seed: int) -> None:
    """Whatever form, temperature and filters, drafts or none: no token is masked before it is drawn where that is enough."""
    prompt = [100, 200]
    expected = masked_answer_of(held_compiler(), sampling, prompt, 24)
    assert answer_of(sampling, prompt, 24, vocabulary=VOCABULARY) == expected
    assert answer_of(sampling, prompt, 24, cuts=Random(seed), vocabulary=VOCABULARY) == expected


@functools.cache
def held_compiler() -> Compiler:
    return Compiler(MODEL, VOCABULARY)


@settings(max_examples=share(30, 6), deadline=None)
@given(grammar=grammars, seed=st.integers(0, 999))
def test_a_form_takes_what_its_mask_allows(grammar: Grammar, seed: int) -> None:
    """Of every token at every place, and asking changes nothing."""
    chosen, text = Random(seed), held_compiler().begin(grammar)
    for _ in range(12):
        told = [all_allowed(1, VOCABULARY) for _ in range(2)]
        text.allow(told[0])
        (allowed,) = tokens_of(told[0], VOCABULARY)
        taken = []
        for token in range(VOCABULARY):
            if text.accept(token):
                text.go_back(1)
                taken.append(token)
        assert taken == allowed.tolist()
        text.allow(told[1])
        assert (told[0] == told[1]).all()
        if not (further := [token for token in taken if token != END]):
            break
        assert text.accept(chosen.choice(further))


def test_on_a_gpu_the_same_tokens_are_left() -> None:
    logits, tokens = torch.stack([logits_behind([row]) for row in range(3)]), [[1, 5, 23], [], [7]]
    asked = (logits, [2, 0, 1], [np.array(those, np.int64) for those in tokens])
    left = module._gathered(*asked, 3)
    assert torch.equal(left, module._logits_of(*asked))
    assert left.tolist() == [logits[2, tokens[0]].tolist(), [-INF] * 3, [float(logits[1, 7]), -INF, -INF]]


def test_masks_are_made_only_where_the_first_draw_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    masks: list[int] = []
    allow = Text.allow
    monkeypatch.setattr(Text, "allow", lambda self, bits, row=0: (masks.append(row), allow(self, bits, row)))
    asked = Sampling(temperature=0, rules=LogitRules(grammar=Grammar("regex", "[a-c]{30}", (END,))))
    first = answer_of(asked, [100], 12, vocabulary=VOCABULARY)
    assert 0 < len(masks) <= 12
    made = len(masks)
    assert asked.rules is not None
    liked = structs.replace(asked.rules, bias=tuple((token, 50.0) for token in set(first)))
    answer_of(structs.replace(asked, rules=liked), [100], 12, vocabulary=VOCABULARY)
    assert len(masks) == made


def test_tokens_are_as_likely_as_among_those_that_are_allowed() -> None:
    """Drawn from all and again from the allowed ones: 1,000 seeds, within four deviations."""
    rules = LogitRules(grammar=Grammar("regex", "[ace]", (END,)))
    row = logits_behind([7], VOCABULARY)
    allowed = read_tokenizer(MODEL).convert_tokens_to_ids(["a", "c", "e"])
    row[allowed] = row.amax() + torch.tensor([2.0, 1.0, 0.0])
    assert 0.2 < float(row.softmax(dim=-1)[allowed].sum()) < 0.8, "of first draws"
    sampler = Sampler(str(MODEL), VOCABULARY)
    for seed in range(1000):
        sampler.open(Open(seed, Sampling(temperature=1, seed=seed, rules=rules), (1,), 1))
    segments = [Segment(seed, 0, 1, 1) for seed in range(1000)]
    while NOT_YET in (drawn := [each.token for each in sampler.sample(segments, row.expand(1000, -1))]):
        pass  # its grammars are being compiled
    counts = Counter(drawn)
    shares = row[allowed].softmax(dim=-1)
    for token, likely in zip(allowed, shares.tolist(), strict=True):
        assert counts[token] == pytest.approx(1000 * likely, abs=4 * math.sqrt(1000 * likely * (1 - likely)) + 1)


def test_tokens_without_a_text_are_refused_in_silence(capfd: pytest.CaptureFixture[str]) -> None:
    """Rows of the embedding beyond the vocabulary, which xgrammar would complain about in the log; also where a form names one."""
    named = '{"type": "structural_tag", "format": {"type": "token", "token": 4100}}'
    for grammar in (Grammar("regex", ".*", (END,)), Grammar("structural_tag", named, (END,))):
        text, bits = Compiler(MODEL, VOCABULARY + 8).begin(grammar), all_allowed(1, VOCABULARY + 8)
        text.allow(bits)
        silent = range(VOCABULARY, VOCABULARY + 8)
        assert not any(text.accept(token) for token in silent)
        assert not set(silent) & set(tokens_of(bits, VOCABULARY + 8)[0].tolist())
    assert "special" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("json_schema", '{"type": 5}'),
        ("regex", "(a"),
        ("ebnf", "root ::= "),
        ("lark", "start:: 5"),
        ("structural_tag", "{}"),
    ],
)
def test_what_is_no_grammar_ends_the_request(kind: str, text: str, grammar_compiler: Compiler) -> None:
    with pytest.raises(GrammarError):
        grammar_compiler.compile(Grammar(kind, text, (END,)))
    sampling = Sampling(temperature=0, rules=LogitRules(grammar=Grammar(kind, text, (END,))))
    assert answer_of(sampling, [1], 4, vocabulary=VOCABULARY) == [NEVER]


@pytest.mark.slow
def test_a_text_that_takes_too_long_ends() -> None:
    """Each token of it takes a third longer than the one before: thirty would hold up all other sequences for a minute."""
    grammar = Grammar("regex", functools.reduce(lambda inner, _: f"({inner}{{1,100}})", range(6), "a"), (END,))
    rules = LogitRules(grammar=grammar, min_tokens=100, ends=(END,))
    started = time.thread_time()
    answer = answer_of(Sampling(temperature=0, rules=rules), [1], 100, vocabulary=VOCABULARY)
    assert answer[-1] == NEVER
    assert time.thread_time() - started < 5


def test_what_a_grammar_allows_does_not_depend_on_others(grammar_compiler: Compiler) -> None:
    """Two whose rules differ in what xgrammar 0.2.8 does not look at when it finds parts that it has compiled before."""
    recursive = (
        'root ::= r1 [a-c] | "k"\nr0 ::= (r1 | "q") r1 (r1 | "q") | (r1 | "q") | "k"\nr1 ::= r0 "z"{{1,{0}}} | "k"'
    )
    texts = [f"root ::= Token({token})" for token in (5, 7)] + [recursive.format(most) for most in (2, 8)]
    tag = '{{"type": "structural_tag", "format": {{"type": "token", "token": {0}}}}}'
    grammars = [Grammar("ebnf", text, (END,)) for text in texts]
    grammars += [Grammar("structural_tag", tag.format(token), (END,)) for token in (5, 7)]
    for grammar in grammars:
        told = [all_allowed(1, VOCABULARY) for _ in range(2)]
        grammar_compiler.begin(grammar).allow(told[0])
        Compiler(MODEL, VOCABULARY).begin(grammar).allow(told[1])
        assert (told[0] == told[1]).all(), grammar.text


def test_while_a_grammar_is_compiled_nothing_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others are drawn all the same."""
    compiling: Future[None] = Future()
    monkeypatch.setattr(module._compiling, "submit", lambda *_: compiling)
    sampler = Sampler(str(MODEL), WORDS)
    ruled = Sampling(temperature=0, rules=LogitRules(grammar=Grammar("regex", "a", (END,))))
    sampler.open(Open(1, ruled, (1, 2), 2))
    sampler.open(Open(2, Sampling(temperature=0)))
    rows = torch.stack([logits_behind([1]), logits_behind([2])])
    tokens = [each.token for each in sampler.sample([Segment(1, 0, 2, 1), Segment(2, 0, 1, 1)], rows)]
    assert tokens == [NOT_YET, int(rows[1].argmax())]
    compiling.set_exception(GrammarError("none"))
    assert [each.token for each in sampler.sample([Segment(1, 0, 2, 1)], rows[:1])] == [NEVER]


def test_a_prompts_own_tokens_are_scored_where_it_goes_on() -> None:
    """Beside a sequence that is drawn from; the last row is behind the prompt, and drawn as well."""
    prompt = (3, 7, 7, 1)
    sampler = Sampler(str(MODEL), WORDS)
    sampler.open(Open(1, Sampling(temperature=0, prompt_logprobs=2), prompt, len(prompt)))
    sampler.open(Open(2, Sampling(temperature=0)))
    rows = torch.stack([logits_behind([number]) for number in range(5)])
    segments = [Segment(2, 9, 1, 1), Segment(1, 0, 4, 4)]
    other, *scored, drawn = sampler.sample(segments, rows)
    assert (other.token, other.logprob, drawn.token) == (int(rows[0].argmax()), 0.0, int(rows[4].argmax()))
    for place, each in enumerate(scored, 1):
        logs = rows[place].log_softmax(dim=-1)
        assert (each.token, each.logprob) == (prompt[place], pytest.approx(float(logs[prompt[place]])))
        order = logs.argsort(descending=True).tolist()
        assert each.rank == order.index(prompt[place]) + 1
        assert [token for token, _ in each.top] == order[:2]
