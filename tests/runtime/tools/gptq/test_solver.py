"""Laws of GPTQ: its error, weighted by the Hessian, is at most that of rounding to nearest; where inputs do not move together it is the same."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strata_runtime.formats import PrecisionError, WeightNotFiniteError
from strata_runtime.formats.gptq import GptqCodes, store
from strata_runtime.tools.gptq.solver import GptqSettings, quantize_gptq, round_to_nearest
from tests.laws import share

torch.set_num_threads(1)


def a_weight(out_features: int, in_features: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(out_features, in_features, generator=generator) * torch.rand(1, in_features, generator=generator)


def a_hessian(in_features: int, tokens: int, seed: int = 0) -> torch.Tensor:
    """Of inputs that move together, some far more than others."""
    generator = torch.Generator().manual_seed(seed + 100)
    mixing = torch.randn(in_features, in_features, generator=generator) / in_features**0.5
    inputs = (
        torch.randn(tokens, in_features, generator=generator) * torch.rand(in_features, generator=generator) @ mixing
    )
    return inputs.t() @ inputs


def error(codes: GptqCodes, weight: torch.Tensor, hessian: torch.Tensor) -> torch.Tensor:
    moved = (codes.dequantized() - weight).double()
    return ((moved @ hessian.double()) * moved).sum(dim=1)


@given(
    bits=st.sampled_from([2, 3, 4, 8]),
    shape=st.tuples(st.integers(1, 24), st.integers(1, 300)),
    group=st.one_of(st.none(), st.integers(1, 300)),
    flags=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    tokens=st.integers(1, 400),
)
@settings(max_examples=share(40), deadline=None)
def test_its_error_is_at_most_that_of_rounding_to_nearest(
    bits: int, shape: tuple[int, int], group: int | None, flags: tuple[bool, bool, bool], tokens: int
) -> None:
    chosen = GptqSettings(bits, group, symmetric=flags[0], act_order=flags[1], static_groups=flags[2])
    weight, hessian = a_weight(*shape), a_hessian(shape[1], tokens)
    found = quantize_gptq(weight, hessian, chosen)
    stored = store(found, group=group, name="linear")
    assert torch.equal(stored.dequantized(), found.dequantized())
    assert int(found.codes.max()) < 1 << bits
    if not chosen.ordered:
        nearest = round_to_nearest(weight, chosen, hessian.diagonal())
        limit = error(nearest, weight, hessian)
        assert bool((error(found, weight, hessian) <= limit * (1 + 1e-3) + 1e-6 * limit.max()).all())


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("act_order", [False, True], ids=["in order", "act-order"])
@pytest.mark.parametrize("symmetric", [False, True], ids=["asymmetric", "symmetric"])
def test_where_inputs_do_not_move_together_it_rounds_to_nearest(*, bits: int, act_order: bool, symmetric: bool) -> None:
    weight, diagonal = a_weight(16, 192), torch.rand(192) + 0.1
    chosen = GptqSettings(bits, 64, symmetric=symmetric, act_order=act_order)
    found = quantize_gptq(weight, torch.diag(diagonal), chosen)
    nearest = round_to_nearest(weight, chosen, diagonal)
    assert torch.equal(found.codes, nearest.codes)
    assert torch.equal(found.dequantized(), nearest.dequantized())


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("static", [False, True], ids=["groups in act-order", "static groups"])
def test_it_is_much_better_where_they_do(*, bits: int, static: bool) -> None:
    weight, hessian = a_weight(32, 256), a_hessian(256, 400)
    chosen = GptqSettings(bits, 128, static_groups=static)
    found = error(quantize_gptq(weight, hessian, chosen), weight, hessian).sum()
    nearest = error(round_to_nearest(weight, chosen, hessian.diagonal()), weight, hessian).sum()
    assert found < 0.7 * nearest


def test_groups_by_act_order_hold_inputs_of_like_weight() -> None:
    weight, hessian = a_weight(8, 256), a_hessian(256, 400)
    found = quantize_gptq(weight, hessian, GptqSettings(4, 64, static_groups=False))
    assert torch.bincount(found.groups.long()).tolist() == [64] * 4
    diagonal = hessian.diagonal()
    assert diagonal[found.groups == 0].min() >= diagonal[found.groups == 3].max()


@pytest.mark.parametrize("hessian", [torch.zeros(64, 64), torch.ones(64, 64)], ids=["nothing seen", "one direction"])
def test_a_hessian_without_full_rank_still_gives_a_weight(hessian: torch.Tensor) -> None:
    weight = a_weight(8, 64)
    found = quantize_gptq(weight, hessian, GptqSettings(8, 32))
    assert torch.allclose(found.dequantized(), weight, atol=0.05)


def test_inputs_that_were_never_seen_are_rounded_all_the_same() -> None:
    weight, hessian = a_weight(8, 64), a_hessian(64, 200)
    hessian[5], hessian[:, 5] = 0, 0
    found = quantize_gptq(weight, hessian, GptqSettings(8, 32, act_order=False))
    assert torch.allclose(found.dequantized()[:, 5], weight[:, 5], atol=0.1)


def test_constant_and_tiny_weights_keep_scales_that_divide() -> None:
    for weight in (torch.zeros(4, 64), torch.full((4, 64), 0.5), torch.full((4, 64), 1e-9)):
        found = quantize_gptq(weight, torch.eye(64), GptqSettings(4, 32, symmetric=False))
        assert bool((found.scales > 0).all())
        assert torch.allclose(found.dequantized(), weight, atol=1e-3)


REFUSED = {
    "bits": (lambda: GptqSettings(5), "GPTQ to 5 bits: choose from 2, 3, 4, 8"),
    "group": (lambda: GptqSettings(4, 0), "groups of 0 inputs"),
    "damp": (lambda: GptqSettings(4, damp=0.0), "damp 0.0: more than 0"),
    "shape": (lambda: quantize_gptq(torch.ones(4, 8), torch.eye(4), GptqSettings(4)), r"Hessian \[4, 4\]"),
}


@pytest.mark.parametrize(("call", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_is_refused(call: object, message: str) -> None:
    with pytest.raises(PrecisionError, match=message):
        call()  # type: ignore[operator]


def test_weights_that_are_not_finite_are_refused_by_name() -> None:
    weight = a_weight(4, 32)
    weight[0, 0] = float("inf")
    with pytest.raises(WeightNotFiniteError, match=r"layers\.0\.up_proj: 1 of 128 values of the weight"):
        quantize_gptq(weight, torch.eye(32), GptqSettings(4), name="layers.0.up_proj")
