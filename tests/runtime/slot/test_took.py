"""What a slot's process says of its own start and first load."""

import pytest

from strata_planner.contract.control import PrepareState, Took
from strata_runtime.slot.took import FirstLoad

NONE = PrepareState(epoch=0, phase="none")
LOADING = PrepareState(epoch=1, phase="loading", layers_total=4)
PREPARED = PrepareState(epoch=1, phase="prepared", layers_total=4, layers_loaded=4)
REFUSED = PrepareState(epoch=1, phase="refused", reason="401 from the hub")
LATER = PrepareState(epoch=2, phase="loading", layers_total=6)


@pytest.mark.parametrize(
    ("states", "took"),
    [
        pytest.param([NONE, NONE], None, id="nothing was asked"),
        pytest.param([NONE, LOADING, LOADING], None, id="it loads"),
        pytest.param([NONE, LOADING, LOADING, PREPARED], Took(2.5, 20.0, 4), id="from the first look at it"),
        pytest.param([PREPARED], Took(2.5, 0.0, 4), id="sooner than anybody looked"),
        pytest.param([LOADING, REFUSED, NONE, LOADING, PREPARED], Took(2.5, 10.0, 4), id="what was refused is none"),
        pytest.param([LATER, LOADING, PREPARED], Took(2.5, 20.0, 4), id="what was superseded had begun"),
        pytest.param([LOADING, PREPARED, LATER, LATER, PREPARED], Took(2.5, 10.0, 4), id="the first tells of a start"),
    ],
)
def test_of_its_first_load(states: list[PrepareState], took: Took | None) -> None:
    """A look each ten seconds."""
    first = FirstLoad(2.5)
    told = [first.look(state, 10.0 * number) for number, state in enumerate(states)]
    assert told[-1] == took
