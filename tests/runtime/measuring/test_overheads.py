"""What figures of steps come to: the costs that they are made of are found again. That steps are run as slots run them, see test_measure.py."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata_planner.contract.formats import COMPUTE_TYPE_BYTES, ComputeType
from strata_runtime.measuring.overheads import HEAD_DIM, HEADS, KV_HEADS, Handled, Steps, told
from strata_runtime.measuring.profiling.stage import Taken
from tests.laws import share

SECONDS = st.floats(1e-7, 1e-3)
FEW, MANY, SHORT, LONG, CHUNK = 1, 8, 64, 448, 56
OF_A_KEY = 2 * HEADS * HEAD_DIM  # operations of a row with half a key: what a row sees of its own prompt


@settings(max_examples=share(60), deadline=None)
@given(
    layers=st.tuples(SECONDS, SECONDS),
    sequence=SECONDS,
    key=st.floats(1e-9, 1e-6),
    operation=st.floats(1e-12, 1e-9),
    row=SECONDS,
    chunk=SECONDS,
    step=SECONDS,
    handled=st.tuples(SECONDS, SECONDS),
    compute_type=st.sampled_from(["float32", "bfloat16"]),
)
def test_the_costs_that_steps_are_made_of_are_found_again(
    *,
    layers: tuple[float, float],
    sequence: float,
    key: float,
    operation: float,
    row: float,
    chunk: float,
    step: float,
    handled: tuple[float, float],
    compute_type: ComputeType,
) -> None:
    thin, narrow = layers

    def decoding(layer: float, sequences: int, keys: int, own: float = sequence) -> Taken:
        return Taken(layer + sequences * (own + keys * key), step / 2 + sequences * step, step / 2)

    def prompts(count: int, tokens: int) -> Taken:
        return Taken(narrow + count * tokens * (row + operation * OF_A_KEY * tokens), 0.0, 0.0)

    wide = 3 * sequence  # products of a row
    many, (once, each) = decoding(narrow, MANY, SHORT, wide), handled
    steps = Steps(
        few=decoding(thin, FEW, SHORT),
        several=decoding(thin, MANY, SHORT),
        one=decoding(narrow, FEW, SHORT, wide),
        many=many,
        long=decoding(narrow, MANY, LONG, wide),
        carrying=Taken(many.layer + CHUNK * (row + operation * OF_A_KEY * CHUNK) + chunk, 0.0, 0.0),
        prompt=prompts(1, 64),
        prompts=prompts(4, 64),
        whole=prompts(1, 256),
        heads=(step + FEW * row, step + MANY * row),
        variation=0.1,
    )
    found = told(steps, (Handled(once + each, 1), Handled(once + 5 * each, 5)), compute_type, on_cpu=True)

    def near(value: float) -> object:
        return pytest.approx(value, rel=1e-3, abs=1e-9)

    assert found.layer == near(thin)
    assert found.sequence_layer == near(sequence)
    a_key = 2 * KV_HEADS * HEAD_DIM * COMPUTE_TYPE_BYTES[compute_type]
    assert a_key / found.attention_bytes_per_second == pytest.approx(key, rel=1e-3)
    assert 1 / found.attention_flops_per_second == pytest.approx(operation, rel=1e-3)
    assert found.row == near(row)
    assert found.chunk == near(chunk)
    assert found.step == near(2 * step + once)
    assert found.sequence_step == near(step + each)
    assert found.sampled_row == near(row)
    assert found.variation == 0.1


@pytest.mark.parametrize("on_cpu", [True, False])
def test_of_a_gpu_prompts_are_as_products_are(*, on_cpu: bool) -> None:
    few, many, most, all_ = (Taken(seconds, 0.1, 0.1) for seconds in (1.0, 2.0, 3.0, 9.0))
    steps = Steps(few, many, few, many, most, all_, few, many, most, (0.1, 0.2), 0.3)
    found = told(steps, (Handled(1e-3, 1), Handled(2e-3, 5)), "bfloat16", on_cpu=on_cpu)
    of_prompts = (found.attention_flops_per_second, found.row, found.chunk, found.variation)
    assert all(each != 0 for each in of_prompts) if on_cpu else of_prompts == (0.0, 0.0, 0.0, 0.0)
