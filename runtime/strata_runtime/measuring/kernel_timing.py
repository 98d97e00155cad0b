"""Which kernel of each format is the fastest on this device for how many tokens: `python -m strata_runtime.measuring.kernel_timing --device cuda`.

Called by `strata_runtime.measuring.measure`, before it measures the linears that choose by it. Keeps the table where `formats.measured` finds it. On a GPU
every kernel must first give the products of its format's reference there: what does not run, or computes something else, is left
out of the table, and said. Knows nothing of models or plans.
"""

import argparse
import copy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, get_args

import torch
from torch import Tensor

from strata_planner.contract.formats import ANY_PRECISION, BITS_OF_FORMAT, GPTQ, ComputeType, FormatName
from strata_runtime.formats import COMPUTE_DTYPES, MAKERS, make_linear, measured
from strata_runtime.formats.agreement import disagreement, size_of_sums
from strata_runtime.formats.gptq import humming_kernels
from strata_runtime.formats.gptq.humming_kernels import Library
from strata_runtime.formats.gptq.kernels import GPTQ_KERNELS, HUMMING, dequantized
from strata_runtime.formats.gptq.weight import GptqWeight
from strata_runtime.formats.kernels import CHANNEL_KERNELS, GROUP_KERNELS, PLANE_KERNELS, Kernel
from strata_runtime.formats.measured import TOKEN_COUNTS, Steps, steps_of
from strata_runtime.formats.planes.planes import pack_planes
from strata_runtime.formats.vendor_sums import add_in_float32
from strata_runtime.formats.weights import PlanesWeight
from strata_runtime.measuring.timing import CPU_FEATURES, CUDA_FEATURES, best_seconds, copies_beyond_cache

CHOSEN_BY_TOKENS: tuple[tuple[Kernel[Any], ...], ...] = (CHANNEL_KERNELS, GROUP_KERNELS, PLANE_KERNELS, GPTQ_KERNELS)
CALLS = 2  # a round; rounds end when their budget is spent
GPTQ_GROUP = 128
_WEIGHTS_AT_A_TIME = 1 << 22

Say = Callable[[str], object]
Seconds = dict[int, float]  # by number of tokens


def keep(device: str, compute_type: ComputeType, library: Library | None, say: Say) -> None:
    """Time the kernels and keep the table; `library`: humming-kernels, where they are to be tried."""
    found = fastest_kernels(torch.device(device), compute_type, library, say)
    try:
        say(f"kept in {measured.save(found, COMPUTE_DTYPES[compute_type], torch.device(device))}")
    except OSError as error:
        say(f"not kept, so kernels are chosen by their own limits: {error}")


def fastest_kernels(
    device: torch.device, compute_type: ComputeType, library: Library | None, say: Say
) -> dict[FormatName, Steps]:
    """For each format with a choice of kernels on this device: which is the fastest for how many tokens. Some seconds, and on a GPU minutes of
    compilers at first.
    """
    say("measuring: kernels by number of tokens")
    add_in_float32(device)
    size, dtype = CUDA_FEATURES if device.type == "cuda" else CPU_FEATURES, COMPUTE_DTYPES[compute_type]
    found: dict[FormatName, Steps] = {}
    with torch.inference_mode():
        weight = torch.randn(size, size, device=device, generator=torch.Generator(device).manual_seed(0)) * size**-0.5
        tokens = weight[: TOKEN_COUNTS[-1]].to(dtype)
        for name, stored in _stored_forms(weight, dtype, gptq=device.type == "cuda" or library is not None):
            of_format = [each for table in CHOSEN_BY_TOKENS for each in table if each.format == name]
            subject = Subject(tokens, stored, say)
            able = [each for each in of_format if each.runs(tokens, stored)]
            kernels = subject.agreeing(able) if device.type == "cuda" else _quick(able)
            seconds = {each.name: subject.seconds(each) for each in kernels} if len(able) > 1 else {}
            whole = subject.humming_seconds(name, library) if library is not None else {}
            steps = steps_with(seconds, whole)
            if steps:
                found[name] = steps
    return found


def steps_with(seconds: Mapping[str, Seconds], whole: Mapping[str, Seconds]) -> Steps:
    """The fastest kernel at each number of tokens. `whole`: of kernels whose layout stands in place of the others', so that they are taken for
    any number of tokens or none: only if nothing is faster at any.
    """
    for name, times in whole.items():
        if all(times[count] <= other[count] for other in seconds.values() for count in times):
            return ((max(times), name),)
    return steps_of(seconds) if seconds else ()


@dataclass(frozen=True)
class Subject:
    """A weight as one format stores it, and tokens of the compute type [TOKEN_COUNTS[-1], K], on one device."""

    tokens: Tensor
    stored: Any
    say: Say

    def agreeing(self, kernels: Sequence[Kernel[Any]]) -> list[Kernel[Any]]:
        """Those that give the products of the last of them, which is plain torch and defines what the others compute."""
        *others, reference = kernels
        values = self.stored.dequantized()
        expected = reference.run(self.tokens, self.stored)
        size = size_of_sums(
            self.tokens, tuple(values.shape), _WEIGHTS_AT_A_TIME, lambda start, stop: values[start:stop].clone()
        )
        kept = []
        for kernel in others:
            reason = self._difference(kernel, expected, size)
            if reason is None:
                kept.append(kernel)
            else:
                self.say(f"{kernel.name} of {kernel.format} is left out: {reason}")
        return [*kept, reference]

    def _difference(self, kernel: Kernel[Any], expected: Tensor, size: Tensor) -> str | None:
        for count in TOKEN_COUNTS:
            try:
                found = kernel.run(self.tokens[:count], self.stored)
            except Exception as error:  # noqa: BLE001 -- compilers and drivers raise what they like; the others go on
                return f"it failed: {type(error).__name__}: {str(error).strip()[:300]}"
            reason = disagreement(found, expected[:count], size[:count], self.tokens.shape[1])
            if reason is not None:
                return f"it computes something else for {count} tokens: {reason}"
        return None

    def seconds(self, kernel: Kernel[Any]) -> Seconds:
        return self._seconds_of([partial(_run, kernel, each) for each in self._copies(self.stored)])

    def humming_seconds(self, format_name: FormatName, library: Library) -> dict[str, Seconds]:
        """Of a GPTQ weight in the layout of humming-kernels; nothing of other formats and where they are left out."""
        if not isinstance(self.stored, GptqWeight):
            return {}
        repacked = humming_kernels.repack(self.stored, self.tokens.dtype, library, dequantized)
        if isinstance(repacked, str):
            self.say(f"{HUMMING} of {format_name} is left out: {repacked}")
            return {}
        return {HUMMING: self._seconds_of([each.product for each in self._copies(repacked)])}

    def _copies(self, stored: Any) -> list[Any]:
        """On a GPU as many as no cache holds, counted as for two bits."""
        if self.tokens.device.type != "cuda":
            return [stored] * CALLS
        copies = copies_beyond_cache(self.tokens.shape[1] ** 2 // 4, self.tokens.device)
        return [stored, *(copy.deepcopy(stored) for _ in range(copies - 1))]

    def _seconds_of(self, products: Sequence[Callable[[Tensor], Tensor]]) -> Seconds:
        return {
            count: best_seconds([partial(each, self.tokens[:count]) for each in products], self.tokens.device)
            for count in TOKEN_COUNTS
        }


def _run(kernel: Kernel[Any], stored: object, tokens: Tensor) -> Tensor:
    return kernel.run(tokens, stored)


def _quick(kernels: list[Kernel[Any]]) -> list[Kernel[Any]]:
    """Without kernels in plain torch where others run; of one alone there is nothing to choose."""
    quick = [each for each in kernels if not each.name.endswith("-reference")]
    if any(each.name.endswith("-native") for each in quick):
        quick = [each for each in quick if not each.name.endswith("-dequantized")]
    return quick if len(quick) > 1 else []


def _stored_forms(weight: Tensor, dtype: torch.dtype, *, gptq: bool) -> Iterator[tuple[FormatName, Any]]:
    """Of the formats with several kernels. Codes of bit-planes are drawn: quantizing takes longer than all that is timed.

    On a processor GPTQ has nothing to choose from: native, or plain torch.
    """
    for name in MAKERS:
        if name in ANY_PRECISION.values() or name == "any4_a8":
            bits = BITS_OF_FORMAT[name]
            table = torch.randn(len(weight), 1 << bits, device=weight.device).sort(dim=1).values.to(dtype)
            yield name, PlanesWeight(pack_planes(_codes(weight, bits), bits), table, weight.shape[1])
        elif sum(each.format == name for table in CHOSEN_BY_TOKENS for each in table) > 1:
            yield name, make_linear(weight, None, name, dtype).stored
    for bits, name in GPTQ.items() if gptq else ():
        groups = (len(weight), -(-weight.shape[1] // GPTQ_GROUP))
        scales = torch.rand(groups, device=weight.device).add_(0.5).mul_(2.0 ** (1 - bits))
        zeros = torch.full(groups, 1 << (bits - 1), dtype=torch.uint8, device=weight.device)
        planes = pack_planes(_codes(weight, bits), bits)
        # As bfloat16 and float16 both hold them.
        yield name, GptqWeight(planes, scales.bfloat16().half(), zeros, GPTQ_GROUP, weight.shape[1])


def _codes(weight: Tensor, bits: int) -> Tensor:
    return torch.randint(0, 1 << bits, weight.shape, dtype=torch.uint8, device=weight.device)


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        _say("error: --device cuda: torch sees no CUDA device here; use --device cpu, or install a CUDA build of torch")
        return 2
    library: Library | None = None
    if options.device == "cuda" and not options.without_humming:
        installed = humming_kernels.installed()
        if isinstance(installed, str):
            _say(f"gptq* in bit-planes only: {installed}")
        else:
            library = installed
    keep(options.device, options.compute_type, library, _say)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m strata_runtime.measuring.kernel_timing", description=__doc__.split("\n", maxsplit=1)[0]
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--compute-type", choices=get_args(ComputeType), default="bfloat16")
    parser.add_argument("--without-humming", action="store_true", help="do not try the kernels of humming-kernels")
    return parser


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")


if __name__ == "__main__":
    sys.exit(main())
