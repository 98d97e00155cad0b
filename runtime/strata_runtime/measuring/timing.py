"""The stopwatch behind `strata_runtime.measuring.measure`: how long products, linears and empty layers take on this device.

The thin shell of the measurement: it runs the real kernels and notes seconds. Every figure is the best of several rounds, since other
programs of the machine can only add to it. Knows nothing of rates or rooflines.
"""

import copy
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from strata_planner.contract.formats import ComputeType, FormatName
from strata_planner.contract.frames import (
    FrameHeader,
    KvOperation,
    Open,
    Sampling,
    Segment,
    data_decoder,
    encode,
)
from strata_planner.contract.plan import MicroBatch
from strata_planner.contract.roles import Neighbour, Role
from strata_runtime.formats import COMPUTE_DTYPES, MAKERS, make_linear, stored_bytes_of
from strata_runtime.loading.load import load_stage
from strata_runtime.measuring.rates import PREFILL_TOKENS, LinearSeconds, Timings, best_of
from strata_runtime.model.random_model import make_random_model
from strata_runtime.slot.prepare import cache_of
from strata_runtime.stage.executor import StageExecutor
from strata_runtime.stage.tensors import from_bytes, to_bytes

ROUNDS = 3
ROUND_BUDGET_SECONDS = 0.1  # a slow device gets fewer rounds, never less than one after the warm-up
CPU_FEATURES = 2048
CUDA_FEATURES = 8192
LEAST_WORKING_SET_BYTES = 64 << 20
MOST_WORKING_SET_BYTES = 256 << 20
FEW_LAYERS, MANY_LAYERS = 2, 8


class EmptyStage:
    """A stage of Llama layers too narrow for arithmetic to count, loaded and run as the slots do it."""

    WIDTH = 32

    def __init__(self, layers: int, compute_type: ComputeType, device: torch.device) -> None:
        with tempfile.TemporaryDirectory() as folder:
            shapes: dict[str, Any] = self._shapes(layers)
            model_path = make_random_model(Path(folder), "llama", **shapes)
            role = self._role(layers, compute_type)
            model = load_stage(role, model_path, lambda *_: None, device)
        self._executor = StageExecutor(role, model, cache_of(role, model))
        self._compute_type = compute_type
        self._step = 0
        self._run([Open(0, Sampling())])

    def decode(self) -> None:
        """One more token of the one sequence, at the same position again: header, bytes and layers."""
        self._run([])

    def _run(self, operations: list[KvOperation]) -> None:
        segments = [Segment(0, 0, 1, 0)]
        header = FrameHeader(0, 1, self._step, "", segments, operations, self._compute_type, self.WIDTH)
        self._step += 1
        received = data_decoder.decode(encode(header))
        assert isinstance(received, FrameHeader)
        output = self._executor.run(received, torch.zeros(1, dtype=torch.int64))
        assert isinstance(output, Tensor)
        from_bytes(bytearray(to_bytes(output)), self._compute_type, self.WIDTH)

    @classmethod
    def _shapes(cls, layers: int) -> dict[str, int]:
        heads = {"num_attention_heads": 1, "num_key_value_heads": 1}
        return heads | {
            "vocab_size": 32,
            "hidden_size": cls.WIDTH,
            "intermediate_size": cls.WIDTH,
            "num_hidden_layers": layers + 1,  # the stage is not the last
        }

    @staticmethod
    def _role(layers: int, compute_type: ComputeType) -> Role:
        neighbour = Neighbour(slot="measured", role=0)
        return Role(
            replica=0,
            stage=0,
            stages=2,
            devices=(),
            tensor_parallel=1,
            leader=True,
            layers=(0, layers - 1),
            bits=(16,) * layers,
            format=_dense(layers),
            kv_bits=16,
            kv_page_budget=4,
            replica_page_budget=4,
            page_tokens=16,
            embedding=True,
            head=False,
            model_uri="",
            compute_type=compute_type,
            max_model_len=16,
            micro_batch=MicroBatch(prefill=1, decode=1, max_step_tokens=16),
            predicted_bytes=0,
            next=neighbour,
            previous=neighbour,
        )


def take(device: torch.device, compute_type: ComputeType, progress: Callable[[str], None]) -> Timings:
    """All the times of one device, a few seconds in all: twice, some time apart, and the better of each."""
    size = CUDA_FEATURES if device.type == "cuda" else CPU_FEATURES
    dtype = COMPUTE_DTYPES[compute_type]
    with torch.inference_mode():
        weight = torch.randn(size, size, device=device, generator=torch.Generator(device).manual_seed(0)) * size**-0.5
        modules = {name: make_linear(weight, None, name, dtype) for name in MAKERS}
        empty = (EmptyStage(FEW_LAYERS, compute_type, device), EmptyStage(MANY_LAYERS, compute_type, device))
        return best_of(*(_take_once(weight, modules, empty, progress) for _ in range(2)))


def _take_once(
    weight: Tensor,
    modules: dict[FormatName, nn.Module],
    empty: tuple[EmptyStage, EmptyStage],
    progress: Callable[[str], None],
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
    progress("empty layers")
    return Timings(size, bandwidth, flops, float32_flops, linears, *_overheads(*empty, device))


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


def _dense(layers: int) -> tuple[FormatName, ...]:
    dense: FormatName = "dense"
    return (dense,) * layers


def _overheads(few: EmptyStage, many: EmptyStage, device: torch.device) -> tuple[float, float]:
    """Seconds of a layer and of a step that are the same whatever the sizes: slope and intercept over two depths."""
    short, long = (best_seconds([stage.decode] * 30, device) for stage in (few, many))
    layer = max(long - short, 0.0) / (MANY_LAYERS - FEW_LAYERS)
    return layer, max(short - FEW_LAYERS * layer, 0.0)
