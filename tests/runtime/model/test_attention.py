"""The law of the cache: any packing of steps gives each token what plain attention over its whole sequence gives."""

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strata_planner.contract.frames import Segment
from strata_runtime.model import attention
from strata_runtime.model.attention import attend
from strata_runtime.model.attention_rule import AttentionRule
from strata_runtime.model.kv import batch as batch_module
from tests.laws import share
from tests.runtime.dealt import DealtCache

WIDTH = 8
LAYERS = range(3, 5)  # global numbers: a slot's layers need not start at 0


def a_cache(
    kv_heads: int,
    pages: int = 64,
    page_tokens: int = 4,
    dtype: torch.dtype = torch.float32,
    *,
    page_major: bool = False,
) -> DealtCache:
    return DealtCache(
        num_layers=len(LAYERS),
        first_layer=LAYERS[0],
        pages=pages,
        page_tokens=page_tokens,
        kv_heads=kv_heads,
        head_dim=WIDTH,
        dtype=dtype,
        device=torch.device("cpu"),
        page_major=page_major,
    )


@dataclass
class Text:
    """Queries, keys and values of one whole sequence: [heads, tokens, width]."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


def a_text(seed: int, length: int, heads: int, kv_heads: int, dtype: torch.dtype = torch.float32) -> Text:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(heads, length, WIDTH), (kv_heads, length, WIDTH), (kv_heads, length, WIDTH)]
    return Text(*(torch.randn(shape, generator=generator).to(dtype) for shape in shapes))


def plain_attention(text: Text, rule: AttentionRule) -> torch.Tensor:
    """[tokens, heads, width], written out: one product, one mask, one softmax."""
    group = text.query.shape[0] // text.key.shape[0]
    key, value = text.key.repeat_interleave(group, 0).float(), text.value.repeat_interleave(group, 0).float()
    scores = text.query.float() @ key.transpose(1, 2) * rule.scale
    if rule.soft_cap is not None:
        scores = torch.tanh(scores / rule.soft_cap) * rule.soft_cap
    place = torch.arange(scores.shape[-1])
    if rule.slopes is not None:
        scores += rule.slopes[:, None, None] * (place - place[:, None])
    seen = place <= place[:, None]
    if rule.window is not None:
        seen &= place > place[:, None] - rule.window
    if rule.chunk is not None:
        seen &= place // rule.chunk == place[:, None] // rule.chunk
    scores = scores.masked_fill(~seen, float("-inf"))
    if rule.sinks is not None:
        scores = torch.cat((scores, rule.sinks[:, None, None].expand(-1, len(place), 1)), dim=-1)
    return (scores.softmax(-1)[..., : len(place)] @ value).transpose(0, 1)


def run_step(
    cache: DealtCache, texts: dict[int, Text], segments: list[Segment], rule: AttentionRule
) -> dict[int, torch.Tensor]:
    """One step through both layers; the attention of each segment's tokens in the last one."""
    batch = cache.plan(segments)

    def packed(name: str) -> torch.Tensor:
        return torch.cat([getattr(texts[s.sequence], name)[:, s.start : s.start + s.length] for s in segments], dim=1)

    for layer in LAYERS:
        out = attend(batch, layer, packed("query"), packed("key"), packed("value"), rule)
    return dict(zip([s.sequence for s in segments], out.split([s.length for s in segments]), strict=True))


rules = st.builds(
    AttentionRule,
    scale=st.just(0.3),
    window=st.none() | st.integers(1, 12),
    soft_cap=st.none() | st.just(1.5),
) | st.builds(AttentionRule, scale=st.just(0.3), chunk=st.integers(1, 12))


def with_terms(rule: AttentionRule, terms: str | None, heads: int) -> AttentionRule:
    """With slopes or sinks, unlike for every head."""
    return replace(rule, **{terms: torch.arange(1, heads + 1) * 0.25}) if terms else rule


@settings(deadline=None, max_examples=share(60))
@given(
    data=st.data(),
    heads=st.sampled_from([(2, 2), (4, 2), (3, 1)]),
    rule=rules,
    terms=st.none() | st.sampled_from(["slopes", "sinks"]),
    page_tokens=st.sampled_from([1, 4, 16]),
    page_major=st.booleans(),
)
def test_any_schedule_equals_plain_attention(
    data: st.DataObject,
    heads: tuple[int, int],
    rule: AttentionRule,
    terms: str | None,
    page_tokens: int,
    page_major: bool,  # noqa: FBT001
) -> None:
    rule = with_terms(rule, terms, heads[0])
    cache = a_cache(heads[1], pages=-(-120 // page_tokens) + 4, page_tokens=page_tokens, page_major=page_major)
    texts = {sequence: a_text(sequence, 28, *heads) for sequence in range(4)}
    expected = {sequence: plain_attention(text, rule) for sequence, text in texts.items()}
    written = dict.fromkeys(texts, 0)
    for _ in range(data.draw(st.integers(1, 6), label="steps")):
        chosen = data.draw(st.lists(st.sampled_from(sorted(texts)), min_size=1, unique=True), label="sequences")
        segments = []
        for sequence in chosen:
            start = max(0, written[sequence] - data.draw(st.integers(0, 2), label="rejected"))
            length = data.draw(st.sampled_from([1, 1, 2, 7]), label="length")
            if start + length <= 28:
                segments.append(Segment(sequence, start, length, 1))
        if not segments:
            continue
        outputs = run_step(cache, texts, segments, rule)
        for segment in segments:
            end = segment.start + segment.length
            written[segment.sequence] = end
            want = expected[segment.sequence][segment.start : end]
            torch.testing.assert_close(outputs[segment.sequence], want, atol=1e-5, rtol=0)


def test_soft_capped_scores_some_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    rule = AttentionRule(scale=0.3, soft_cap=1.5)
    text = a_text(0, 28, 4, 2)
    monkeypatch.setattr("strata_runtime.model.written_scores.SCORES_BYTES", 8 * 4 * 28 * 5)  # five rows
    cache = a_cache(2, pages=8, page_tokens=16)
    first = run_step(cache, {0: text}, [Segment(0, 0, 13, 1)], rule)[0]
    second = run_step(cache, {0: text}, [Segment(0, 13, 15, 1)], rule)[0]
    torch.testing.assert_close(torch.cat([first, second]), plain_attention(text, rule), atol=1e-5, rtol=0)


def test_masked_rows_some_at_a_time_make_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "MASK_BYTES", 1)
    monkeypatch.setattr(attention, "_ROWS_TOGETHER", 3)
    text, rule = a_text(3, 21, 4, 2), AttentionRule(scale=0.3)
    cache = a_cache(2)
    run_step(cache, {0: text}, [Segment(0, 0, 5, 0)], rule)
    found = run_step(cache, {0: text}, [Segment(0, 5, 16, 0)], rule)[0]
    torch.testing.assert_close(found, plain_attention(text, rule)[5:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)], ids=["one query a head", "grouped"])
@pytest.mark.parametrize("terms", [None, "slopes", "sinks"])
def test_decode_in_company_equals_decode_alone(dtype: torch.dtype, heads: tuple[int, int], terms: str | None) -> None:
    rule = with_terms(AttentionRule(0.3), terms, heads[0])
    texts = {sequence: a_text(sequence, 40, *heads, dtype) for sequence in range(6)}
    lengths = {0: 1, 1: 39, 2: 12, 3: 38, 4: 5, 5: 20}
    together = a_cache(heads[1], pages=80, dtype=dtype)
    run_step(together, texts, [Segment(s, 0, n, 0) for s, n in lengths.items()], rule)
    batched = run_step(together, texts, [Segment(s, n, 1, 1) for s, n in lengths.items()], rule)
    tolerance = 1e-6 if dtype is torch.float32 else 2e-2
    for sequence, length in lengths.items():
        alone = a_cache(heads[1], dtype=dtype)
        run_step(alone, texts, [Segment(sequence, 0, length, 0)], rule)
        single = run_step(alone, texts, [Segment(sequence, length, 1, 1)], rule)[sequence]
        torch.testing.assert_close(batched[sequence], single, atol=tolerance, rtol=0)
        torch.testing.assert_close(
            single.float(), plain_attention(texts[sequence], rule)[length : length + 1], atol=tolerance, rtol=0
        )


def test_groups_stay_within_their_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {sequence: a_text(sequence, 64, 2, 2) for sequence in range(8)}
    cache = a_cache(2, pages=200)
    rule = AttentionRule(0.3)
    run_step(cache, texts, [Segment(s, 0, 40 + 2 * s, 0) for s in texts], rule)
    page_bytes = 2 * 2 * WIDTH * 4 * 4
    monkeypatch.setattr(batch_module, "DECODE_GROUP_BYTES", 30 * page_bytes)
    segments = [Segment(s, 40 + 2 * s, 1, 1) for s in texts]
    parts = cache.plan(segments).parts()
    assert len(parts) == 4
    assert all(part.pages is not None and part.pages.numel() <= 30 for part in parts)
    outputs = run_step(cache, texts, segments, rule)
    for s in texts:
        want = plain_attention(texts[s], rule)[40 + 2 * s]
        torch.testing.assert_close(outputs[s][0], want, atol=1e-5, rtol=0)


def test_what_lies_behind_a_segments_start_is_written_over() -> None:
    """As after rejected drafts: other tokens take the positions of those that were written."""
    rule = AttentionRule(0.3)
    cache = a_cache(2)
    drafted, other = a_text(1, 20, 2, 2), a_text(2, 20, 2, 2)
    kept = Text(
        *(torch.cat((getattr(drafted, n)[:, :9], getattr(other, n)[:, 9:]), 1) for n in ("query", "key", "value"))
    )
    run_step(cache, {1: drafted}, [Segment(1, 0, 16, 0)], rule)
    outputs = run_step(cache, {1: kept}, [Segment(1, 9, 4, 1)], rule)
    torch.testing.assert_close(outputs[1], plain_attention(kept, rule)[9:13], atol=1e-5, rtol=0)


def test_the_pool_takes_exactly_its_bytes() -> None:
    cache = a_cache(3, pages=10, page_tokens=16, dtype=torch.bfloat16)
    assert cache.bytes == 2 * len(LAYERS) * 10 * 16 * 3 * WIDTH * 2


@settings(deadline=None, max_examples=share(40))
@given(data=st.data(), rule=rules, page_tokens=st.sampled_from([1, 4]))
def test_what_another_sequence_computed_is_as_good_as_ones_own(
    data: st.DataObject, rule: AttentionRule, page_tokens: int
) -> None:
    """Blocks of a prefix in two tables, also while the first sequence computes them: in the same step, or a step before."""
    shared = page_tokens * data.draw(st.integers(1, 12 // page_tokens), label="shared blocks")
    first, own = a_text(1, 28, 2, 2), a_text(2, 28, 2, 2)
    second = Text(
        *(torch.cat((getattr(first, n)[:, :shared], getattr(own, n)[:, shared:]), 1) for n in ("query", "key", "value"))
    )
    cache = a_cache(2, page_tokens=page_tokens)
    length = data.draw(st.integers(shared, 27), label="of the first")
    of_first, of_second = cache.own.deal([Segment(1, 0, length, 0), Segment(2, 0, 28, 0)])
    count = shared // page_tokens
    table = (*of_first.blocks[:count], *of_second.blocks[count:])
    segments = [of_first, Segment(2, shared, 28 - shared, 0, table)]
    steps = [segments] if data.draw(st.booleans(), label="in one step") else [[each] for each in segments]
    outputs: dict[int, torch.Tensor] = {}
    for step in steps:
        outputs |= run_step(cache, {1: first, 2: second}, step, rule)
    torch.testing.assert_close(outputs[2], plain_attention(second, rule)[shared:], atol=1e-5, rtol=0)


def test_rows_wanted_are_the_last_of_each_segment() -> None:
    batch = a_cache(1).plan([Segment(1, 0, 5, 0), Segment(2, 0, 3, 2), Segment(3, 0, 1, 1)])
    assert batch.sample_rows.tolist() == [6, 7, 8]
    assert batch.positions.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 0]


@pytest.mark.parametrize("steps", [[(0, 21)], [(0, 7), (7, 13), (20, 1)]], ids=["at once", "in steps"])
def test_nothing_before_the_first_position_is_seen(steps: list[tuple[int, int]]) -> None:
    """What lies there is as if it were not: the others' attention is that of a text without it."""
    text, rule = a_text(4, 21, 4, 2), AttentionRule(0.3, first=3)
    cache = a_cache(2)
    found = torch.cat([run_step(cache, {0: text}, [Segment(0, *each, 0)], rule)[0] for each in steps])
    rest = Text(*(getattr(text, name)[:, 3:] for name in ("query", "key", "value")))
    torch.testing.assert_close(found[3:], plain_attention(rest, AttentionRule(0.3)), atol=1e-5, rtol=0)
