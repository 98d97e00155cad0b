"""A GPTQ weight in another library's layout: given as documented, believed only where its products are the reference's, else left in planes."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strata_planner.contract.formats import GPTQ
from strata_runtime.formats import measured, stored_bytes_of
from strata_runtime.formats.agreement import disagreement
from strata_runtime.formats.errors import PrecisionError
from strata_runtime.formats.gptq import GptqCodes, humming_kernels, kernels, store
from strata_runtime.formats.gptq.gptq_linear import GptqLinear
from strata_runtime.formats.gptq.humming_kernels import CHECKED_COUNTS, RepackedWeight, refusal, repack, uniform
from strata_runtime.formats.gptq.kernels import HUMMING, dequantized
from strata_runtime.formats.gptq.weight import GptqWeight
from tests.laws import share
from tests.runtime.formats.humming_libraries import (
    DoesNotCompile,
    OutOfMemory,
    Right,
    WrongBeyond,
    ZerosLessOne,
    codes_of,
    values_of,
)

torch.set_num_threads(1)


def some_codes(
    shape: tuple[int, int], bits: int, group: int, *, centered: bool = False, ordered: bool = False
) -> GptqCodes:
    generator = torch.Generator().manual_seed(bits)
    groups = torch.arange(shape[1], dtype=torch.int32) // group
    count = -(-shape[1] // group)
    zeros = torch.randint(0, 1 << bits, (shape[0], count), dtype=torch.uint8, generator=generator)
    return GptqCodes(
        bits=bits,
        codes=torch.randint(0, 1 << bits, shape, dtype=torch.uint8, generator=generator),
        scales=torch.rand(shape[0], count, generator=generator).add(0.5).bfloat16().half(),
        zeros=torch.full_like(zeros, 1 << (bits - 1)) if centered else zeros,
        groups=groups[torch.randperm(shape[1], generator=generator)] if ordered else groups,
    )


def some_weight(bits: int = 4, group: int = 64, *, centered: bool = False, ordered: bool = False) -> GptqWeight:
    return store(some_codes((128, 256), bits, group, centered=centered, ordered=ordered), group=group, name="linear")


@pytest.fixture
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    measured._kept.cache_clear()
    kernels._say_once.cache_clear()
    yield
    measured._kept.cache_clear()


def assert_alike(found: torch.Tensor, expected: torch.Tensor, tokens: torch.Tensor, weight: GptqWeight) -> None:
    size = (tokens.float().square() @ weight.dequantized().square().t()).sqrt()
    assert disagreement(found, expected, size, weight.in_features) is None


def put_in_charge(library: object, monkeypatch: pytest.MonkeyPatch, bits: int = 4) -> None:
    """As the table of a GPU does."""
    measured.save({GPTQ[bits]: ((256, HUMMING),)}, torch.float16)
    monkeypatch.setattr(humming_kernels, "installed", lambda: library)


@given(
    rows=st.sampled_from([32, 64, 160]),
    columns=st.sampled_from([128, 256, 512 + 128]),
    bits=st.sampled_from(sorted(GPTQ)),
    group=st.sampled_from([32, 64, 128]),
    centered=st.booleans(),
)
@settings(max_examples=share(40), deadline=None)
def test_words_and_zeros_are_the_streams_that_the_library_documents(
    *, rows: int, columns: int, bits: int, group: int, centered: bool
) -> None:
    codes = some_codes((rows, columns), bits, group, centered=centered)
    given_ = uniform(store(codes, group=group, name="linear"), torch.float16)
    assert given_.shape == (rows, columns)
    assert torch.equal(codes_of(given_), codes.codes.long())
    assert torch.equal(values_of(given_), codes.dequantized())
    assert (given_.zeros is None) == bool((codes.zeros == 1 << (bits - 1)).all())


@pytest.mark.parametrize("bits", sorted(GPTQ))
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("ordered", [False, True])
def test_a_library_that_is_right_is_taken_and_multiplies_by_the_weight(
    bits: int,
    dtype: torch.dtype,
    ordered: bool,  # noqa: FBT001
) -> None:
    weight, library = some_weight(bits, ordered=ordered), Right()
    repacked = repack(weight, dtype, library, dequantized)
    assert isinstance(repacked, RepackedWeight), repacked
    assert library.products == list(CHECKED_COUNTS)  # every kernel of it was tried
    tokens = torch.randn(3, 256, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert_alike(kernels.multiply(tokens, repacked), kernels.multiply(tokens, weight), tokens, weight)
    assert torch.equal(repacked.dequantized(), weight.dequantized().to(dtype).float())
    assert kernels.multiply(tokens[:0], repacked).shape == (0, 128)


@pytest.mark.parametrize(
    ("library", "said"),
    [
        (ZerosLessOne(), "something else for 1 tokens"),
        (WrongBeyond(), "something else for 64 tokens"),
        (DoesNotCompile(), "failed: RuntimeError: NVRTCCompiler failed with exit code 6"),
        (OutOfMemory(), "failed: OutOfMemoryError"),
    ],
    ids=lambda each: type(each).__name__,
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_library_that_is_wrong_or_fails_is_not_taken_and_said(library: Right, said: str, dtype: torch.dtype) -> None:
    assert said in str(repack(some_weight(), dtype, library, dequantized))


@pytest.mark.parametrize(
    ("shape", "group", "dtype", "said"),
    [
        ((128, 256), 64, torch.float32, "torch.float32"),
        ((120, 256), 64, torch.float16, "120 x 256"),
        ((128, 192), 64, torch.float16, "128 x 192"),
        ((128, 256), 256, torch.float16, "groups of 256"),
    ],
)
def test_what_the_library_cannot_hold_keeps_its_planes(
    shape: tuple[int, int], group: int, dtype: torch.dtype, said: str
) -> None:
    weight = store(some_codes(shape, 4, group), group=group, name="linear")
    assert said in str(refusal(weight, dtype))
    assert said in str(repack(weight, dtype, Right(), dequantized))


def test_scales_and_zeros_that_would_change_keep_their_planes() -> None:
    codes = some_codes((128, 256), 4, 64)
    codes.scales[0, 0] = 1 + 2.0**-10  # float16 holds it, bfloat16 does not
    assert refusal(store(codes, group=64, name="linear"), torch.float16) is None
    assert "would be rounded" in str(refusal(store(codes, group=64, name="linear"), torch.bfloat16))
    codes.zeros[0, 0] = 16
    assert "zeros reach 16" in str(refusal(store(codes, group=64, name="linear"), torch.float16))


@pytest.mark.usefixtures("own_cache")
def test_a_linear_gives_up_its_planes_for_what_was_measured_to_be_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, bias = some_weight(ordered=True), torch.ones(128).half()
    tokens = torch.randn(2, 3, 256, generator=torch.Generator().manual_seed(0)).half()
    expected, library = GptqLinear(weight, bias)(tokens), Right()
    put_in_charge(library, monkeypatch)
    linear = GptqLinear(weight, bias)
    assert_alike(linear(tokens).view(6, 128), expected.view(6, 128), tokens.view(6, 256), weight)
    assert library.products == [*CHECKED_COUNTS, 6]
    assert linear.kernel_name(tokens.view(6, 256)) == HUMMING
    assert torch.equal(linear.dequantized(), weight.dequantized().half().float())
    held = {name for name, _ in linear.named_buffers()}
    assert held == {"bias", "order", "repacked_values"}  # planes, scales and zeros are gone
    assert stored_bytes_of(linear) == sum(buffer.nbytes for buffer in linear.buffers())
    with pytest.raises(PrecisionError, match="planes gave way"):
        _ = linear.stored
    library.products.clear()
    linear(tokens)
    assert library.products == [6]  # checked once


@pytest.mark.parametrize("library", [ZerosLessOne(), DoesNotCompile(), "humming-kernels is not installed"], ids=str)
@pytest.mark.usefixtures("own_cache")
def test_linears_stay_in_planes_and_one_line_says_why(
    library: object, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tokens = torch.randn(3, 256, generator=torch.Generator().manual_seed(0)).half()
    expected = GptqLinear(some_weight(), None)(tokens)
    put_in_charge(library, monkeypatch)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            linear = GptqLinear(some_weight(), None)
            assert torch.equal(linear(tokens), expected)
            assert linear.kernel_name(tokens) != HUMMING
            assert torch.equal(linear.dequantized(), some_weight().dequantized())
    assert len(caplog.records) == 1
    assert "gptq4 stays in bit-planes" in caplog.text


@pytest.mark.usefixtures("own_cache")
def test_without_a_measured_table_the_library_is_not_even_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(humming_kernels, "installed", lambda: pytest.fail("asked"))
    GptqLinear(some_weight(), None)(torch.ones(1, 256).half())
    measured.save({"gptq4": ((4, "gptq-dequantized"), (256, HUMMING))}, torch.float16)  # not for every number of tokens
    GptqLinear(some_weight(), None)(torch.ones(1, 256).half())


def test_a_library_that_is_missing_or_breaks_at_import_is_a_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    humming_kernels.installed.cache_clear()
    monkeypatch.setattr(torch.version, "cuda", None)
    assert humming_kernels.installed() == "humming-kernels is not installed"
    humming_kernels.installed.cache_clear()
    monkeypatch.setattr(torch.version, "cuda", "13.2")
    (tmp_path / "humming").mkdir()
    (tmp_path / "humming" / "__init__.py").write_text(
        "raise ImportError('libcuda.so.1: cannot open shared object file')"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "does not load: ImportError: libcuda.so.1" in str(humming_kernels.installed())
    humming_kernels.installed.cache_clear()
