"""Laws of static 8-bit activations: scales known before, clipped beyond, bytes as counted, kernels equal to what is defined."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strata_planner.contract.formats import ComputeType, stored_bytes
from strata_runtime.formats import COMPUTE_DTYPES, make_linear, stored_bytes_of
from strata_runtime.formats.errors import NotCalibratedError
from strata_runtime.formats.kernels import STATIC_KERNELS, Kernel
from strata_runtime.formats.quantizers import Sharing, quantize_channels
from strata_runtime.formats.reference import quantize_tokens
from strata_runtime.formats.static8.activation_file import ActivationEntry, Activations, read_activations
from strata_runtime.formats.static8.static_kernels import reference_product
from strata_runtime.formats.static8.static_linear import StaticLinear, static_linear
from strata_runtime.formats.static8.static_weight import StaticWeight
from tests.laws import share

torch.set_num_threads(1)
DTYPES = list(COMPUTE_DTYPES.values())


def some(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def an_entry(inputs: torch.Tensor, smoothing: torch.Tensor | None = None) -> ActivationEntry:
    factors = torch.ones(inputs.shape[1]) if smoothing is None else smoothing
    return ActivationEntry(float((inputs.float() / factors).abs().max()) / 127, factors)


def a_linear(weight: torch.Tensor, inputs: torch.Tensor, dtype: torch.dtype = torch.float32) -> StaticLinear:
    return static_linear(weight, None, an_entry(inputs), dtype)


@pytest.mark.parametrize("kernel", STATIC_KERNELS, ids=lambda kernel: kernel.name)
@given(rows=st.integers(1, 80), columns=st.integers(1, 200), count=st.integers(0, 40), dtype=st.sampled_from(DTYPES))
@settings(max_examples=share(30), deadline=None)
def test_a_kernel_computes_what_is_defined(
    kernel: Kernel[StaticWeight], rows: int, columns: int, count: int, dtype: torch.dtype
) -> None:
    tokens = some(count, columns).to(dtype)
    module = a_linear(some(rows, columns, 1), some(9, columns, 2), dtype)
    if kernel.runs(tokens, module.stored):
        assert torch.equal(kernel.run(tokens, module.stored), reference_product(tokens, module.stored))


@given(rows=st.integers(1, 60), columns=st.integers(1, 200), compute=st.sampled_from(sorted(COMPUTE_DTYPES)))
@settings(max_examples=share(30), deadline=None)
def test_stored_bytes_are_what_the_contract_counts(rows: int, columns: int, compute: ComputeType) -> None:
    module = a_linear(some(rows, columns), some(3, columns), COMPUTE_DTYPES[compute])
    assert stored_bytes_of(module) == stored_bytes("w8a8_static", rows, columns, compute)


def test_within_the_calibrated_range_it_is_as_good_as_a_scale_of_all_tokens() -> None:
    weight, tokens = some(64, 256), some(20, 256, 1)
    exact = tokens @ weight.t()
    static, dynamic = (
        module(tokens) for module in (a_linear(weight, tokens), make_linear(weight, None, "w8a8", torch.float32))
    )
    assert (static - exact).norm() < 0.02 * exact.norm()
    assert (static - exact).norm() < 2 * (dynamic - exact).norm()


def test_what_lies_beyond_the_calibrated_range_is_clipped() -> None:
    module = a_linear(some(8, 16), torch.ones(1, 16))
    torch.testing.assert_close(module(torch.full((1, 16), 50.0)), module(torch.ones(1, 16)))


def test_smoothing_changes_nothing_but_the_rounding() -> None:
    weight, tokens = some(32, 64), some(10, 64, 1)
    tokens[:, 3] *= 100
    factors = torch.ones(64)
    factors[3] = 8.0
    exact = tokens @ weight.t()
    plain, smoothed = (
        static_linear(weight, None, an_entry(tokens, each), torch.float32)(tokens) for each in (None, factors)
    )
    assert (smoothed - exact).norm() < 0.5 * (plain - exact).norm()
    module = static_linear(weight, None, an_entry(tokens, factors), torch.float32)
    error = (module.dequantized() - weight).abs()
    assert (error <= module.scales[:, None] / 2 * 1.0001 / factors).all()


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), float("-inf")])
def test_a_broken_token_breaks_its_own_row_alone(broken: float) -> None:
    module, tokens = a_linear(some(8, 32), some(3, 32)), some(3, 32, 1)
    expected = module(tokens)
    tokens[1, 4] = broken
    out = module(tokens)
    assert torch.isnan(out[1]).all()
    assert torch.equal(out[[0, 2]], expected[[0, 2]])


def test_a_token_is_rounded_alike_in_any_batch() -> None:
    module, tokens = a_linear(some(40, 64), some(3, 64)), some(30, 64, 1)
    assert torch.equal(module(tokens)[7:9], module(tokens[7:9]))


@pytest.mark.parametrize("sharing", ["channel", "tensor"])
def test_weights_share_a_scale_as_asked(sharing: Sharing) -> None:
    weight = some(6, 40) * torch.tensor([1.0, 2, 3, 4, 5, 6])[:, None]
    stored = quantize_channels(weight, torch.float32, sharing=sharing)
    assert len(stored.scales.unique()) == (1 if sharing == "tensor" else 6)
    error = (stored.codes * stored.scales[:, None] - weight).abs()
    assert (error <= stored.scales[:, None] / 2 * 1.0001).all()


def test_a_scale_of_all_tokens_is_that_of_the_largest() -> None:
    tokens = torch.stack((torch.ones(16), torch.full((16,), 10.0)))
    codes, scales = quantize_tokens(tokens, "tensor")
    assert codes[:, 0].tolist() == [13, 127]
    assert len(scales.unique()) == 1


def test_calibrations_are_read_as_written(tmp_path: Path) -> None:
    entries = {"model.layers.0.mlp.up_proj": an_entry(some(3, 20)), "model.layers.1.mlp.up_proj": an_entry(some(3, 7))}
    written = Activations("a" * 64, entries, {"method": "entropy"})
    path = tmp_path / "activations.safetensors"
    written.write(path)
    read = read_activations(path, "a" * 64)
    assert read.notes == written.notes
    for key, entry in entries.items():
        assert read.entry(key).scale == pytest.approx(entry.scale, rel=1e-6)
        assert torch.equal(read.entry(key).smoothing, entry.smoothing)
    with pytest.raises(NotCalibratedError, match=r"lm_head is not in the calibration of activations"):
        read.entry("lm_head")


def test_a_calibration_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "activations.safetensors"
    with pytest.raises(
        NotCalibratedError, match=r"there is no .*activation_calibration MODEL --text FILE, or plan with w8a8"
    ):
        read_activations(path, "a")
    good = Activations("a", {"up": an_entry(some(3, 20))})
    good.write(path)
    with pytest.raises(NotCalibratedError, match="is of another model"):
        read_activations(path, "b")
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(NotCalibratedError, match="is damaged"):
        read_activations(path, "a")
    replace(good, entries={"up": ActivationEntry(-1.0, torch.ones(3))}).write(path)
    with pytest.raises(NotCalibratedError, match="has no positive scale"):
        read_activations(path, "a")
    with pytest.raises(NotCalibratedError, match="the calibration has 20 inputs, the weight 21"):
        static_linear(some(4, 21), None, good.entry("up"), torch.float32)
