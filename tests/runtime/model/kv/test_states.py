"""State of sequences: the bytes that the contract counts, one slot each, from zeros at position 0, and on from where it is or not at all."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from strata_planner.contract.frames import Segment
from strata_planner.contract.kv import kv_token_bytes
from strata_planner.contract.sequence_state import SequenceState
from strata_runtime.errors import StepError
from strata_runtime.model.kv.states import TOKENS_AT_ONCE, StatePool
from tests.runtime.dealt import DealtCache

STATES = {1: SequenceState(8, 2), 3: SequenceState(6, 3, heads=2, key_dim=4, value_dim=5)}
CPU = torch.device("cpu")
SLOTS = 3


def a_pool(slots: int = SLOTS) -> StatePool:
    return StatePool(STATES, slots, torch.float32, CPU)


def a_cache() -> DealtCache:
    return DealtCache(
        num_layers=4,
        first_layer=0,
        pages=10,
        page_tokens=4,
        kv_heads=2,
        head_dim=8,
        dtype=torch.bfloat16,
        device=CPU,
        states=STATES,
        state_slots=SLOTS,
    )


def test_a_cache_takes_the_bytes_that_are_counted() -> None:
    kv = 2 * 10 * 4 * kv_token_bytes(16, 2, 8, "bfloat16")
    assert a_cache().bytes == kv + SLOTS * sum(each.bytes("bfloat16") for each in STATES.values())


def test_layers_have_keys_and_values_or_state() -> None:
    batch = a_cache().plan([Segment(0, 0, 5, 0)])
    assert (set(batch.layers), set(batch.states)) == ({0, 2}, {1, 3})


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from(["begin", "go on", "free"])), max_size=40))
def test_every_sequence_has_a_state_of_its_own_that_begins_at_zero(order: list[tuple[int, str]]) -> None:
    """Each segment leaves its sequence's number and position behind; what it finds is what the one before left."""
    pool, ends = a_pool(), dict[int, int]()
    state = pool.layers[3]
    for sequence, what in order:
        if what == "free":
            pool.free(sequence)
            ends.pop(sequence, None)
            continue
        start = ends.get(sequence, 0) if what == "go on" else 0
        if sequence not in ends and len(ends) == SLOTS:
            with pytest.raises(StepError, match=f"none of {SLOTS} states free"):
                pool.plan([Segment(sequence, start, 1, 1)])
            continue
        (run,) = pool.plan([Segment(sequence, start, 1, 1)])
        found = {float(each) for each in (state.inputs[run.slots].unique(), state.matrices[run.slots].unique())}
        assert found == {0.0 if start == 0 else 100.0 * sequence + start}
        ends[sequence] = start + 1
        state.inputs[run.slots] = state.matrices[run.slots] = 100.0 * sequence + ends[sequence]


@pytest.mark.parametrize("start", [2, 4, 9])
def test_a_segment_that_does_not_go_on_where_the_state_is_is_an_error(start: int) -> None:
    cache = a_cache()
    cache.plan([Segment(7, 0, 3, 0)])
    with pytest.raises(StepError, match=f"sequence 7: its segment starts at position {start} and its state is at 3"):
        cache.plan([Segment(7, start, 1, 1)])


def test_a_state_that_nobody_has_begun_is_an_error() -> None:
    with pytest.raises(StepError, match="starts at position 4 and its state is at 0"):
        a_pool().plan([Segment(7, 4, 1, 1)])


def test_a_new_epoch_begins_without_states() -> None:
    cache = a_cache()
    cache.plan([Segment(sequence, 0, 2, 0) for sequence in range(SLOTS)])
    cache.reset()
    with pytest.raises(StepError, match="its state is at 0"):
        cache.plan([Segment(0, 2, 1, 1, (0,))])
    cache.plan([Segment(sequence, 0, 2, 0) for sequence in range(SLOTS, 2 * SLOTS)])


def test_one_segment_of_a_sequence_in_a_step() -> None:
    with pytest.raises(StepError, match="two segments in one step"):
        a_pool().plan([Segment(0, 0, 1, 0), Segment(0, 1, 1, 1)])


def test_single_tokens_pass_together_and_long_segments_a_part_at_a_time() -> None:
    segments = [Segment(0, 0, 1, 1), Segment(1, 0, TOKENS_AT_ONCE + 2, 0), Segment(2, 0, 1, 1)]
    runs = a_pool().plan(segments)
    assert [(run.count, run.length) for run in runs] == [(1, TOKENS_AT_ONCE), (1, 2), (2, 1)]
    rows = torch.cat([torch.arange(TOKENS_AT_ONCE + 4)[run.rows] for run in runs])
    assert sorted(rows.tolist()) == list(range(TOKENS_AT_ONCE + 4))


def test_a_model_without_state_has_none_to_run_out_of() -> None:
    pool = StatePool({}, 0, torch.float32, CPU)
    assert pool.plan([Segment(sequence, 5, 1, 1) for sequence in range(9)]) == ()
    assert pool.bytes == 0
