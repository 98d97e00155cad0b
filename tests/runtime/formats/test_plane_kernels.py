"""Every kernel of bit-planes computes what the reference defines: all shapes, types, views and paths of the processor; NaN goes where it must."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from strata_runtime.formats.kernels import PLANE_KERNELS, Kernel, select
from strata_runtime.formats.planes import plane_kernels
from strata_runtime.formats.planes.planes import TILE_COLUMNS, pack_planes
from strata_runtime.formats.weights import PlanesWeight
from strata_runtime.kernels import native_planes
from strata_runtime.kernels.native import library
from strata_runtime.kernels.native_dense import PackedProduct, pack
from tests.laws import share

torch.set_num_threads(1)
SAME_LEVEL = [HealthCheck.function_scoped_fixture]  # all examples of a test take the one level
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
# Products of values rounded to the type, summed in float32 in any order, rounded once.
TOLERANCE = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 2e-6}
KERNELS = {kernel.name: kernel for kernel in PLANE_KERNELS}
needs_library = pytest.mark.skipif(library() is None, reason="no native library is here")


def a_weight(shape: tuple[int, int], bits: int, dtype: torch.dtype, seed: int = 0) -> PlanesWeight:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 1 << bits, shape, dtype=torch.uint8, generator=generator)
    table = torch.randn(shape[0], 1 << bits, generator=generator).sort(dim=1).values * 0.05
    return PlanesWeight(pack_planes(codes, bits), table.to(dtype), shape[1])


def some_tokens(count: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(count, columns, generator=torch.Generator().manual_seed(count)).to(dtype)


def assert_equal(result: torch.Tensor, tokens: torch.Tensor, weight: PlanesWeight) -> None:
    expected = tokens.float() @ weight.dequantized().t()
    magnitude = tokens.float().abs() @ weight.dequantized().abs().t()
    assert result.dtype == tokens.dtype
    assert ((result.float() - expected).abs() <= TOLERANCE[tokens.dtype] * magnitude + 1e-7).all()


shapes = st.tuples(
    st.one_of(st.integers(1, 80), st.just(96)),
    st.one_of(st.integers(1, 1200), st.sampled_from([64, 448, 512, 1024, 2048, 2112])),
)


@given(
    shape=shapes,
    bits=st.integers(1, 8),
    count=st.one_of(st.integers(1, 20), st.just(131)),
    dtype=st.sampled_from(DTYPES),
)
@settings(max_examples=share(30), deadline=None, suppress_health_check=SAME_LEVEL)
def test_the_native_product_is_the_reference(
    level: str, shape: tuple[int, int], bits: int, count: int, dtype: torch.dtype
) -> None:
    weight, tokens = a_weight(shape, bits, dtype), some_tokens(count, shape[1], dtype)
    assert_equal(native_planes.planes_linear(tokens, weight.planes, weight.table), tokens, weight)


@pytest.mark.parametrize("count", [1, 3, 4, 5])
def test_long_rows_are_the_reference(level: str, count: int) -> None:
    weight, tokens = a_weight((40, 9000), 4, torch.bfloat16), some_tokens(count, 9000, torch.bfloat16)
    assert_equal(native_planes.planes_linear(tokens, weight.planes, weight.table), tokens, weight)


@given(shape=shapes, bits=st.integers(1, 8), dtype=st.sampled_from(DTYPES))
@settings(max_examples=share(30), deadline=None, suppress_health_check=SAME_LEVEL)
def test_the_native_decoder_gives_every_value(
    level: str, shape: tuple[int, int], bits: int, dtype: torch.dtype
) -> None:
    weight = a_weight(shape, bits, dtype)
    found = native_planes.decoded(weight.planes, weight.table, shape[1])
    assert torch.equal(found, weight.dequantized_rows(0, shape[0]))


@given(shape=shapes, bits=st.sampled_from([3, 4, 8]), count=st.integers(1, 20), dtype=st.sampled_from(DTYPES))
@settings(max_examples=share(30), deadline=None, suppress_health_check=SAME_LEVEL)
def test_8_bit_activations_agree_in_every_bit(
    level: str, shape: tuple[int, int], bits: int, count: int, dtype: torch.dtype
) -> None:
    weight, tokens = a_weight(shape, bits, dtype), some_tokens(count, shape[1], dtype)
    found = native_planes.planes_linear_int8(tokens, weight.planes, weight.table)
    assert torch.equal(found, plane_kernels.reference_int8(tokens, weight))


@pytest.mark.parametrize("count", [1, 3, 4, 5, 8, 66])
@pytest.mark.parametrize("shape", [(7, 4096), (50, 4160), (97, 9000)])
def test_8_bit_activations_over_several_sections_of_columns(level: str, shape: tuple[int, int], count: int) -> None:
    weight, tokens = a_weight(shape, 4, torch.bfloat16), some_tokens(count, shape[1], torch.bfloat16)
    found = native_planes.planes_linear_int8(tokens, weight.planes, weight.table)
    assert torch.equal(found, plane_kernels.reference_int8(tokens, weight)), level


@given(
    shape=shapes,
    bits=st.sampled_from([2, 3, 4, 8]),
    group=st.sampled_from([1, 32, 64, 100, 128, 4096]),
    count=st.integers(1, 9),
)
@settings(max_examples=share(30), deadline=None, suppress_health_check=SAME_LEVEL)
def test_uniform_groups_are_the_reference(
    level: str, shape: tuple[int, int], bits: int, group: int, count: int
) -> None:
    generator = torch.Generator().manual_seed(group)
    codes = torch.randint(0, 1 << bits, shape, dtype=torch.uint8, generator=generator)
    groups = (shape[0], -(-shape[1] // group))
    scales = (torch.rand(groups, generator=generator) * 0.1).half()
    zeros = torch.randint(0, 1 << bits, groups, dtype=torch.uint8, generator=generator)
    for dtype in DTYPES:
        tokens = some_tokens(count, shape[1], dtype)
        found = native_planes.planes_group_linear(tokens, pack_planes(codes, bits), scales, zeros, group)
        spread = [each.float().repeat_interleave(group, dim=1)[:, : shape[1]] for each in (scales, zeros)]
        values = (codes.float() - spread[1]) * spread[0]
        magnitude = tokens.float().abs() @ ((codes.float() + spread[1]) * spread[0]).t()
        assert ((found.float() - tokens.float() @ values.t()).abs() <= TOLERANCE[dtype] * magnitude + 1e-7).all()


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
@pytest.mark.parametrize("count", [2, 7])
def test_uniform_groups_tell_what_is_not_finite(level: str, broken: float, count: int) -> None:
    """Infinity stays infinity: its products with code and zero may not be taken from each other."""
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(0, 16, (5, 600), dtype=torch.uint8, generator=generator)
    scales, zeros = torch.rand(5, 5, generator=generator).half(), torch.randint(0, 16, (5, 5), dtype=torch.uint8)
    codes[:, 3] = zeros[:, 0] + 1
    tokens = some_tokens(count, 600, torch.bfloat16)
    tokens[0, 3] = broken
    found = native_planes.planes_group_linear(tokens, pack_planes(codes, 4), scales, zeros, 128)
    assert (found[0].isnan() if broken != broken else found[0].isinf()).all()  # noqa: PLR0124 -- NaN
    assert found[1:].isfinite().all()


@pytest.mark.parametrize("level", ["avx2"], indirect=True)
@given(shape=shapes, bits=st.integers(1, 8), count=st.integers(2, 40), group=st.sampled_from([None, 32, 100, 128]))
@settings(max_examples=share(30), deadline=None, suppress_health_check=SAME_LEVEL)
def test_in_avx2_a_token_meets_the_same_bits_beside_others(
    level: str, shape: tuple[int, int], bits: int, count: int, group: int | None
) -> None:
    """Whether its products are looked up or decoded, of tables or of groups: sums are added in one order."""
    weight, tokens = a_weight(shape, bits, torch.bfloat16), some_tokens(count, shape[1], torch.bfloat16)
    generator, of_groups = torch.Generator().manual_seed(bits), (shape[0], -(-shape[1] // (group or 1)))
    scales = torch.rand(of_groups, generator=generator).half()
    zeros = torch.randint(0, 1 << bits, of_groups, dtype=torch.uint8, generator=generator)

    def product(some: torch.Tensor) -> torch.Tensor:
        if group is None:
            return native_planes.planes_linear(some, weight.planes, weight.table)
        return native_planes.planes_group_linear(some, weight.planes, scales, zeros, group)

    together = product(tokens)
    for token in {0, count // 2, count - 1}:
        assert torch.equal(product(tokens[token : token + 1])[0], together[token]), level


@pytest.mark.parametrize("name", KERNELS)
@given(count=st.sampled_from([1, 3, 70]), in_features=st.sampled_from([64, 100, 513]), dtype=st.sampled_from(DTYPES))
@settings(max_examples=8, deadline=None)
def test_every_listed_kernel_computes_its_format(name: str, count: int, in_features: int, dtype: torch.dtype) -> None:
    kernel: Kernel[PlanesWeight] = KERNELS[name]
    bits = int(kernel.format[3])
    weight, tokens = a_weight((40, in_features), bits, dtype), some_tokens(count, in_features, dtype)
    if not kernel.runs(tokens, weight):
        return
    found = kernel.run(tokens, weight)
    if kernel.arithmetic == "8-bit activations":
        assert torch.equal(found, plane_kernels.reference_int8(tokens, weight))
    else:
        assert_equal(found, tokens, weight)


@pytest.mark.parametrize("dtype", DTYPES)
def test_views_are_read_in_place(level: str, dtype: torch.dtype) -> None:
    """Rows and tile-aligned columns of larger planes at odd addresses, tokens that are columns of a matrix, a transposed matrix."""
    whole = a_weight((9, 3 * TILE_COLUMNS + 100), 4, dtype)
    columns = slice(TILE_COLUMNS // 8, 2 * TILE_COLUMNS // 8)
    shifted = []
    for plane in whole.planes:
        memory = torch.zeros(plane.numel() + 3, dtype=torch.uint8)
        memory[3:] = plane.flatten()
        shifted.append(memory[3:].view_as(plane)[2:7, columns])
    part = PlanesWeight(tuple(shifted), whole.table[2:7], TILE_COLUMNS)
    expected = whole.dequantized()[2:7, TILE_COLUMNS : 2 * TILE_COLUMNS]
    assert torch.equal(part.dequantized(), expected)
    for tokens in (
        some_tokens(4, 3 * TILE_COLUMNS, dtype)[:, 1 : TILE_COLUMNS + 1],
        some_tokens(TILE_COLUMNS, 4, dtype).t(),
    ):
        assert_equal(native_planes.planes_linear(tokens, part.planes, part.table), tokens, part)
        assert torch.equal(
            native_planes.planes_linear_int8(tokens, part.planes, part.table),
            plane_kernels.reference_int8(tokens, part),
        )


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("count", [1, 6])
def test_what_is_not_finite_reaches_its_own_token_alone(level: str, broken: float, count: int) -> None:
    """At a column of the short tile, beside padding: infinity times the padding's zero would be NaN."""
    for dtype in DTYPES:
        weight, tokens = a_weight((5, TILE_COLUMNS + 70), 4, dtype), some_tokens(count + 1, TILE_COLUMNS + 70, dtype)
        clean = native_planes.planes_linear(tokens, weight.planes, weight.table)
        tokens[0, TILE_COLUMNS + 69] = broken
        found = native_planes.planes_linear(tokens, weight.planes, weight.table)
        expected = tokens.float() @ weight.dequantized().t()
        assert torch.equal(found[1:], clean[1:])
        torch.testing.assert_close(found[0].float(), expected[0], equal_nan=True)
        eight = native_planes.planes_linear_int8(tokens, weight.planes, weight.table)
        assert eight[0].isnan().all()
        assert eight[1:].isfinite().all()


@needs_library
def test_threads_give_the_same_bits() -> None:
    weight, tokens = a_weight((333, 1000), 4, torch.bfloat16), some_tokens(17, 1000, torch.bfloat16)
    for product in (plane_kernels.native, plane_kernels.native_int8):
        alone = product(tokens, weight)
        torch.set_num_threads(2)
        try:
            assert torch.equal(product(tokens, weight), alone)
        finally:
            torch.set_num_threads(1)


@pytest.mark.slow
@needs_library
def test_operators_can_be_traced() -> None:
    weight, tokens = a_weight((7, 130), 4, torch.float32), some_tokens(3, 130, torch.float32)
    arguments = (tokens, list(weight.planes), weight.table)
    assert torch.equal(torch.ops.strata.planes_linear(*arguments), plane_kernels.native(tokens, weight))
    with FakeTensorMode() as mode:
        traced = torch.ops.strata.planes_linear(*(pytree.tree_map(mode.from_tensor, arguments)))
    assert (tuple(traced.shape), traced.dtype) == ((3, 7), torch.float32)


@needs_library
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tokens": torch.zeros(1, 500)}, "do not fit planes"),
        ({"tokens": torch.zeros(1, 130, dtype=torch.float16)}, "of one type"),
        ({"table": torch.zeros(7, 8)}, "is not one of"),
        (
            {"planes": [torch.zeros(7, 24, dtype=torch.uint8)] * 3 + [torch.zeros(6, 24, dtype=torch.uint8)]},
            "of one shape",
        ),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, object], said: str) -> None:
    weight = a_weight((7, 130), 4, torch.float32)
    arguments = {"tokens": torch.zeros(1, 130), "planes": weight.planes, "table": weight.table} | change
    with pytest.raises(ValueError, match=said):
        native_planes.planes_linear(**arguments)  # type: ignore[arg-type]


def test_without_the_library_the_reference_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_planes, "available", lambda: False)
    weight, tokens = a_weight((7, 130), 4, torch.float32), some_tokens(3, 130, torch.float32)
    assert select(PLANE_KERNELS, "any4", tokens, weight).name == "any4-dequantized"
    assert select(PLANE_KERNELS, "any4_a8", tokens, weight).name == "any4_a8-reference"


@pytest.mark.parametrize("level", ["avx2"], indirect=True)
@given(shape=shapes, bits=st.integers(1, 8), count=st.one_of(st.integers(1, 20), st.just(131)))
@settings(max_examples=share(40), deadline=None, suppress_health_check=SAME_LEVEL)
def test_in_avx2_a_weight_decoded_as_it_is_met_gives_the_bits_of_the_dense_product(
    level: str, shape: tuple[int, int], bits: int, count: int
) -> None:
    weight, tokens = a_weight(shape, bits, torch.bfloat16), some_tokens(count, shape[1], torch.bfloat16)
    dense = PackedProduct(pack(weight.dequantized().bfloat16()))
    assert torch.equal(native_planes.decoded_linear(tokens, weight.native), dense(tokens)), level
