"""When pages are computed again rather than fetched: by what came of them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata_runtime.slot.fetch_pace import TIMES, TRIAL_SECONDS, Came, after_message, is_slower

TABLE = {
    # seconds since the first message, tokens x layers since then, seconds to compute one: slower?
    "nothing has come: its giver may be behind": (None, 100.0, 1e-6, False),
    "nothing was planned": (Came(0.0, 10), 100.0, 0.0, False),
    "too early to tell": (Came(0.0, 0), TRIAL_SECONDS, 1e-6, False),
    "a giver that has stopped": (Came(0.0, 0), TRIAL_SECONDS + 0.01, 1e-6, True),
    # 70B, 80 layers on an A100: 256 tokens in 0.1 s is 5 us each; 8 KiB each in bfloat16 with 8 heads.
    "10 Gbit/s, 150,000 a second, beside 200,000 computed": (Came(0.0, 1_500_000), 10.0, 5e-6, False),
    "1 Gbit/s, 15,000 a second": (Came(0.0, 15_000), 1.0, 5e-6, True),
    "1 Gbit/s, between processors that compute 1,000 a second": (Came(0.0, 15_000), 1.0, 1e-3, False),
}


@pytest.mark.parametrize("name", TABLE)
def test_what_is_quicker(name: str) -> None:
    came, now, each, slower = TABLE[name]
    assert is_slower(came, now, each) == slower


@given(
    computed=st.lists(st.integers(1, 10_000), min_size=2, max_size=20),
    apart=st.floats(0.001, 2.0),
    each=st.floats(1e-7, 1e-2),
    begin=st.floats(0, 1e6),
)
def test_a_fetch_costs_no_more_than_its_trial_and_twice_what_it_has_spared(
    computed: list[int], apart: float, each: float, begin: float
) -> None:
    """Whenever it may go on, whatever came when; the first message is not counted, whenever it came."""
    came = None
    for number, more in enumerate(computed):
        now = begin + number * apart
        came = after_message(came, more, now)
        if is_slower(came, now, each):
            break
        assert now - begin <= TRIAL_SECONDS + TIMES * sum(computed[1 : number + 1]) * each
