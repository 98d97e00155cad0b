"""Counts of drafts: what acceptance they tell, how they are added up from run to run, and which files are not believed."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata_planner.contract.acceptance import (
    FEWEST_DRAFT_TOKENS,
    HALVING_DRAFT_TOKENS,
    RECORD_VERSION,
    AcceptanceRecord,
    DraftCounts,
    expected_tokens,
)
from strata_planner.contract.plan import Speculation
from strata_planner.contract.values import ContractError

WISH = Speculation("selfPrecision", 4, 4)
RECORD = AcceptanceRecord(RECORD_VERSION, "a", WISH, DraftCounts(1000, 4000, 3000, 5000), "2026-01-31")


@st.composite
def some_counts(draw: st.DrawFn) -> DraftCounts:
    """Of verifications of up to 15 drafts each."""
    verifications = draw(st.integers(1, 100_000))
    drafted = draw(st.integers(verifications, 15 * verifications))
    accepted = draw(st.integers(0, drafted))
    return DraftCounts(verifications, drafted, accepted, draw(st.integers(verifications + accepted, 10**7)))


@given(st.floats(0, 1), st.integers(0, 15))
def test_expected_tokens_are_the_sum_of_powers(acceptance: float, drafts: int) -> None:
    told = sum(acceptance**count for count in range(drafts + 1))
    assert expected_tokens(acceptance, drafts) == pytest.approx(told, rel=1e-6)


@given(some_counts())
def test_the_acceptance_explains_what_was_counted(counts: DraftCounts) -> None:
    told = expected_tokens(counts.acceptance, counts.mean_drafts)
    assert told == pytest.approx(1 + counts.accepted_tokens / counts.verifications, rel=1e-6)
    assert 0 <= counts.acceptance <= 1
    assert 0 < counts.guessed <= 1


@given(some_counts(), some_counts())
def test_merged_counts_can_be_and_lie_between(old: DraftCounts, new: DraftCounts) -> None:
    merged = msgspec.structs.replace(RECORD, counts=old).merged(new, "2026-02-01").counts
    assert merged.accepted_tokens <= merged.draft_tokens
    assert merged.verifications <= merged.draft_tokens
    shares = sorted(each.accepted_tokens / each.draft_tokens for each in (old, new))
    slack = 2 / merged.draft_tokens  # counts are whole
    assert shares[0] - slack <= merged.accepted_tokens / merged.draft_tokens <= shares[1] + slack


def test_counts_add_and_old_ones_fade_by_half() -> None:
    few = DraftCounts(10, 40, 30, 50)
    assert RECORD.merged(few, "2026-02-01").counts.draft_tokens == pytest.approx(4040, rel=0.01)
    many = DraftCounts(HALVING_DRAFT_TOKENS // 4, HALVING_DRAFT_TOKENS, 0, HALVING_DRAFT_TOKENS)
    merged = RECORD.merged(many, "2026-02-01")
    assert merged.counts.accepted_tokens == RECORD.counts.accepted_tokens / 2
    assert merged.measured_on == "2026-02-01"


def test_what_has_come_since_is_never_below_nothing() -> None:
    assert DraftCounts(5, 20, 10, 30).since(DraftCounts(2, 8, 3, 10)) == DraftCounts(3, 12, 7, 20)
    assert DraftCounts(1, 4, 2, 5).since(DraftCounts(2, 8, 3, 10)) == DraftCounts()


def test_a_record_reads_as_it_was_written() -> None:
    assert AcceptanceRecord.decode(RECORD.encode(), "a", WISH).counts == RECORD.counts


FEW = msgspec.structs.replace(RECORD, counts=DraftCounts(100, FEWEST_DRAFT_TOKENS - 1, 100, 400))
WRONG = msgspec.structs.replace(RECORD, counts=DraftCounts(1000, 4000, 4001, 9000))
NEWER = msgspec.structs.replace(RECORD, version=RECORD_VERSION + 1)


@pytest.mark.parametrize(
    ("data", "model", "wish"),
    [
        pytest.param(RECORD.encode()[:-20], "a", WISH, id="half written"),
        pytest.param(RECORD.encode().replace(b"3000", b"3001"), "a", WISH, id="altered"),
        pytest.param(b"\xff", "a", WISH, id="no text"),
        pytest.param(RECORD.encode(), "b", WISH, id="another model"),
        pytest.param(RECORD.encode(), "a", Speculation("selfPrecision", 5, 4), id="another wish"),
        pytest.param(NEWER.encode(), "a", WISH, id="another version"),
        pytest.param(FEW.encode(), "a", WISH, id="too few"),
        pytest.param(WRONG.encode(), "a", WISH, id="more right than drafted"),
    ],
)
def test_what_cannot_be_believed_is_refused(data: bytes, model: str, wish: Speculation) -> None:
    with pytest.raises(ContractError):
        AcceptanceRecord.decode(data, model, wish)
