"""Every kernel that CUDA runs computes what the reference defines; a module moves to the device with its stored form."""

import copy

import pytest
import torch

from strata_planner.contract.formats import ComputeType, FormatName, stored_bytes
from strata_runtime.formats import COMPUTE_DTYPES, MAKERS, make_linear, reference, stored_bytes_of
from strata_runtime.formats.kernels import CHANNEL_KERNELS, GROUP_KERNELS, Kernel
from strata_runtime.formats.rounded.rounded_linear import ChannelLinear, GroupLinear
from strata_runtime.measuring import measure, overheads, rates, timing
from strata_runtime.measuring.rates import Subject

pytestmark = pytest.mark.gpu

TOLERANCE: dict[ComputeType, float] = {"bfloat16": 3 * 2**-8, "float16": 3 * 2**-11, "float32": 1e-5}
ALL_KERNELS = {kernel.name: kernel for kernel in (*CHANNEL_KERNELS, *GROUP_KERNELS)}
SHAPES = [(64, 128), (4096, 2048), (80, 96), (200, 136), (7, 33), (1, 1)]


def a_linear(shape: tuple[int, int], name: FormatName, dtype: torch.dtype) -> ChannelLinear | GroupLinear:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(shape[0])) * shape[1] ** -0.5
    module = make_linear(weight.cuda(), None, name, dtype)
    assert isinstance(module, ChannelLinear | GroupLinear)
    return module


@pytest.mark.parametrize("name", ALL_KERNELS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("compute", sorted(COMPUTE_DTYPES))
@pytest.mark.parametrize("count", [1, 17, 100])
def test_a_kernel_computes_what_the_reference_defines(
    name: str, shape: tuple[int, int], compute: ComputeType, count: int
) -> None:
    kernel: Kernel = ALL_KERNELS[name]
    module = a_linear(shape, kernel.format, COMPUTE_DTYPES[compute])
    tokens = (
        torch.randn(count, shape[1], generator=torch.Generator().manual_seed(count)).cuda().to(COMPUTE_DTYPES[compute])
    )
    if not kernel.runs(tokens, module.stored):
        return
    result = kernel.run(tokens, module.stored)
    if isinstance(module, ChannelLinear) and kernel.format == "w8a8":
        expected = reference.multiply_quantized(tokens, module.codes, module.scales)
    else:
        expected = reference.multiply(tokens, module.dequantized())
    magnitude = tokens.float().abs() @ module.dequantized().abs().t()
    assert ((result.float() - expected.float()).abs() <= TOLERANCE[compute] * magnitude + 1e-6).all()


@pytest.mark.parametrize("name", sorted(MAKERS))
@pytest.mark.parametrize("compute", sorted(COMPUTE_DTYPES))
def test_a_module_quantized_on_the_cpu_computes_the_same_on_the_device(name: FormatName, compute: ComputeType) -> None:
    weight = torch.randn(320, 256, generator=torch.Generator().manual_seed(0)) / 16
    here = make_linear(weight, None, name, COMPUTE_DTYPES[compute])
    there = copy.deepcopy(here).cuda()
    tokens = torch.randn(5, 256, generator=torch.Generator().manual_seed(1)).to(COMPUTE_DTYPES[compute])
    assert stored_bytes_of(there) == stored_bytes(name, 320, 256, compute)
    tolerance = 8 * TOLERANCE[compute]
    if (
        name == "fp8_a8"
    ):  # tensor cores of Hopper add products of 8-bit floats in some 14 bits (DeepSeek-V3, arXiv 2412.19437, section 3.3.2)
        tolerance = max(tolerance, 2**-9)
    torch.testing.assert_close(there(tokens.cuda()).cpu(), here(tokens), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", sorted(MAKERS))
def test_quantizing_on_the_device_stores_the_same_number_of_bytes(name: FormatName) -> None:
    module = make_linear(torch.randn(80, 100).cuda(), None, name, torch.bfloat16)
    assert stored_bytes_of(module) == stored_bytes(name, 80, 100, "bfloat16")
    assert module(torch.zeros(2, 3, 100, dtype=torch.bfloat16, device="cuda")).shape == (2, 3, 80)


def test_the_device_can_be_measured(capsys: pytest.CaptureFixture[str]) -> None:
    device = torch.device("cuda")
    timings = timing.take(device, "bfloat16", overheads.take(device, "bfloat16"), lambda _: None)
    profile = rates.profile_of(Subject("gpu", 1 << 30, 0, "bfloat16"), timings)
    with capsys.disabled():
        print("\n" + measure.table(profile))  # noqa: T201 -- the figures are worth reading
    assert set(profile.decode_efficiency) == set(MAKERS)
