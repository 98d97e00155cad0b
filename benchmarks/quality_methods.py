"""The quantizers that `benchmarks.quality` sets side by side, each from the weights of a whole model to what stands in their place."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.quality_model import Replacement
from benchmarks.reference import nested_uniform
from strata_planner.contract.formats import ANY_PRECISION, GPTQ, FormatName, group_size, stored_bytes
from strata_runtime.formats import make_linear
from strata_runtime.formats.any_precision import AnyParent, quantize_any, refit
from strata_runtime.formats.any_precision.refit import WIDTHS as REFITTED
from strata_runtime.formats.quantizers import CODE_OFFSET, quantize_groups
from strata_runtime.formats.static8.static_linear import static_linear
from strata_runtime.tools.calibration.activation_calibration import Recipe, calibrate_activations
from strata_runtime.tools.calibration.fisher import calibrated_layers
from strata_runtime.tools.calibration.hessians import input_hessians
from strata_runtime.tools.calibration.layers import LayeredModel
from strata_runtime.tools.gptq.solver import GptqSettings, quantize_gptq

WIDTHS = tuple(ANY_PRECISION)
FITTED = "Fisher, refitted"
GPTQ_NAME = "GPTQ, groups, act-order"
_ROUNDS_ACTIVATIONS = {"w8a8", "fp8_a8", "any4_a8"}
_SCALE_AND_ZERO_BYTES = 4

Weights = Mapping[str, Tensor]


@dataclass(frozen=True)
class Method:
    """`make(weights, bits)`: values by linear; `stored(bits, N, K)`: bytes of one of them with 16-bit scales and tables."""

    name: str
    widths: Sequence[int]
    make: Callable[[Weights, int], Weights]
    stored: Callable[[int, int, int], int]


@dataclass(frozen=True)
class Calibrated:
    """What calibration windows say, by linear: Fisher diagonals, and Hessians of the inputs."""

    folder: Path
    windows: Sequence[Tensor]
    fisher: Weights
    hessians: Weights

    def nested(self, weights: Weights, bits: int) -> Weights:
        """One 8-bit parent of each weight, at `bits`."""
        return _each(_nested, self.fisher, weights, bits)

    def refitted(self, weights: Weights, bits: int, *, separate: bool) -> Weights:
        """The codes of one 8-bit parent, or of separate clusters, and the table of `bits` fitted to the inputs: the same on both sides."""
        parents = {
            path: _parent(weight, bits, self.fisher[path], separate=separate) for path, weight in weights.items()
        }
        return {
            path: refit(parent, weights[path], self.hessians[path], widths=(bits,)).dequantized(bits)
            for path, parent in parents.items()
        }


def calibrated(folder: Path, windows: Sequence[Tensor]) -> Calibrated:
    """As `strata quantize` finds them."""
    fisher: dict[str, Tensor] = {}
    hessians: dict[str, Tensor] = {}
    for found in calibrated_layers(folder, windows):
        fisher |= found.fisher
        hessians |= found.hessians
    return Calibrated(folder, windows, fisher, hessians)


def in_format(weight: Tensor, name: FormatName) -> Replacement:
    """The value as stored with bfloat16 scales and tables; the module itself where activations are rounded too."""
    if name in _ROUNDS_ACTIVATIONS:
        return make_linear(weight, None, name, torch.float32)
    module = make_linear(weight, None, name, torch.bfloat16)
    return module.weight.data.float() if isinstance(module, nn.Linear) else module.dequantized()  # type: ignore[operator]


def calibrated_activations(folder: Path, windows: Sequence[Tensor], weights: Weights) -> dict[str, nn.Module]:
    """Format `w8a8_static`, by linear: activations rounded by scales and smoothing found on the windows."""
    activations = calibrate_activations(folder, windows, Recipe())
    return {
        path: static_linear(weight, None, activations.entry(path), torch.float32, name=path)
        for path, weight in weights.items()
    }


def methods(found: Calibrated) -> list[Method]:
    any_bytes = partial(_format_bytes, ANY_PRECISION)
    fisher: Weights = found.fisher
    return [
        Method("any precision, Fisher", WIDTHS, found.nested, any_bytes),
        Method(f"any precision, {FITTED}", REFITTED, partial(found.refitted, separate=False), any_bytes),
        Method("any precision, unweighted", WIDTHS, partial(_each, _nested, None), any_bytes),
        Method(f"separate k-means, {FITTED}", REFITTED, partial(found.refitted, separate=True), any_bytes),
        Method("separate k-means, Fisher", WIDTHS, partial(_each, _separate, fisher), any_bytes),
        Method("separate k-means, unweighted", (3, 4, 5, 6), partial(_each, _separate, None), any_bytes),
        Method("uniform nested, Fisher", WIDTHS, partial(_each, _uniform, fisher), _group_bytes),
        Method("uniform nested, unweighted", WIDTHS, partial(_each, _uniform, None), _group_bytes),
        Method("round to nearest, groups", WIDTHS, partial(_each, _nearest, None), _group_bytes),
        Method(GPTQ_NAME, (3, 4, 8), partial(_gptq, found), partial(_format_bytes, GPTQ)),
    ]


def _each(
    one: Callable[[Tensor, int, Tensor | None], Tensor], fisher: Weights | None, weights: Weights, bits: int
) -> Weights:
    return {path: one(weight, bits, None if fisher is None else fisher[path]) for path, weight in weights.items()}


def _nested(weight: Tensor, bits: int, importance: Tensor | None) -> Tensor:
    return _parent(weight, bits, importance, separate=False).dequantized(bits)


def _separate(weight: Tensor, bits: int, importance: Tensor | None) -> Tensor:
    return _parent(weight, bits, importance, separate=True).dequantized(bits)


def _parent(weight: Tensor, bits: int, importance: Tensor | None, *, separate: bool) -> AnyParent:
    """`separate`: 2^bits clusters at once, as SqueezeLLM makes each width (arXiv 2306.07629, section 4.1)."""
    if separate:
        return quantize_any(weight, bits, importance=importance, seed_bits=bits)
    return quantize_any(weight, importance=importance)


def _uniform(weight: Tensor, bits: int, importance: Tensor | None) -> Tensor:
    return nested_uniform.quantize(weight, importance=importance).at(bits)


def _nearest(weight: Tensor, bits: int, _importance: Tensor | None) -> Tensor:
    """The quantizer of int4 and int3 at any width: groups of 128, a scale and a zero in bfloat16."""
    stored = quantize_groups(weight, bits, group_size(weight.shape[1]), torch.bfloat16)
    groups = stored.codes.view(*stored.scales.shape, -1).float() - CODE_OFFSET
    return (groups * stored.scales[..., None].float() + stored.zeros[..., None].float()).view_as(weight)


def _gptq(found: Calibrated, weights: Weights, bits: int) -> Weights:
    """Layer after layer on what the quantized layers before it hand on (arXiv 2210.17323, section 4)."""
    settings = replace(GptqSettings(3), bits=bits, symmetric=False)
    made: dict[str, Tensor] = {}
    with torch.inference_mode():
        model = LayeredModel(found.folder, torch.float32, torch.device("cpu"))
        states = model.embedding().run(found.windows)
        for index in range(model.num_layers):
            layer = model.layer(index)
            own = {}
            for shared in input_hessians(layer, states):
                for path in shared.linears:
                    own[path] = quantize_gptq(layer.linears[path].weight.data, shared.hessian, settings).dequantized()
            with layer.with_weights(own):
                states = layer.run(states)
            keys = {linear: key for key, linear in layer.keyed_linears.items()}
            made |= {keys[layer.linears[path]]: weight.clone() for path, weight in own.items()}
    assert set(made) == set(weights)
    return made


def _format_bytes(formats: Mapping[int, FormatName], bits: int, out_features: int, in_features: int) -> int:
    return stored_bytes(formats[bits], out_features, in_features, "bfloat16")


def _group_bytes(bits: int, out_features: int, in_features: int) -> int:
    groups = out_features * (in_features // group_size(in_features))
    return out_features * in_features * bits // 8 + groups * _SCALE_AND_ZERO_BYTES
