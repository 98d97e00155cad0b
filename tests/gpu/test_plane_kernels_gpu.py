"""The Triton kernels of bit-planes, on a GPU: what the interpreter cannot show. Every shape, both types, every width, the same bits each time."""

import pytest
import torch
from torch import Tensor

from strata_runtime.formats.gptq.weight import GptqWeight
from strata_runtime.formats.kernels import PLANE_KERNELS, select
from strata_runtime.formats.planes import triton_products
from strata_runtime.formats.planes.any_linear import AnyLinear
from strata_runtime.formats.planes.planes import pack_planes
from strata_runtime.formats.weights import PlanesWeight

pytestmark = pytest.mark.gpu

ROUNDING = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
DTYPES = [torch.float16, torch.bfloat16]
SHAPES = [(1, 1), (7, 33), (64, 128), (33, 500), (80, 577), (200, 1100), (4096, 4096), (1000, 11008), (8192, 2048)]
COUNTS = [1, 3, 8, 9, 16, 17, 100]


def planes_weight(shape: tuple[int, int], bits: int, dtype: torch.dtype) -> PlanesWeight:
    generator = torch.Generator(device="cuda").manual_seed(bits)
    codes = torch.randint(0, 1 << bits, shape, generator=generator, dtype=torch.uint8, device="cuda")
    table = torch.randn(shape[0], 1 << bits, generator=generator, device="cuda").sort(dim=1).values.to(dtype)
    return PlanesWeight(pack_planes(codes, bits), table, shape[1])


def gptq_weight(shape: tuple[int, int], bits: int, group: int) -> GptqWeight:
    generator = torch.Generator(device="cuda").manual_seed(bits)
    codes = torch.randint(0, 1 << bits, shape, generator=generator, dtype=torch.uint8, device="cuda")
    held = min(group, shape[1])
    groups = (shape[0], -(-shape[1] // held))
    scales = torch.rand(groups, generator=generator, device="cuda").half()
    zeros = torch.randint(0, 1 << bits, groups, generator=generator, dtype=torch.uint8, device="cuda")
    return GptqWeight(pack_planes(codes, bits), scales, zeros, held, shape[1])


def some_tokens(count: int, in_features: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator(device="cuda").manual_seed(count)
    return torch.randn(count, in_features, generator=generator, device="cuda").to(dtype)


def product_of(tokens: Tensor, weight: PlanesWeight | GptqWeight) -> Tensor:
    few = tokens.shape[0] <= triton_products.MOST_TOKENS
    return (triton_products.product if few else triton_products.dequantized)(tokens, weight)


def assert_is_the_product(result: Tensor, tokens: Tensor, values: Tensor) -> None:
    expected = tokens.double() @ values.double().t()
    magnitude = tokens.double().abs() @ values.double().abs().t()
    bound = 1.01 * ROUNDING[tokens.dtype] * expected.abs() + 2e-5 * magnitude + 1e-6
    assert result.dtype == tokens.dtype
    assert ((result.double() - expected).abs() <= bound).all()


@pytest.mark.parametrize("bits", [3, 4, 5, 6, 7, 8])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_weight_of_any_precision_is_multiplied_by_its_centroids(
    bits: int, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    weight = planes_weight(shape, bits, dtype)
    values = weight.dequantized()
    assert torch.equal(triton_products.decoded(weight, dtype), values.to(dtype))
    for count in COUNTS:
        tokens = some_tokens(count, shape[1], dtype)
        assert_is_the_product(product_of(tokens, weight), tokens, values)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("group", [32, 64, 128, 1 << 20])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_gptq_weight_is_multiplied_as_the_reference_rounds_it(
    bits: int, group: int, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    weight = gptq_weight(shape, bits, group)
    values = weight.dequantized().to(dtype)
    assert torch.equal(triton_products.decoded(weight, dtype), values)
    for count in COUNTS:
        tokens = some_tokens(count, shape[1], dtype)
        assert_is_the_product(product_of(tokens, weight), tokens, values)


@pytest.mark.parametrize("bits", [3, 4, 5, 6, 7, 8])
def test_a_replay_gives_the_same_bits(bits: int) -> None:
    weight, tokens = planes_weight((4096, 11008), bits, torch.float16), some_tokens(16, 11008, torch.float16)
    together = triton_products.product(tokens, weight)
    for _ in range(10):
        assert torch.equal(triton_products.product(tokens, weight), together)
    for count in (1, 5, 8, 11):
        assert torch.equal(triton_products.product(tokens[:count], weight), together[:count])


@pytest.mark.parametrize("bits", [4, 6, 8])
def test_nan_and_infinity_stay_with_their_token(bits: int) -> None:
    weight, tokens = planes_weight((40, 200), bits, torch.float16), some_tokens(3, 200, torch.float16)
    tokens[1, 3], tokens[2, 199] = torch.nan, torch.inf
    result = triton_products.product(tokens, weight)
    expected = tokens.float() @ weight.dequantized().t()
    assert torch.isfinite(result[0]).all()
    assert torch.equal(result.isnan(), expected.isnan())
    assert torch.equal(result.isinf(), expected.isinf())


@pytest.mark.parametrize("bits", [4, 8])
def test_views_that_start_and_step_anywhere(bits: int) -> None:
    whole = planes_weight((40, 600), bits, torch.float16)
    stored = [torch.zeros(40, plane.shape[1] + 3, dtype=torch.uint8, device="cuda") for plane in whole.planes]
    for place, (room, plane) in enumerate(zip(stored, whole.planes, strict=True)):
        room[:, place % 3 : place % 3 + plane.shape[1]] = plane
    planes = tuple(room[3:37, i % 3 : i % 3 + whole.planes[i].shape[1]] for i, room in enumerate(stored))
    weight = PlanesWeight(planes, whole.table[3:37], 600)
    tokens = some_tokens(6, 1201, torch.float16)[::2, 1::2]
    assert_is_the_product(triton_products.product(tokens, weight), tokens, whole.dequantized()[3:37])


@pytest.mark.parametrize("count", [1, 16, 17])
def test_a_linear_on_a_gpu_takes_the_kernels(count: int) -> None:
    linear = AnyLinear(planes_weight((64, 600), 8, torch.float16), None)
    tokens = some_tokens(count, 600, torch.float16)
    name = select(PLANE_KERNELS, linear.format, tokens, linear.stored).name
    assert name == ("any8-triton" if count <= 16 else "any8-triton-dequantized")
    assert_is_the_product(linear(tokens), tokens, linear.dequantized())
    linear.set_bits(4, planes_weight((64, 600), 4, torch.float16).table)
    assert_is_the_product(linear(tokens), tokens, linear.dequantized())
