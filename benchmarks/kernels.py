"""Kernels of bit-planes on one thread, beside torch's own: `python -m benchmarks.kernels [--json FILE]`, under a minute.

Each figure is the time of a whole module's call (`AnyLinear` against bfloat16 `nn.Linear`, torch's int4 kernel, oneDNN's 8-bit one), on layer shapes of
models of 1B, 7B and 30B parameters, weights in turn from a set that no cache holds. Those that are compared are timed in turn, round after round, in the
thread's own time; the best round counts, since other programs only add to it. Rows are of the worst shape; the tables print every shape.
"""

import copy
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from benchmarks import gpu_kernels
from benchmarks.rows import Row, run
from strata_planner.contract.formats import FormatName
from strata_runtime.formats import make_linear, stored_bytes_of
from strata_runtime.formats.planes.any_linear import AnyLinear
from strata_runtime.formats.quantizers import quantize_channels
from strata_runtime.formats.weights import PlanesWeight
from strata_runtime.loading.blocked import dense_linear
from strata_runtime.measuring.timing import copies_beyond_cache

SHAPES = {  # outputs, inputs
    "1B attention": (2048, 2048),
    "1B MLP": (8192, 2048),
    "7B attention": (4096, 4096),
    "7B MLP": (11008, 4096),
    "30B attention": (7168, 7168),
}
BITS = (3, 4, 5, 6, 7, 8)
ROWS = (1, 2, 5, 8, 16, 32)  # tokens at which few bits are held to 16
BITS_OF_ROWS = (3, 4, 6, 8)
SHAPE_OF_ROWS = (2816, 1024)
ROUNDS = 12
Calls = Sequence[Callable[[], object]]


def interleaved(contenders: dict[str, Calls], rounds: int = ROUNDS) -> dict[str, float]:
    """Seconds of one call of each, the best of rounds in which all take their turn."""
    best = dict.fromkeys(contenders, float("inf"))
    for calls in contenders.values():
        calls[0]()
    for _ in range(rounds):
        for name, calls in contenders.items():
            start = time.thread_time()
            for call in calls:
                call()
            best[name] = min(best[name], (time.thread_time() - start) / len(calls))
    return best


def any_linears(shape: tuple[int, int], bits: int, format_name: FormatName | None = None) -> list[AnyLinear]:
    """As many as no cache holds, with random bits for planes."""
    rows, columns = shape
    generator = torch.Generator().manual_seed(0)
    table = (torch.randn(rows, 1 << bits, generator=generator) * columns**-0.5).sort(dim=1).values.to(torch.bfloat16)
    planes = [torch.randint(0, 256, (rows, columns // 8), dtype=torch.uint8, generator=generator) for _ in range(bits)]
    count = copies_beyond_cache(bits * planes[0].nbytes, torch.device("cpu"))
    weights = [PlanesWeight(tuple(plane.clone() for plane in planes), table.clone(), columns) for _ in range(count)]
    return [AnyLinear(weight, None, format_name) for weight in weights]


def dense_weights(shape: tuple[int, int]) -> list[Tensor]:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * shape[1] ** -0.5
    return [weight.to(torch.bfloat16) for _ in range(copies_beyond_cache(2 * weight.numel(), torch.device("cpu")))]


def dense_linears(shape: tuple[int, int]) -> list[nn.Module]:
    return [make_linear(weight, None, "dense", torch.bfloat16) for weight in dense_weights(shape)]


def int4_linears(shape: tuple[int, int]) -> list[nn.Module]:
    """torch's int4 kernel, where this build of torch has one for this processor."""
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * shape[1] ** -0.5
    first = make_linear(weight, None, "int4", torch.bfloat16)
    count = copies_beyond_cache(stored_bytes_of(first), torch.device("cpu"))
    return [first, *(copy.deepcopy(first) for _ in range(count - 1))]


def eight_bit_peers(shape: tuple[int, int], count: int) -> dict[str, Calls]:
    """oneDNN's product of int8 with int8 on activations that are quantized already, in both of torch's forms."""
    tokens = torch.randint(-127, 128, (count, shape[1]), dtype=torch.int8)
    shifted = (tokens.int() + 128).to(torch.uint8)
    stored = quantize_channels(torch.randn(shape), torch.float32)
    zeros = torch.zeros(shape[0], dtype=torch.int32)
    copies = [stored.codes.clone() for _ in range(copies_beyond_cache(stored.codes.nbytes, torch.device("cpu")))]
    packed = [torch.ops.onednn.qlinear_prepack(codes, list(tokens.shape)) for codes in copies]
    tail: tuple[object, ...] = (stored.scales, zeros, None, 1.0, 0, torch.bfloat16, "none", [], "")
    return {
        "qlinear": [partial(torch.ops.onednn.qlinear_pointwise, shifted, 0.1, 128, codes, *tail) for codes in packed],
        "_int_mm": [partial(torch._int_mm, tokens, codes.t()) for codes in copies],  # noqa: SLF001 -- torch names its kernels so
    }


def at_one_token(shape: tuple[int, int]) -> dict[str, float]:
    token = torch.randn(1, shape[1]).to(torch.bfloat16)
    contenders: dict[str, Calls] = {"dense": [partial(each, token) for each in dense_linears(shape)]}
    contenders["int4pack"] = [partial(each, token) for each in int4_linears(shape)]
    linears = {bits: any_linears(shape, bits) for bits in BITS}
    contenders |= {f"k{bits}": [partial(each, token) for each in linears[bits]] for bits in BITS}
    # The same memory: where a weight lies makes a tenth of its time.
    eight = [AnyLinear(each.stored, None, "any4_a8") for each in linears[4]]
    contenders["k4 a8"] = [partial(each, token) for each in eight]
    return interleaved(contenders)


def int8_linears(shape: tuple[int, int]) -> list[nn.Module]:
    return [make_linear(weight, None, "int8", torch.bfloat16) for weight in dense_weights(shape)]


def at_rows(shape: tuple[int, int]) -> dict[int, dict[str, float]]:
    """Formats of few bits beside 16 bits as a slot multiplies them, at each of ROWS tokens."""
    linears: dict[str, Sequence[nn.Module]] = {
        "dense": [dense_linear(weight, None) for weight in dense_weights(shape)],
        "int8": int8_linears(shape),
    }
    linears |= {f"k{bits}": any_linears(shape, bits) for bits in BITS_OF_ROWS}
    found = {}
    for count in ROWS:
        tokens = torch.randn(count, shape[1]).to(torch.bfloat16)
        found[count] = interleaved(
            {name: [partial(each, tokens) for each in calls] for name, calls in linears.items()}, rounds=5
        )
    return found


def at_tokens(shape: tuple[int, int], count: int) -> dict[str, float]:
    tokens = torch.randn(count, shape[1]).to(torch.bfloat16)
    contenders: dict[str, Calls] = {
        "dense": [partial(each, tokens) for each in dense_linears(shape)],
        "k4": [partial(each, tokens) for each in any_linears(shape, 4)],
        "k4 a8": [partial(each, tokens) for each in any_linears(shape, 4, "any4_a8")],
    }
    return interleaved(contenders | eight_bit_peers(shape, count), rounds=5)


def deviation(seconds: dict[str, float]) -> float:
    """The worst relative distance of times by bits from the line through zero that is nearest to all of them."""
    per_bit = [seconds[f"k{bits}"] / bits for bits in BITS]
    return (max(per_bit) - min(per_bit)) / (max(per_bit) + min(per_bit))


def print_times(title: str, times: dict[str, dict[str, float]]) -> None:
    names = list(next(iter(times.values())))
    print(f"\n{title}, microseconds (times faster than dense)\n{'':24}" + "".join(f"{name:>15}" for name in names))
    for line, seconds in times.items():
        cells = (f"{seconds[name] * 1e6:.0f} ({seconds['dense'] / seconds[name]:.2f})" for name in names)
        print(f"{line:24}" + "".join(f"{cell:>15}" for cell in cells))


def _titled(shape: str) -> str:
    return f"{shape} {SHAPES[shape][0]}x{SHAPES[shape][1]}"


def worst_row(
    name: str, times: dict[str, dict[str, float]], own: str, peers: Sequence[str], peer: str, goal: float | None
) -> Row:
    """The shape with the least speed over the fastest of `peers`."""

    def ratio(seconds: dict[str, float]) -> float:
        return min(seconds[each] for each in peers) / seconds[own]

    worst = min(times.values(), key=ratio)
    return Row(
        name=name,
        value=worst[own] * 1e6,
        unit="us, worst shape",
        peer=peer,
        peer_value=min(worst[each] for each in peers) * 1e6,
        ratio=ratio(worst),
        goal=goal,
    )


def measure() -> list[Row]:
    torch.set_num_threads(1)
    rows: list[Row] = []
    with torch.inference_mode():
        by_rows = at_rows(SHAPE_OF_ROWS)
        print_times(f"{SHAPE_OF_ROWS}, as slots load them", {f"{count} tokens": by_rows[count] for count in ROWS})
        for count in ROWS:
            for name in ("k4", "int8"):
                times = {"": by_rows[count]}
                rows.append(worst_row(f"rows_{count}_{name}", times, name, ("dense",), "packed bfloat16", 1.0))
        single = {_titled(name): at_one_token(shape) for name, shape in SHAPES.items()}
        print_times("1 token", single)
        for bits in BITS:
            goal = 3.0 if bits == 4 else None
            rows.append(worst_row(f"matvec_k{bits}", single, f"k{bits}", ("dense",), "bfloat16 nn.Linear", goal))
        worst = max(map(deviation, single.values()))
        rows.append(Row("matvec_proportional", worst, "of time per bit, worst shape", goal=0.25, lower_is_better=True))
        rows.append(worst_row("matvec_over_int4pack", single, "k4", ("int4pack",), "torch int4pack", 1.0))
        rows.append(worst_row("matvec_a8_over_a16", single, "k4 a8", ("k4",), "16-bit activations", None))
        for count in (16, 64):
            times = {_titled(name): at_tokens(shape, count) for name, shape in SHAPES.items()}
            print_times(f"{count} tokens", times)
            rows.append(worst_row(f"gemm_{count}_a16", times, "k4", ("dense",), "bfloat16 nn.Linear", 0.9))
            rows.append(worst_row(f"gemm_{count}_a8", times, "k4 a8", ("qlinear", "_int_mm"), "oneDNN W8A8", 0.9))
    return [*rows, *gpu_kernels.rows()]


if __name__ == "__main__":
    run("kernels", measure)
