"""The kernels of bit-planes for GPUs, run by Triton's interpreter, against the pure-torch reference."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from strata_runtime.formats.gptq.weight import GptqWeight
from strata_runtime.formats.planes.planes import pack_planes
from strata_runtime.formats.weights import PlanesWeight
from tests.laws import share, swept
from tests.runtime.formats.interpreted import products

ROUNDING = {torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}  # the interpreter cuts bfloat16 off instead of rounding
EXAMPLES = settings(max_examples=share(8), deadline=None)
DTYPES = st.sampled_from(sorted(ROUNDING, key=str))
SHAPES = st.tuples(st.sampled_from([1, 7, 32, 33]), st.sampled_from([1, 33, 64, 200, 500, 512, 577, 600]))


def planes_weight(shape: tuple[int, int], bits: int, dtype: torch.dtype) -> PlanesWeight:
    generator = torch.Generator().manual_seed(bits)
    codes = torch.randint(0, 1 << bits, shape, generator=generator, dtype=torch.uint8)
    table = torch.randn(shape[0], 1 << bits, generator=generator).sort(dim=1).values.to(dtype)
    return PlanesWeight(pack_planes(codes, bits), table, shape[1])


def gptq_weight(shape: tuple[int, int], bits: int, group: int) -> GptqWeight:
    generator = torch.Generator().manual_seed(bits)
    codes = torch.randint(0, 1 << bits, shape, generator=generator, dtype=torch.uint8)
    held = min(group, shape[1])
    groups = (shape[0], -(-shape[1] // held))
    scales = torch.rand(groups, generator=generator).half()
    zeros = torch.randint(0, 1 << bits, groups, generator=generator, dtype=torch.uint8)
    return GptqWeight(pack_planes(codes, bits), scales, zeros, held, shape[1])


def some_tokens(count: int, in_features: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(count, in_features, generator=torch.Generator().manual_seed(count)).to(dtype)


def assert_is_the_product(result: Tensor, tokens: Tensor, values: Tensor) -> None:
    """Within one rounding of the result, and float32 sums: relative to the sum of the products' magnitudes."""
    expected = tokens.double() @ values.double().t()
    magnitude = tokens.double().abs() @ values.double().abs().t()
    bound = ROUNDING[tokens.dtype] * expected.abs() + 1e-5 * magnitude + 1e-6
    assert result.dtype == tokens.dtype
    assert ((result.double() - expected).abs() <= bound).all()


@pytest.mark.parametrize("bits", swept([3, 4, 5, 6, 7, 8], [3]))
@given(shape=SHAPES, count=st.integers(1, 16), dtype=DTYPES)
@EXAMPLES
def test_a_weight_of_any_precision_is_multiplied_by_its_centroids(
    bits: int, shape: tuple[int, int], count: int, dtype: torch.dtype
) -> None:
    weight, tokens = planes_weight(shape, bits, dtype), some_tokens(count, shape[1], dtype)
    assert_is_the_product(products.product(tokens, weight), tokens, weight.dequantized())


@pytest.mark.parametrize("bits", swept([2, 3, 4, 8], [3]))
@given(shape=SHAPES, count=st.integers(1, 16), group=st.sampled_from([32, 64, 128, 1 << 20]))
@EXAMPLES
def test_a_gptq_weight_is_multiplied_as_the_reference_rounds_it(
    bits: int, shape: tuple[int, int], count: int, group: int
) -> None:
    weight, tokens = gptq_weight(shape, bits, group), some_tokens(count, shape[1], torch.float16)
    assert_is_the_product(products.product(tokens, weight), tokens, weight.dequantized().half())


@pytest.mark.slow
def test_a_gptq_weight_in_bfloat16() -> None:
    weight, tokens = gptq_weight((33, 577), 4, 128), some_tokens(3, 577, torch.bfloat16)
    values = products.decoded(weight, torch.bfloat16)
    assert ((values.float() - weight.dequantized()).abs() <= 2.0**-7 * weight.dequantized().abs()).all()
    assert_is_the_product(products.product(tokens, weight), tokens, values)


@pytest.mark.parametrize("bits", swept([3, 4, 5, 6, 7, 8], [3, 4, 8]))
@given(shape=SHAPES, dtype=DTYPES)
@EXAMPLES
def test_decoding_gives_the_centroids_themselves(bits: int, shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight = planes_weight(shape, bits, dtype)
    assert torch.equal(products.decoded(weight, dtype), weight.dequantized().to(dtype))


@pytest.mark.parametrize("bits", swept([2, 3, 4, 8], [3, 4]))
@given(shape=SHAPES, group=st.sampled_from([32, 64, 128, 1 << 20]))
@EXAMPLES
def test_decoding_gptq_gives_the_references_values(bits: int, shape: tuple[int, int], group: int) -> None:
    weight = gptq_weight(shape, bits, group)
    assert torch.equal(products.decoded(weight, torch.float16), weight.dequantized().half())


def test_more_tokens_take_rows_decoded_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "WEIGHTS_AT_A_TIME", 20 * 100)
    weight, tokens = planes_weight((50, 100), 4, torch.float16), some_tokens(17, 100, torch.float16)
    assert_is_the_product(products.dequantized(tokens, weight), tokens, weight.dequantized())


@pytest.mark.slow
@pytest.mark.parametrize("bits", swept([4, 8], [4]))
def test_a_token_has_the_same_sums_whoever_comes_with_it(bits: int) -> None:
    weight, tokens = planes_weight((40, 1100), bits, torch.float16), some_tokens(8, 1100, torch.float16)
    together = products.product(tokens, weight)
    assert all(torch.equal(products.product(tokens[i : i + 1], weight)[0], together[i]) for i in (0, 7))


@pytest.mark.slow  # the products below have whole ones
@pytest.mark.parametrize("bits", swept([4, 8], [4]))
def test_views_that_start_and_step_anywhere(bits: int) -> None:
    whole = planes_weight((40, 600), bits, torch.float16)
    stored = [torch.zeros(40, plane.shape[1] + 3, dtype=torch.uint8) for plane in whole.planes]
    for place, (room, plane) in enumerate(zip(stored, whole.planes, strict=True)):
        room[:, place % 3 : place % 3 + plane.shape[1]] = plane
    planes = tuple(room[3:37, i % 3 : i % 3 + whole.planes[i].shape[1]] for i, room in enumerate(stored))
    table = torch.cat([whole.table, whole.table], dim=1)[3:37, : 1 << bits]
    weight = PlanesWeight(planes, table, 600)
    tokens = some_tokens(6, 1201, torch.float16)[::2, 1::2]
    assert_is_the_product(products.product(tokens, weight), tokens, whole.dequantized()[3:37])
    transposed = tokens.t().contiguous().t()
    assert torch.equal(products.product(transposed, weight), products.product(tokens, weight))


def test_columns_cut_at_a_tile_are_read_in_place() -> None:
    whole = planes_weight((8, 1100), 4, torch.float16)
    right = PlanesWeight(tuple(plane[:, 64:] for plane in whole.planes), whole.table, 1100 - 512)
    tokens = some_tokens(2, 588, torch.float16)
    assert_is_the_product(products.product(tokens, right), tokens, whole.dequantized()[:, 512:])


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy's, of the interpreter
@pytest.mark.parametrize("kind", ["any4", "any8", "gptq4"])
@pytest.mark.parametrize("in_features", [200, 512])
def test_nan_and_infinity_stay_with_their_token(kind: str, in_features: int) -> None:
    shape = (9, in_features)
    weight = gptq_weight(shape, 4, 128) if kind == "gptq4" else planes_weight(shape, int(kind[3:]), torch.float16)
    tokens = some_tokens(4, in_features, torch.float16)
    tokens[1, 3], tokens[2, in_features - 1], tokens[3, 5] = torch.nan, torch.inf, -torch.inf
    result = products.product(tokens, weight)
    expected = tokens.float() @ weight.dequantized().half().float().t()
    assert torch.isfinite(result[0]).all()
    assert torch.equal(result[1:].isnan(), expected[1:].isnan())
    assert torch.equal(result[2:].isinf(), expected[2:].isinf())
    assert torch.equal(result[2:].sign().nan_to_num(), expected[2:].sign().half().nan_to_num())


@given(row_blocks=st.integers(1, 2000), tiles=st.integers(1, 200), at_a_time=st.integers(1, 2000))
def test_shares_cover_the_tiles_and_keep_the_device_at_work(row_blocks: int, tiles: int, at_a_time: int) -> None:
    share = products.tiles_of_share(row_blocks, tiles, at_a_time)
    programs = row_blocks * -(-tiles // share)
    assert 1 <= share <= tiles
    assert programs <= max(at_a_time, row_blocks)


def test_a_cpu_takes_other_kernels() -> None:
    weight, tokens = planes_weight((4, 64), 4, torch.float16), some_tokens(1, 64, torch.float16)
    assert not products.product_runs(tokens, weight)
