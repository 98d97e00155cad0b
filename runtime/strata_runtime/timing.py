"""The stopwatch behind `strata_runtime.measure`: how long products, linears and an empty layer take on this device.

The thin shell of the measurement: it runs the real kernels and notes seconds. Every figure is the best of several rounds, since other
programs of the machine can only add to it. Knows nothing of rates or rooflines.
"""

import copy
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from strata_planner.contract.formats import FORMAT_NAMES, ComputeType, FormatName
from strata_planner.contract.frames import Segment
from strata_runtime.cache import Batch, PagedKvCache
from strata_runtime.cache.attention import AttentionRule, attend
from strata_runtime.measure import PREFILL_TOKENS, LinearSeconds, Timings, best_of
from strata_runtime.precision import make_linear, stored_bytes_of

ROUNDS = 3
ROUND_BUDGET_SECONDS = 0.1  # a slow device gets fewer rounds, never less than one after the warm-up
DTYPES: dict[ComputeType, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}
CPU_FEATURES = 2048
CUDA_FEATURES = 8192
LEAST_WORKING_SET_BYTES = 64 << 20
MOST_WORKING_SET_BYTES = 256 << 20


def take(device: torch.device, compute_type: ComputeType, progress: Callable[[str], None]) -> Timings:
    """All the times of one device, a few seconds in all: twice, some time apart, and the better of each."""
    size = CUDA_FEATURES if device.type == "cuda" else CPU_FEATURES
    dtype = DTYPES[compute_type]
    with torch.inference_mode():
        weight = torch.randn(size, size, device=device, generator=torch.Generator(device).manual_seed(0)) * size**-0.5
        modules = {name: make_linear(weight, None, name, dtype) for name in FORMAT_NAMES}
        empty = _empty_layer(device, dtype)
        return best_of(*(_take_once(weight, modules, empty, progress) for _ in range(2)))


def _take_once(
    weight: Tensor, modules: dict[FormatName, nn.Module], empty: Callable[[], object], progress: Callable[[str], None]
) -> Timings:
    device, size = weight.device, weight.shape[0]
    dtype = next(modules["dense"].parameters()).dtype
    progress("memory bandwidth and dense products")
    sixteen = weight.to(torch.float16 if dtype == torch.float16 else torch.bfloat16)
    bandwidth, flops, float32_flops = _bandwidth(sixteen), _flops(sixteen), _flops(weight)
    linears: dict[FormatName, LinearSeconds] = {}
    for name, module in modules.items():
        progress(f"linears in {name}")
        linears[name] = _linear(module, weight[:PREFILL_TOKENS].to(dtype))
    progress("an empty layer")
    return Timings(size, bandwidth, flops, float32_flops, linears, best_seconds([empty] * 50, device))


def best_seconds(calls: Sequence[Callable[[], object]], device: torch.device) -> float:
    """Seconds of one call, the best of several rounds through all of them."""
    calls[0]()
    # One thread's own time leaves out what other programs of a busy machine took; several threads wait for each other in it.
    clock = time.thread_time if device.type == "cpu" and torch.get_num_threads() == 1 else time.perf_counter
    best, spent = float("inf"), 0.0
    for _ in range(ROUNDS):
        _wait(device)
        start = clock()
        for call in calls:
            call()
        _wait(device)
        round_seconds = clock() - start
        best, spent = min(best, round_seconds / len(calls)), spent + round_seconds
        if spent > ROUND_BUDGET_SECONDS:
            break
    return best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _bandwidth(weight: Tensor) -> float:
    """Bytes a second of a 16-bit matrix-vector product over weights that no cache holds."""
    token = weight[:1].clone()
    copies = [weight.clone() for _ in range(copies_beyond_cache(weight.nbytes, weight.device))]
    calls = [partial(nn.functional.linear, token, each) for each in copies]
    return weight.nbytes / best_seconds(calls, weight.device)


def _flops(weight: Tensor) -> float:
    tokens = weight[: 2 * PREFILL_TOKENS].clone()
    seconds = best_seconds([partial(nn.functional.linear, tokens, weight)], weight.device)
    return 2 * tokens.shape[0] * weight.numel() / seconds


def _linear(module: nn.Module, tokens: Tensor) -> LinearSeconds:
    """tokens: [PREFILL_TOKENS, inputs]."""
    modules = [module]
    while len(modules) < copies_beyond_cache(stored_bytes_of(module), tokens.device):
        modules.append(copy.deepcopy(module))
    decode = best_seconds([partial(each, tokens[:1]) for each in modules], tokens.device)
    return LinearSeconds(decode, best_seconds([partial(module, tokens)], tokens.device))


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


class EmptyLayer(nn.Module):
    """A decoder layer as transformers writes it, over our paged attention, too narrow for arithmetic to count."""

    WIDTH = 32

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        weight = torch.eye(self.WIDTH, device=device)
        self.query, self.key, self.value, self.output, self.gate, self.up, self.down = (
            make_linear(weight, None, "int8", dtype) for _ in range(7)
        )
        self.norm = torch.ones(self.WIDTH, dtype=dtype, device=device)

    def forward(self, hidden: Tensor, rotation: tuple[Tensor, Tensor], batch: Batch) -> Tensor:
        """hidden: [1, tokens, WIDTH]."""
        normed = self._normed(hidden)
        query, key, value = (
            linear(normed).view(1, -1, 1, self.WIDTH).transpose(1, 2) for linear in (self.query, self.key, self.value)
        )
        query, key = (self._rotated(each, rotation) for each in (query, key))
        attended = attend(batch, 0, query[0], key[0], value[0], AttentionRule(self.WIDTH**-0.5))[None]
        hidden = hidden + self.output(attended.reshape(hidden.shape).contiguous())
        normed = self._normed(hidden)
        out: Tensor = hidden + self.down(nn.functional.silu(self.gate(normed)) * self.up(normed))
        return out

    def _normed(self, hidden: Tensor) -> Tensor:
        values = hidden.to(torch.float32)
        values = values * torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.norm * values.to(hidden.dtype)

    def _rotated(self, values: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        low, high = values.chunk(2, dim=-1)
        return values * rotation[0] + torch.cat((-high, low), dim=-1) * rotation[1]


def _empty_layer(device: torch.device, dtype: torch.dtype) -> Callable[[], object]:
    """One call decodes one token through an empty layer: what a layer costs whatever its size."""
    layer = EmptyLayer(dtype, device)
    shape = {"num_layers": 1, "first_layer": 0, "pages": 4, "page_tokens": 16, "kv_heads": 1, "head_dim": layer.WIDTH}
    cache = PagedKvCache(**shape, dtype=dtype, device=device)
    batch = cache.plan([Segment(sequence=0, start=0, length=1, accepted=0, sample=1)])
    hidden = torch.ones(1, 1, layer.WIDTH, dtype=dtype, device=device)
    rotation = (torch.ones_like(hidden), torch.zeros_like(hidden))
    return partial(layer, hidden, rotation, batch)
