"""Statistics of one layer: the moments of what enters its linears, the ranges of their weights, and how far their errors move
the layer's output.

Called by `calibrate` for each layer in turn; the planner turns the numbers into indicators. Moments are those that the
variance indicator of LLM-PQ needs (arXiv 2403.01136, Proposition 2): mean and variance over tokens and features.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from strata_planner.contract.calibration import LayerStatistics, LinearStatistics
from strata_planner.contract.formats import group_size, padded_in_features
from strata_runtime.tools.calibration.inputs import inputs_heard
from strata_runtime.tools.calibration.layers import Piece

_LEAST_ENERGY = 1e-3  # of the mean: a token that is almost zero (some models embed their first one so) divides nothing


@dataclass
class Moments:
    """Count, mean and variance (of the population) of all values seen so far."""

    count: int = 0
    mean: float = 0.0
    variance: float = 0.0

    def add(self, values: torch.Tensor) -> None:
        """Merged as by Chan, Golub, LeVeque (1979): no difference of large sums."""
        variance, mean = (float(each) for each in torch.var_mean(values.float(), correction=0))
        total = self.count + values.numel()
        share, step = values.numel() / total, mean - self.mean
        self.mean += share * step
        self.variance += share * (variance - self.variance) + share * (1 - share) * step * step
        self.count = total


@contextmanager
def input_moments(linears: Mapping[str, nn.Linear], tokens: int) -> Iterator[dict[str, Moments]]:
    """Fills while windows of at most `tokens` tokens run. Rows beyond them pad a batch and are left out."""
    moments = {name: Moments() for name in linears}
    with inputs_heard(linears, lambda name, inputs: moments[name].add(inputs.flatten(0, -2)[:tokens])):
        yield moments


@dataclass(frozen=True)
class WeightRanges:
    """Of one weight: over the whole matrix, and as the quantizers of groups (int4, int3) and outputs (int8) see it."""

    low: float
    high: float
    group_range_square: float
    channel_peak_square: float


def weight_ranges(weight: torch.Tensor) -> WeightRanges:
    """weight: [N, K]. Rows that no group divides are padded with zeros, as they are stored."""
    low, high = weight.aminmax(dim=1)
    peak = torch.maximum(high, -low).float()
    columns, group = padded_in_features(weight.shape[1]), group_size(weight.shape[1])
    padded = nn.functional.pad(weight, (0, columns - weight.shape[1])) if columns > weight.shape[1] else weight
    bottom, top = padded.view(weight.shape[0], -1, group).aminmax(dim=-1)
    return WeightRanges(
        low=float(low.min()),
        high=float(high.max()),
        group_range_square=float((top.float() - bottom.float()).square().mean()),
        channel_peak_square=float(peak.square().mean()),
    )


def deviations(
    layer: Piece, weights: Mapping[str, torch.Tensor], inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
) -> dict[str, float]:
    """For each linear alone at `weights`: the mean over tokens of |dy|^2 / |y|^2 of the layer's output y.

    Token by token, as the next norm sees it: one token of huge activations must not hide the others. inputs and outputs:
    hidden states [tokens, hidden] before and after the layer with its own weights.
    """
    energies = [_energies(output) for output in outputs]
    least = _LEAST_ENERGY * float(torch.cat(energies).mean())
    sizes = [energy.clamp_min(least) for energy in energies]
    count = sum(len(size) for size in sizes)
    found = {}
    for name, weight in weights.items():
        with layer.with_weights({name: weight}):
            changed = layer.run(inputs)
        moved = (_energies(new - old) for new, old in zip(changed, outputs, strict=True))
        found[name] = sum(float((each / size).sum()) for each, size in zip(moved, sizes, strict=True)) / count
    return found


def layer_statistics(
    linears: Mapping[str, nn.Linear], moments: Mapping[str, Moments], deviation: Mapping[int, Mapping[str, float]]
) -> LayerStatistics:
    """`deviation`: bits -> linear -> share of the output's energy."""
    return LayerStatistics(
        tuple(
            _linear(name, linear, moments[name], {str(bits): each[name] for bits, each in deviation.items()})
            for name, linear in linears.items()
        )
    )


def _linear(name: str, linear: nn.Linear, moments: Moments, deviation: dict[str, float]) -> LinearStatistics:
    ranges = weight_ranges(linear.weight.data)
    return LinearStatistics(
        name=name,
        out_features=linear.out_features,
        in_features=linear.in_features,
        input_mean=moments.mean,
        input_variance=moments.variance,
        weight_min=ranges.low,
        weight_max=ranges.high,
        group_range_square=ranges.group_range_square,
        channel_peak_square=ranges.channel_peak_square,
        deviation=deviation,
    )


def _energies(states: torch.Tensor) -> torch.Tensor:
    """[tokens, hidden] -> [tokens]."""
    return states.float().square().sum(dim=1)
