"""Speed of one linear at every format, against torch's own bfloat16 linear at the same number of tokens.

`python -m benchmarks.format_kernels [--json FILE]`. One thread, bfloat16, weights in turn from a set that no cache holds. The rows are what
`make_linear` gives; the tables before them show every kernel of a format on its own, from which the thresholds in
`strata_runtime.formats.kernels` come. The rows of bit-planes are in `kernels`.
"""

import copy
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.rows import Row, run
from strata_planner.contract.formats import FormatName
from strata_runtime.formats import MAKERS, make_linear, stored_bytes_of
from strata_runtime.formats.kernels import CHANNEL_KERNELS, GROUP_KERNELS, Kernel
from strata_runtime.measuring.timing import best_seconds, copies_beyond_cache

CPU = torch.device("cpu")
SHAPES = ((768, 768), (3072, 768), (2048, 2048), (4096, 4096))  # outputs, inputs
ROW_SHAPE = (2048, 2048)
ALL_KERNELS: tuple[Kernel[Any], ...] = (*CHANNEL_KERNELS, *GROUP_KERNELS)
TOKENS = (1, 4, 16, 64)
TABLE_TOKENS = (1, 4, 8, 16, 32, 48, 64, 128, 256)


def linears(shape: tuple[int, int], name: FormatName) -> list[nn.Module]:
    """As many equal ones as no cache holds."""
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * shape[1] ** -0.5
    first = make_linear(weight, None, name, torch.bfloat16)
    return [first, *(copy.deepcopy(first) for _ in range(copies_beyond_cache(stored_bytes_of(first), CPU) - 1))]


def seconds(calls: Iterable[Callable[[], object]]) -> float:
    return best_seconds(list(calls), CPU)


def rows() -> list[Row]:
    found: list[Row] = []
    dense = linears(ROW_SHAPE, "dense")
    for name in tuple(MAKERS)[1:]:
        modules = linears(ROW_SHAPE, name)
        for count in TOKENS:
            tokens = torch.randn(count, ROW_SHAPE[1]).to(torch.bfloat16)
            peer = 1 / seconds(partial(each, tokens) for each in dense)
            value = 1 / seconds(partial(each, tokens) for each in modules)
            found.append(
                Row(
                    name=f"{name}_tokens_{count}",
                    value=value,
                    unit="linears/s",
                    peer="bfloat16 nn.Linear",
                    peer_value=peer,
                    ratio=value / peer,
                )
            )
    return found


def print_table(shape: tuple[int, int]) -> None:
    """Microseconds of every kernel by number of tokens; `<` marks the one that the number of tokens chooses."""
    print(f"\n{shape[0]} x {shape[1]}, microseconds" + "".join(f"{count:>9}" for count in TABLE_TOKENS))
    dense = linears(shape, "dense")
    by_tokens = [
        [partial(each, torch.randn(count, shape[1]).to(torch.bfloat16)) for each in dense] for count in TABLE_TOKENS
    ]
    _print_line("nn.Linear", [(seconds(calls), False) for calls in by_tokens])
    for name in tuple(MAKERS)[1:]:
        modules = linears(shape, name)
        choices = [each for each in ALL_KERNELS if each.format == name]
        for kernel in choices:
            if "reference" not in kernel.name:
                _print_line(kernel.name, _kernel_times(kernel, choices, modules, shape[1]))


def _kernel_times(
    kernel: Kernel[Any], choices: Sequence[Kernel[Any]], modules: list[nn.Module], in_features: int
) -> list[tuple[float, bool]]:
    times = []
    for count in TABLE_TOKENS:
        tokens = torch.randn(count, in_features).to(torch.bfloat16)
        chosen = next(each for each in choices if count <= each.most_tokens and each.runs(tokens, modules[0].stored))
        times.append((seconds(partial(kernel.run, tokens, each.stored) for each in modules), chosen is kernel))
    return times


def _print_line(label: str, times: list[tuple[float, bool]]) -> None:
    print(f"{label:28}" + "".join(f"{each * 1e6:8.0f}{'<' if chosen else ' '}" for each, chosen in times))


def measure() -> list[Row]:
    torch.set_num_threads(1)
    with torch.inference_mode():
        for shape in SHAPES:
            print_table(shape)
        return rows()


if __name__ == "__main__":
    run("format_kernels", measure)
