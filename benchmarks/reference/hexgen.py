"""HexGen's cost model as printed (ICML 2024, section 3.2 and appendix A), for comparison with ours: `benchmarks.communication`.

The planner never prices by it: it takes a layer for 12 H^2 parameters (multi-head attention, an MLP of 4 H), knows no
precision and no batching. Symbols: H hidden size, By bytes of a value, b batch, s_in and s_out tokens, l layers of a stage,
|D| devices of a stage, m their memory bandwidth, c their operations per second, alpha and beta of a link.

    phase    compute, stage                              tensor parallelism, stage                             hop
    prefill  24 b s_in H^2 l / (|D| c)                   4 l (|D|-1) (alpha + b s_in H By / (|D| beta))        alpha + b s_in H By / beta
    decode   12 H^2 By s_out l / (|D| m)                 4 l s_out (|D|-1) (alpha + b H By / (|D| beta))       s_out (alpha + b H By / beta)
             + 24 b s_out H^2 l / (|D| c)

The paper prints one sum for both phases; its Table 3 tells them apart, so the terms with s_in are the prefill's, those with
s_out the decoding's. Every term is linear in six rates of a uniform cluster, `Rates`, whatever the batch: `terms` gives the
factors.
"""

from dataclasses import astuple, dataclass
from typing import Literal

PhaseName = Literal["prefill", "decode"]


@dataclass(frozen=True)
class Layout:
    """`pipeline` stages of `tensor` devices each, all layers dealt evenly."""

    tensor: int
    pipeline: int

    def __str__(self) -> str:
        parts = (("TP", self.tensor), ("PP", self.pipeline))
        return " ".join(f"{name}={degree}" for name, degree in parts if degree > 1)


@dataclass(frozen=True)
class Task:
    """A model's depth and width, and one request's tokens."""

    layers: int
    hidden: int
    input_tokens: int
    output_tokens: int
    value_bytes: int = 2


@dataclass(frozen=True)
class Rates:
    """What the paper does not name for its Table 3, as the costs use it: per device and per link, with the batch inside."""

    scan: float  # 1 / m, seconds per byte
    operation: float  # b / c, seconds per operation of one sequence
    tensor_latency: float  # alpha inside a stage, seconds
    tensor_byte: float  # b / beta inside a stage, seconds per byte
    hop_latency: float  # alpha between stages
    hop_byte: float  # b / beta between stages

    def seconds(self, task: Task, layout: Layout, phase: PhaseName) -> float:
        """Of all stages and hops one after the other."""
        factors = terms(task, layout, phase)
        rates: tuple[float, ...] = astuple(self)
        return sum(factor * rate for factor, rate in zip(factors, rates, strict=True))


def terms(task: Task, layout: Layout, phase: PhaseName) -> tuple[float, float, float, float, float, float]:
    """How often each of `Rates` counts, in its order."""
    h, depth, devices = task.hidden, task.layers, layout.tensor
    prefill = phase == "prefill"
    rounds = 1 if prefill else task.output_tokens
    tokens = task.input_tokens if prefill else 1  # of one round
    scan = 0.0 if prefill else 12 * h * h * task.value_bytes * rounds * depth / devices
    exchanges = 4 * depth * (devices - 1) * rounds
    hops = (layout.pipeline - 1) * rounds
    size = tokens * h * task.value_bytes
    return (
        scan,
        24 * h * h * tokens * rounds * depth / devices,
        exchanges,
        exchanges * size / devices,
        hops,
        hops * size,
    )
