"""Moments, ranges and deviations against the same figures taken directly."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from strata_planner.contract.formats import group_size
from strata_runtime.formats import make_linear
from strata_runtime.formats.rounded.rounded_linear import ChannelLinear, GroupLinear
from strata_runtime.tools.calibration.layers import LayeredModel
from strata_runtime.tools.calibration.statistics import Moments, deviations, input_moments, weight_ranges
from tests.runtime.architectures import make_tiny_model
from tests.runtime.loading.stages import CPU

torch.set_num_threads(1)


@given(
    seed=st.integers(0, 99),
    sizes=st.lists(st.integers(1, 50), min_size=1, max_size=6),
    offset=st.sampled_from([0.0, 3.0, 1e3]),
)
def test_moments_of_parts_are_those_of_the_whole(seed: int, sizes: list[int], offset: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    parts = [torch.randn(size, 4, generator=generator) + offset for size in sizes]
    moments = Moments()
    for part in parts:
        moments.add(part)
    whole = torch.cat(parts).double()
    assert moments.mean == pytest.approx(float(whole.mean()), rel=1e-5, abs=1e-6)
    assert moments.variance == pytest.approx(float(whole.var(correction=0)), rel=1e-3)


def test_rows_that_pad_a_batch_are_left_out() -> None:
    linear = nn.Linear(4, 4)
    with torch.no_grad(), input_moments({"up": linear}, tokens=3) as moments:
        linear(torch.cat([torch.ones(1, 3, 4), torch.full((1, 5, 4), 9.0)], dim=1))
    assert (moments["up"].count, moments["up"].mean, moments["up"].variance) == (12, 1, 0)
    linear(torch.ones(1, 3, 4))
    assert moments["up"].count == 12


@pytest.mark.parametrize("columns", [256, 192, 40], ids=["groups of 128", "groups of 64", "padded"])
def test_ranges_are_those_that_the_quantizers_see(columns: int) -> None:
    """A weight whose groups fill their range has steps of exactly the range over the number of levels."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(16, columns, generator=generator)
    found = weight_ranges(weight)
    assert (found.low, found.high) == (float(weight.min()), float(weight.max()))
    channels = make_linear(weight, None, "int8", torch.float32)
    assert isinstance(channels, ChannelLinear)
    assert float((channels.scales.double() * 127).square().mean()) == pytest.approx(found.channel_peak_square)
    groups = make_linear(weight, None, "int4", torch.float32)
    assert isinstance(groups, GroupLinear)
    assert groups.scales_and_zeros.shape[0] == -(-columns // group_size(columns))
    stored = float((groups.scales_and_zeros[..., 0].double() * 15).square().mean())
    assert 0.76**2 * found.group_range_square <= stored <= found.group_range_square * (1 + 1e-6)


def test_deviations_are_energies_of_differences(tmp_path: Path) -> None:
    model = LayeredModel(make_tiny_model(tmp_path, "llama"), torch.float32, CPU)
    with torch.inference_mode():
        layer = model.layer(0)
        inputs = model.embedding().run([torch.tensor([1, 5, 9, 2, 7, 4]), torch.tensor([1, 8, 8])])
        outputs = layer.run(inputs)
        coarse = layer.quantized(3)
        found = deviations(layer, coarse, inputs, outputs)
        with layer.with_weights({"mlp.down_proj": coarse["mlp.down_proj"]}):
            changed = layer.run(inputs)
        unchanged = deviations(layer, {name: each.weight.data for name, each in layer.linears.items()}, inputs, outputs)
    moved, size = (torch.cat(changed) - torch.cat(outputs)).square().sum(1), torch.cat(outputs).square().sum(1)
    expected = (moved / size).mean()
    assert found["mlp.down_proj"] == pytest.approx(float(expected), rel=1e-5)
    assert all(each > 0 for each in found.values())
    assert set(unchanged.values()) == {0.0}
