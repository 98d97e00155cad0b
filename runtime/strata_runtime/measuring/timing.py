"""The stopwatch behind `strata_runtime.measuring.measure`: how long products and linears take on this device; beside them `overheads`.

The thin shell of the measurement: it runs the real kernels and notes seconds. Every figure of one device is the middle of several rounds, and the mean of two such
passes some time apart: memory that other machines of a host share gives more in one moment and less in the next, and a plan is for neither. Knows nothing
of rates or rooflines.
"""

import copy
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from strata_planner.contract.formats import ComputeType, FormatName
from strata_planner.contract.rows import TIMED_ROWS
from strata_runtime.formats import COMPUTE_DTYPES, MAKERS, make_linear, stored_bytes_of
from strata_runtime.formats.vendor_sums import add_in_float32
from strata_runtime.huge_pages import gather, kept_by
from strata_runtime.loading.blocked import dense_linear
from strata_runtime.measuring.rates import PREFILL_TOKENS, SOME_TOKENS, LinearSeconds, Overheads, Timings, mean_of

ROUNDS, TYPICAL_ROUNDS = 3, 5
ROUND_BUDGET_SECONDS = 0.1  # a slow device gets fewer rounds, never less than one after the warm-up
CPU_FEATURES = 2048
CUDA_FEATURES = 8192
READ_OUTPUTS = 8192  # of a product that all processors of a machine share
# Of a product of one row, from which on a processor has no kernel of the format: its few rows are not timed either.
NO_KERNEL_SECONDS = 5e-3
LEAST_WORKING_SET_BYTES = 64 << 20
MOST_WORKING_SET_BYTES = 256 << 20


def take(
    device: torch.device, compute_type: ComputeType, beside: Overheads, progress: Callable[[str], None]
) -> Timings:
    """All the times of one device, a few seconds in all: twice, some time apart, and the mean of each. `beside`: measured before."""
    size = CUDA_FEATURES if device.type == "cuda" else CPU_FEATURES
    dtype = COMPUTE_DTYPES[compute_type]
    add_in_float32(device)
    with torch.inference_mode():
        weight = torch.randn(size, size, device=device, generator=torch.Generator(device).manual_seed(0)) * size**-0.5
        modules: dict[FormatName, nn.Module] = {
            name: make_linear(weight, None, name, dtype) for name in MAKERS if name != "dense"
        }
        return mean_of(*(_take_once(weight, dtype, modules, beside, progress) for _ in range(2)))


def _take_once(
    weight: Tensor,
    dtype: torch.dtype,
    modules: dict[FormatName, nn.Module],
    beside: Overheads,
    progress: Callable[[str], None],
) -> Timings:
    """`modules`: a linear of each format but the dense one, which is made as it is loaded."""
    size = weight.shape[0]
    progress("memory bandwidth and dense products")
    sixteen = weight.to(torch.float16 if dtype == torch.float16 else torch.bfloat16)
    bandwidth, flops, float32_flops = _bandwidth(sixteen), _flops(sixteen), _flops(weight)
    tokens, own = weight[:PREFILL_TOKENS].to(dtype), weight.to(dtype)
    progress("linears in dense")
    linears: dict[FormatName, LinearSeconds] = {
        "dense": _linear(lambda: dense_linear(own.clone(), None), own.nbytes, tokens)
    }
    for name, module in modules.items():
        progress(f"linears in {name}")
        linears[name] = _linear(partial(copy.deepcopy, module), stored_bytes_of(module), tokens)
    return Timings(size, bandwidth, flops, float32_flops, linears, beside)


def read_together(threads: int) -> float:
    """Bytes a second that so many threads read at once, each another part of weights that no cache holds: of a machine's memory, where there are as many
    as it has processors. Leaves the process' number of threads as it was.
    """
    own = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.inference_mode():
            token = torch.zeros(1, CPU_FEATURES, dtype=torch.bfloat16)
            weight = torch.zeros(READ_OUTPUTS, CPU_FEATURES, dtype=torch.bfloat16)
            count = copies_beyond_cache(weight.nbytes, weight.device)
            linears = [dense_linear(weight.clone(), None) for _ in range(count)]
            gather(kept_by(linears))
            calls = [partial(each, token) for each in linears]
            return weight.nbytes / min(best_seconds(calls, weight.device) for _ in range(ROUNDS))
    finally:
        torch.set_num_threads(own)


def best_seconds(calls: Sequence[Callable[[], object]], device: torch.device) -> float:
    """Seconds of one call, the best of several rounds through all of them: for choosing between calls."""
    return min(_rounds(calls, device, ROUNDS))


def typical_seconds(calls: Sequence[Callable[[], object]], device: torch.device) -> float:
    """Seconds of one call, the middle of several rounds through all of them."""
    return statistics.median(_rounds(calls, device, TYPICAL_ROUNDS))


def _rounds(calls: Sequence[Callable[[], object]], device: torch.device, count: int) -> list[float]:
    """Seconds of a call in each; at least one round, as many more as the budget has room for."""
    calls[0]()
    # One thread's own time leaves out what other programs of a busy machine took; several threads wait for each other in it.
    clock = time.thread_time if device.type == "cpu" and torch.get_num_threads() == 1 else time.perf_counter
    found, spent = list[float](), 0.0
    for _ in range(count):
        _wait(device)
        start = clock()
        for call in calls:
            call()
        _wait(device)
        round_seconds = clock() - start
        found.append(round_seconds / len(calls))
        spent += round_seconds
        if spent > ROUND_BUDGET_SECONDS:
            break
    return found


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _bandwidth(weight: Tensor) -> float:
    """Bytes a second of a 16-bit matrix-vector product over weights that no cache holds."""
    token = weight[:1].clone()
    copies = [weight.clone() for _ in range(copies_beyond_cache(weight.nbytes, weight.device))]
    gather(copies)
    calls = [partial(nn.functional.linear, token, each) for each in copies]
    return weight.nbytes / typical_seconds(calls, weight.device)


def _flops(weight: Tensor) -> float:
    """Operations a second of a dense product as this device computes it fastest."""
    tokens = weight[: 2 * PREFILL_TOKENS].clone()
    seconds = typical_seconds([partial(dense_linear(weight, None), tokens)], weight.device)
    return 2 * tokens.shape[0] * weight.numel() / seconds


def _linear(make: Callable[[], nn.Module], size_bytes: int, tokens: Tensor) -> LinearSeconds:
    """`make` makes one more, with `size_bytes` of its own; tokens: [PREFILL_TOKENS, inputs]."""
    modules = [make() for _ in range(copies_beyond_cache(size_bytes, tokens.device))]
    gather(kept_by(modules))  # as slots have them
    decode = typical_seconds([partial(each, tokens[:1]) for each in modules], tokens.device)
    many, some = (
        typical_seconds([partial(modules[0], rows)], tokens.device) for rows in (tokens, tokens[:SOME_TOKENS])
    )
    untimed = tokens.device.type != "cpu" or decode > NO_KERNEL_SECONDS
    few = (
        []
        if untimed
        else [typical_seconds([partial(each, tokens[:n]) for each in modules], tokens.device) for n in TIMED_ROWS]
    )
    return LinearSeconds(decode, many, some, tuple(few))


def copies_beyond_cache(size_bytes: int, device: torch.device) -> int:
    """How many weights of that size are twice the last cache."""
    cache = 0
    if device.type == "cuda":
        cache = torch.cuda.get_device_properties(device).L2_cache_size
    else:
        for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
            cache = max(cache, int(file.read_text().strip().removesuffix("K")) * 1024)
    wanted = min(max(2 * cache, LEAST_WORKING_SET_BYTES), MOST_WORKING_SET_BYTES)
    return -(-wanted // size_bytes)
