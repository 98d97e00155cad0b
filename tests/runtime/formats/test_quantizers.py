"""Quantizers: close, deterministic, never worse for clipping, and at ease with groups that hold one value."""

import pytest
import torch

from strata_runtime.formats import quantizers, reference

torch.set_num_threads(1)


def a_weight(rows: int = 48, columns: int = 256, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator)
    return weight * torch.rand(rows, 1, generator=generator) + 0.1 * torch.randn(rows, 1, generator=generator)


def restored(codes: quantizers.GroupCodes) -> torch.Tensor:
    return reference.dequantize_groups(codes.codes, torch.stack((codes.scales, codes.zeros), 2).transpose(0, 1))


def error_per_group(weight: torch.Tensor, bits: int) -> torch.Tensor:
    difference = restored(quantizers.quantize_groups(weight, bits, 128, torch.bfloat16)) - weight
    return difference.view(weight.shape[0], -1, 128).square().sum(-1)


@pytest.mark.parametrize("bits", [3, 4])
def test_clipping_never_raises_the_error_of_a_group(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = a_weight()
    clipped = error_per_group(weight, bits)
    monkeypatch.setattr(quantizers, "CLIP_RATIOS", (1.0,))
    plain = error_per_group(weight, bits)
    assert (clipped <= plain * (1 + 1e-5)).all()
    assert clipped.sum() < 0.98 * plain.sum()


@pytest.mark.parametrize("bits", [3, 4])
def test_an_error_is_at_most_half_a_step_where_nothing_is_clipped(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantizers, "CLIP_RATIOS", (1.0,))
    weight = a_weight()
    codes = quantizers.quantize_groups(weight, bits, 64, torch.float32)
    steps = codes.scales.repeat_interleave(64, dim=1)
    assert ((restored(codes) - weight).abs() <= steps * 0.5001 + 1e-6).all()


def test_channels_round_to_half_a_step() -> None:
    weight = a_weight()
    codes = quantizers.quantize_channels(weight, torch.float32)
    difference = reference.dequantize_channels(codes.codes, codes.scales) - weight
    assert (difference.abs() <= codes.scales[:, None] * 0.5001).all()


@pytest.mark.parametrize("value", [0.0, 0.25, -3.0, 1e-30])
def test_a_group_of_one_value_is_kept(value: float) -> None:
    weight = torch.full((16, 64), value)
    kept = restored(quantizers.quantize_groups(weight, 4, 64, torch.float32))
    torch.testing.assert_close(kept, weight, rtol=1e-6, atol=1e-30)
    channels = quantizers.quantize_channels(weight, torch.float32)
    torch.testing.assert_close(
        reference.dequantize_channels(channels.codes, channels.scales), weight, rtol=1e-6, atol=1e-30
    )


@pytest.mark.parametrize("rows_at_a_time", [1, 7, 1000])
def test_codes_do_not_depend_on_the_rows_at_a_time(rows_at_a_time: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = a_weight()
    whole = quantizers.quantize_groups(weight, 4, 128, torch.bfloat16)
    monkeypatch.setattr(quantizers, "VALUES_AT_A_TIME", rows_at_a_time * weight.shape[1])
    parts = quantizers.quantize_groups(weight, 4, 128, torch.bfloat16)
    assert torch.equal(whole.codes, parts.codes)
    assert torch.equal(whole.scales, parts.scales)
    assert torch.equal(whole.zeros, parts.zeros)
