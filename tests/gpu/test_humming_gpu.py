"""humming-kernels on a GPU: what nothing else can show. Every width, group and kind of zero multiplies as the reference, NaN stays with its token."""

import copy

import pytest
import torch

from strata_planner.contract.formats import GPTQ
from strata_runtime.formats.agreement import disagreement
from strata_runtime.formats.gptq import GptqCodes, humming_kernels, kernels, store
from strata_runtime.formats.gptq.humming_kernels import CHECKED_COUNTS, Library, RepackedWeight, repack
from strata_runtime.formats.gptq.weight import GptqWeight

pytestmark = pytest.mark.gpu

DTYPES = [torch.float16, torch.bfloat16]
SHAPES = [(128, 128), (384, 512), (1024, 4096), (4096, 11008)]


@pytest.fixture(scope="module")
def library() -> Library:
    found = humming_kernels.installed()
    if isinstance(found, str):
        pytest.skip(found)
    return found


def some_weight(shape: tuple[int, int], bits: int, group: int, *, centered: bool, ordered: bool = False) -> GptqWeight:
    generator = torch.Generator(device="cuda").manual_seed(bits)
    groups = torch.arange(shape[1], dtype=torch.int32, device="cuda") // group
    held = (shape[0], shape[1] // group)
    zeros = torch.randint(0, 1 << bits, held, dtype=torch.uint8, generator=generator, device="cuda")
    codes = GptqCodes(
        bits=bits,
        codes=torch.randint(0, 1 << bits, shape, dtype=torch.uint8, generator=generator, device="cuda"),
        scales=torch.rand(held, generator=generator, device="cuda").add(0.5).bfloat16().half(),
        zeros=torch.full_like(zeros, 1 << (bits - 1)) if centered else zeros,
        groups=groups[torch.randperm(shape[1], generator=generator, device="cuda")] if ordered else groups,
    )
    return store(codes, group=group, name="linear")


def some_tokens(count: int, in_features: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator(device="cuda").manual_seed(count)
    return torch.randn(count, in_features, generator=generator, device="cuda").to(dtype)


def taken(weight: GptqWeight, dtype: torch.dtype, library: Library) -> RepackedWeight:
    repacked = repack(weight, dtype, library, kernels.dequantized)
    assert isinstance(repacked, RepackedWeight), repacked
    return repacked


@pytest.mark.parametrize("bits", sorted(GPTQ))
@pytest.mark.parametrize("centered", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_multiplies_as_the_reference(
    bits: int,
    centered: bool,  # noqa: FBT001
    dtype: torch.dtype,
    shape: tuple[int, int],
    library: Library,
) -> None:
    for group in (32, 64, 128):
        weight = some_weight(shape, bits, group, centered=centered)
        repacked = taken(weight, dtype, library)
        values = weight.dequantized()
        assert torch.equal(repacked.dequantized(), values.to(dtype).float())
        for count in (2, 5, 24, 100, 1000, 4096):
            tokens = some_tokens(count, shape[1], dtype)
            size = (tokens.float().square() @ values.square().t()).sqrt()
            found, expected = kernels.multiply(tokens, repacked), kernels.dequantized(tokens, weight)
            assert disagreement(found, expected, size, shape[1]) is None


def test_inputs_in_an_order_of_their_own(library: Library) -> None:
    weight = some_weight((384, 512), 4, 64, centered=False, ordered=True)
    assert torch.equal(taken(weight, torch.float16, library).dequantized(), weight.dequantized().half().float())


@pytest.mark.parametrize("bits", [3, 4, 8])
def test_nan_and_infinity_stay_with_their_token(bits: int, library: Library) -> None:
    weight = some_weight((384, 512), bits, 64, centered=True)
    repacked = taken(weight, torch.float16, library)
    for count in CHECKED_COUNTS[1:]:
        tokens = some_tokens(count, 512, torch.float16)
        clean = repacked.product(tokens)
        tokens[1, 3], tokens[-1, 511] = torch.nan, torch.inf
        found = repacked.product(tokens)
        others = [place for place in range(count) if place not in {1, count - 1}]
        assert torch.equal(found[others], clean[others])
        assert found[1].isnan().all()
        assert not found[-1].isfinite().any()


def test_a_copy_and_products_in_turn_give_the_same(library: Library) -> None:
    """Locks are left as they were found."""
    weight = some_weight((1024, 4096), 4, 128, centered=True)
    repacked = taken(weight, torch.float16, library)
    twin, tokens = copy.deepcopy(repacked), some_tokens(40, 4096, torch.float16)
    first = repacked.product(tokens)
    for _ in range(20):
        torch.testing.assert_close(repacked.product(tokens), first, rtol=2e-3, atol=0.5)
        torch.testing.assert_close(twin.product(tokens), first, rtol=2e-3, atol=0.5)
    assert int(repacked.parts["locks"].abs().max()) == 0
