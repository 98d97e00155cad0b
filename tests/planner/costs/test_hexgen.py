"""HexGen's printed formulas, term by term."""

import pytest

from benchmarks.reference.hexgen import Layout, Rates, Task, terms

TASK = Task(layers=80, hidden=8192, input_tokens=256, output_tokens=32)
ONLY = dict.fromkeys(("scan", "operation", "tensor_latency", "tensor_byte", "hop_latency", "hop_byte"), 0.0)


def seconds(layout: Layout, phase: str, **rates: float) -> float:
    assert phase in {"prefill", "decode"}
    return Rates(**(ONLY | rates)).seconds(TASK, layout, "prefill" if phase == "prefill" else "decode")


CASES = {
    "weights are read once per token": ("decode", {"scan": 1}, 12 * 8192**2 * 2 * 32 * 80 / 4),
    "not while prefilling": ("prefill", {"scan": 1}, 0),
    "operations of the prompt": ("prefill", {"operation": 1}, 24 * 256 * 8192**2 * 80 / 4),
    "operations of the answer": ("decode", {"operation": 1}, 24 * 32 * 8192**2 * 80 / 4),
    "four exchanges a layer": ("prefill", {"tensor_latency": 1}, 3 * 4 * 80),
    "for each token": ("decode", {"tensor_latency": 1}, 3 * 4 * 80 * 32),
    "of a share of the hidden states": ("prefill", {"tensor_byte": 1}, 3 * 4 * 80 * 256 * 8192 * 2 / 4),
    "of one token": ("decode", {"tensor_byte": 1}, 3 * 4 * 80 * 32 * 8192 * 2 / 4),
    "a hop between stages": ("prefill", {"hop_latency": 1}, 1),
    "a hop a token": ("decode", {"hop_latency": 1}, 32),
    "of all hidden states": ("prefill", {"hop_byte": 1}, 256 * 8192 * 2),
    "of one token's": ("decode", {"hop_byte": 1}, 32 * 8192 * 2),
}


@pytest.mark.parametrize("case", CASES)
def test_terms_of_four_devices_in_two_stages(case: str) -> None:
    phase, rates, expected = CASES[case]
    assert seconds(Layout(4, 2), phase, **rates) == pytest.approx(expected)


def test_one_device_exchanges_nothing_and_one_stage_hops_nowhere() -> None:
    assert terms(TASK, Layout(1, 8), "prefill")[2:4] == (0, 0)
    assert terms(TASK, Layout(8, 1), "prefill")[4:] == (0, 0)


def test_layouts_are_named_as_in_the_paper() -> None:
    assert [str(Layout(*degrees)) for degrees in ((8, 1), (4, 2), (1, 8))] == ["TP=8", "TP=4 PP=2", "PP=8"]
