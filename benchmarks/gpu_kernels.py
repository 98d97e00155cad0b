"""The kernels of bit-planes on a GPU, over the vendor's float16 product. `python -m benchmarks.gpu_kernels [--json FILE]`.

First a table of what the compiler made of each kernel, with estimated bounds, which needs no GPU (half a minute); then the rows, which are
measured where a CUDA device is (a minute) and have no value elsewhere. Several equal weights are multiplied in turn, so that none stays in
the cache; a graph of all of them is replayed, the best of its times counts.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.rows import Row, run
from strata_planner.contract.formats import ANY_PRECISION, plane_columns, stored_bytes
from strata_runtime.formats.planes import triton_products
from strata_runtime.formats.weights import PlanesWeight

LARGE, SMALL = (8192, 28672), (4096, 4096)  # outputs, inputs; the small one fits the cache of a large GPU
WORKING_SET_BYTES = 1 << 30
REPLAYS = 20
GEMM_TOKENS = (16, 64, 256)
PEER = "cuBLAS float16"
NO_GPU = "no CUDA device here"


def code_table() -> Table:
    """Estimates; see `gpu_code`."""
    from benchmarks.gpu_code import H100, compile_product  # noqa: PLC0415 -- imports Triton, the `cuda` extra

    table = Table(title=f"Compiled, not run: bounds are estimates for {LARGE[0]} x {LARGE[1]}, one token, {H100.name}")
    names = ("issue", "integers", "shared", "memory")
    for column in ("kernel", "sm", "registers", "spilled bytes", "shared KiB", "instr/weight", "integer/weight"):
        table.add_column(column, justify="right")
    for name in names:
        table.add_column(f"{name} us", justify="right")
    cases = [*(("any", bits) for bits in ANY_PRECISION), *(("gptq", bits) for bits in (2, 3, 4, 8))]
    for capability in (80, 90):
        for kind, bits in cases:
            code = compile_product(kind, bits, capability)
            size = stored_bytes("any4", *LARGE, "float16") * bits // 4
            bounds = code.bounds_seconds(LARGE[0] * LARGE[1], size, H100) if capability == 90 else {}
            shown = (f"{bounds[name] * 1e6:.1f}" if bounds else "" for name in names)
            table.add_row(
                code.kernel,
                str(capability),
                str(code.registers),
                str(code.stack_bytes),
                f"{code.shared_bytes / 1024:.0f}",
                f"{code.per_weight:.2f}",
                f"{code.integers_per_weight:.2f}",
                *shown,
            )
    return table


def some_weights(shape: tuple[int, int], bits: int) -> list[PlanesWeight]:
    """As many as no cache holds, of random planes."""
    size = stored_bytes(ANY_PRECISION[bits], *shape, "float16")
    row_bytes = plane_columns(shape[1]) // 8
    return [
        PlanesWeight(
            tuple(torch.randint(0, 256, (shape[0], row_bytes), dtype=torch.uint8, device="cuda") for _ in range(bits)),
            torch.randn(shape[0], 1 << bits, device="cuda", dtype=torch.float16).sort(dim=1).values,
            shape[1],
        )
        for _ in range(max(2, -(-WORKING_SET_BYTES // size)))
    ]


def seconds(calls: Sequence[Callable[[], object]]) -> float:
    """Of one call, the best of several replays of all in turn."""
    for call in calls:  # compiles, chooses algorithms
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times: list[float] = []
    new_event: Any = torch.cuda.Event
    for _ in range(REPLAYS):
        start, stop = new_event(enable_timing=True), new_event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / 1e3)
    return min(times) / len(calls)


def dense_seconds(shape: tuple[int, int], count: int) -> float:
    tokens = torch.randn(count, shape[1], device="cuda", dtype=torch.float16)
    copies = max(2, -(-WORKING_SET_BYTES // (2 * shape[0] * shape[1])))
    weights = [torch.randn(shape, device="cuda", dtype=torch.float16) for _ in range(copies)]
    return seconds([partial(torch.nn.functional.linear, tokens, weight) for weight in weights])


def planes_seconds(shape: tuple[int, int], bits: int, count: int) -> float:
    tokens = torch.randn(count, shape[1], device="cuda", dtype=torch.float16)
    few = count <= triton_products.MOST_TOKENS
    run_one: Callable[[Tensor, PlanesWeight], Tensor] = triton_products.product if few else triton_products.dequantized
    return seconds([partial(run_one, tokens, weight) for weight in some_weights(shape, bits)])


def over_dense(name: str, value_seconds: float, dense: float, goal: float | None = None) -> Row:
    return Row(name, value_seconds * 1e6, "us", PEER, dense * 1e6, dense / value_seconds, goal)


def measured() -> list[Row]:
    found = []
    dense, times = dense_seconds(LARGE, 1), {bits: planes_seconds(LARGE, bits, 1) for bits in ANY_PRECISION}
    found += [over_dense(f"gpu_matvec_k{bits}", times[bits], dense, 3.5 if bits == 4 else None) for bits in times]
    rises = all(times[bits] < times[bits + 1] for bits in range(3, 8))
    found.append(Row("gpu_monotone", float(rises), "time rises with k", goal=1.0))
    found.append(over_dense("gpu_matvec_k4_small", planes_seconds(SMALL, 4, 1), dense_seconds(SMALL, 1)))
    for count in GEMM_TOKENS:
        found.append(over_dense(f"gpu_gemm_{count}_k4", planes_seconds(LARGE, 4, count), dense_seconds(LARGE, count)))
    return found


def absent() -> list[Row]:
    names = [f"gpu_matvec_k{bits}" for bits in ANY_PRECISION]
    names += ["gpu_monotone", "gpu_matvec_k4_small", *(f"gpu_gemm_{count}_k4" for count in GEMM_TOKENS)]
    goals = {"gpu_matvec_k4": 3.5, "gpu_monotone": 1.0}
    return [Row(name, None, NO_GPU, None if name == "gpu_monotone" else PEER, goal=goals.get(name)) for name in names]


def rows() -> list[Row]:
    """For `benchmarks.kernels` too."""
    with torch.inference_mode():
        return measured() if torch.cuda.is_available() else absent()


def measure() -> list[Row]:
    Console(width=150).print(code_table())
    return rows()


if __name__ == "__main__":
    run("gpu_kernels", measure)
