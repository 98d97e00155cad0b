"""Seconds from a latency profile: a regression over measured points, per phase and per kernel.

A LatencySource for the layer shapes, device and arithmetic of its profile, and for the parts of such layers on ranks as many as were measured
together; asked by `latency` before the roofline. The terms are
those of LLM-PQ (arXiv 2403.01136, section 4.3): prefill a0 + a1 v + a2 s + a3 v s + a4 v s^2, decode c0 + c1 v + c2 v (t + s) +
c3 (t + s). Two things differ, because the runtime does. A linear's time depends on the rows that a step computes (v s, padded) and its kernel
changes with them, so each kernel has a fit of its own and c0 + c1 v, a0 + a2 s + a3 v s are a line through each pair of measured
row numbers. A prompt beyond the longest step is cut into chunks that see what is cached.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import msgspec
import numpy as np

from strata_planner.contract.formats import COMPUTE_TYPE_BYTES, FormatName
from strata_planner.contract.kv import KV_BITS, kv_token_bytes
from strata_planner.contract.latencies import (
    LatencyPoint,
    LatencyProfile,
    LinearShape,
    PhaseName,
    SharedLayers,
    StoredLinear,
)
from strata_planner.costs.communication import layer_sums_seconds
from strata_planner.costs.regression import Array, hats, relative_fit
from strata_planner.costs.source import Phase, Rates, Timed
from strata_planner.question.catalogue import CPU
from strata_planner.question.model import LayerShape, Model

Step = tuple[Phase, ...]  # what is computed together


def steps_of(phase: Phase, most: int) -> list[Step]:
    """How the scheduler packs a micro-batch: steps filled to `most` tokens, prompts cut where a step is full."""
    if phase.decoding or phase.total_tokens <= most:
        return [(phase,)]
    share = min(1.0, 2 * phase.context / phase.tokens)  # below 1 where attention is asked for in part
    steps: list[Step] = []
    current: list[Phase] = []
    room = most
    for _ in range(phase.sequences):
        done = 0
        while done < phase.tokens:
            taken = min(room, phase.tokens - done)
            current.append(Phase(1, taken, phase.past + share * (done + taken / 2)))
            done, room = done + taken, room - taken
            if not room:
                steps.append(tuple(current))
                current, room = [], most
    return [*steps, tuple(current)] if current else steps


@dataclass(frozen=True)
class Attention:
    """The terms of attention. `token_bytes`: keys and values of one token in one layer."""

    token_bytes: int

    def decode(self, chunks: Sequence[Phase]) -> list[float]:
        """(t + s), v (t + s), and what of that is beyond sizes around those of caches."""
        keys = sum(each.sequences * each.context for each in chunks)
        beyond = (max(0.0, keys - size / self.token_bytes) for size in _CACHE_BYTES)
        return [keys / max(1, sum(each.sequences for each in chunks)), keys, *beyond]

    @staticmethod
    def prefill(chunks: Sequence[Phase]) -> list[float]:
        """v; of chunks that go on n + past, whose keys are gathered; v s^2 and n (n + past), each by block of rows."""
        fresh, going_on, gathered = [0.0] * _BLOCKS, [0.0] * _BLOCKS, 0.0
        for each in chunks:
            block = bisect_right(_BLOCK_ROWS, each.tokens)
            if each.past > _ROUNDING_TOKENS:
                keys = each.sequences * (each.tokens + each.past)
                gathered += keys
                going_on[block] += each.tokens * keys
            else:
                fresh[block] += 2 * each.total_tokens * each.context
        return [sum(each.sequences for each in chunks), gathered, *fresh, *going_on]


_CACHE_BYTES = (2 << 20, 4 << 20, 8 << 20)
# torch's attention on a CPU works on 32, 64 or 256 rows at once, by the number of rows (aten/native/cpu/FlashAttentionKernel.cpp).
_BLOCK_ROWS = (192, 768)
_BLOCKS = len(_BLOCK_ROWS) + 1
_ROUNDING = 1.001
_ROUNDING_TOKENS = 0.5


@dataclass(frozen=True)
class Points:
    """What one fit is made from. rows, seconds: [points]; terms: [points, terms]; kernels: of each point."""

    rows: Array
    terms: Array
    seconds: Array
    kernels: tuple[str, ...]

    def fit(self) -> "Fit":
        """Each kernel has a time at each of its row numbers; attention does not know which one multiplied."""
        names = tuple(dict.fromkeys(self.kernels))
        own = np.array(self.kernels)
        knots = {name: np.unique(self.rows[own == name]) for name in names}
        blocks = [hats(self.rows, knots[name]) * (own == name)[:, None] for name in names]
        coefficients = relative_fit(np.hstack([*blocks, self.terms]), self.seconds)
        ends = np.cumsum([len(each) for each in knots.values()])
        values = dict(zip(names, np.split(coefficients[: ends[-1]], ends[:-1]), strict=True))
        return Fit(knots, values, coefficients[ends[-1] :], self.terms.max(axis=0))

    def without(self, left_out: "np.ndarray[tuple[int], np.dtype[np.bool_]]") -> "Points":
        kept = ~left_out
        kernels = tuple(name for name, keep in zip(self.kernels, kept, strict=True) if keep)
        return Points(self.rows[kept], self.terms[kept], self.seconds[kept], kernels)

    def leave_one_out(self) -> list[float]:
        """Relative error at each point that has others on both sides, of a fit that has not seen it."""
        errors: list[float] = []
        for kernel, knots in self.fit().knots.items():
            inside = (self.rows > knots[0]) & (self.rows < knots[-1]) & (np.array(self.kernels) == kernel)
            for at in np.flatnonzero(inside):
                fit = self.without(np.arange(len(self.rows)) == at).fit()
                errors.append(abs(fit.seconds(kernel, self.rows[at], self.terms[at]) / self.seconds[at] - 1))
        return errors


@dataclass(frozen=True)
class Fit:
    """Seconds of a layer: by kernel a value at each of its `knots` (row numbers), and one for each term of attention."""

    knots: Mapping[str, Array]
    values: Mapping[str, Array]
    terms: Array
    most_terms: Array

    def seconds(self, kernel: str, rows: float, terms: Sequence[float] | Array) -> float:
        name = kernel if kernel in self.knots else max(self.knots, key=lambda each: float(self.knots[each][-1]))
        linears = float(hats(np.array([float(rows)]), self.knots[name])[0] @ self.values[name])
        return max(linears, 0.0) + self.attention(terms)

    def attention(self, terms: Sequence[float] | Array) -> float:
        return float(self.terms @ np.asarray(terms))

    def covers(self, kernel: str, rows: float, terms: Sequence[float]) -> bool:
        """Whether the grid went that far."""
        knots = self.knots.get(kernel)
        inside = knots is not None and bool(knots[0] <= rows <= knots[-1])
        return inside and bool(np.all(np.array(terms) <= self.most_terms * _ROUNDING))


@dataclass(frozen=True)
class FittedLatency:
    """The source. `name` tells plans where their numbers are from."""

    profile: LatencyProfile

    def layer(self, layer: LayerShape, format_name: FormatName, rates: Rates, phase: Phase) -> Timed | None:
        """None for another shape, device, number of threads, compute type, KV bits or format."""
        if layer.part_of is not None:
            return self._part(layer, format_name, rates, phase)
        if not self.knows_device(rates) or not self.knows_layer(layer) or not self.knows_format(layer, format_name):
            return None
        return self._timed(self.step_layer(format_name, step) for step in self._steps(phase))

    def _part(self, part: LayerShape, format_name: FormatName, rates: Rates, phase: Phase) -> Timed | None:
        """A rank's part of a layer, as it was measured with the others, less the sums, which no source counts."""
        shared = self.profile.shared_by(part.ranks)
        if part.part_of is None or format_name not in shared.formats:
            return None
        told = self._of_ranks[part.ranks].layer(part.part_of, format_name, rates, phase)
        if told is None:
            return None
        size = phase.total_tokens * self.profile.model.hidden_size * COMPUTE_TYPE_BYTES[rates.compute_type]
        computing = told.seconds - layer_sums_seconds(shared.ranks, size)
        return Timed(max(computing, _LEAST_SHARE * told.seconds), f"{told.source} by {shared.ranks} ranks")

    @cached_property
    def _of_ranks(self) -> "dict[int, FittedLatency]":
        """What was measured of so many ranks, as a source of its own."""
        return {each.ranks: self._among(each) for each in self.profile.shared}

    def _among(self, shared: SharedLayers) -> "FittedLatency":
        layers = {name: count for name, count in self.profile.layers.items() if name in shared.formats}
        return FittedLatency(msgspec.structs.replace(self.profile, points=shared.points, layers=layers, shared=()))

    def head(self, model: Model, rates: Rates, sequences: int) -> Timed | None:
        own = (self.profile.model.vocab_size, self.profile.model.hidden_size)
        if not self.knows_device(rates) or ((model.vocab_size, model.embedding_size), model.head_format) != (
            own,
            "dense",
        ):
            return None
        rows = self.profile.rows(sequences)
        return self._timed([(self._head.seconds(_HEAD, rows, []), self._head.covers(_HEAD, rows, []))])

    def step(self, model: Model, rates: Rates, phase: Phase) -> Timed | None:
        if not self.knows_device(rates) or model.hidden_size != self.profile.model.hidden_size:
            return None
        return self._timed((self.step_overhead(step), True) for step in self._steps(phase))

    def knows_device(self, rates: Rates) -> bool:
        profile, device = self.profile, self.profile.device
        threads = rates.profile.threads if device.type == CPU else 0
        same = device.type in {rates.name, rates.profile.type} and threads in {0, device.threads}
        return same and (rates.compute_type, rates.kv_bits) == (profile.compute_type, profile.kv_bits)

    def knows_layer(self, layer: LayerShape) -> bool:
        own = self.profile.model
        if (layer.heads, layer.kv_heads, layer.head_dim) != (own.heads, own.kv_heads, own.head_dim):
            return False
        linears = tuple(sorted(LinearShape(each.out_features, each.in_features) for each in layer.linears))
        return linears == own.linears and all(each.copies == 1 for each in layer.linears)

    def knows_format(self, layer: LayerShape, format_name: FormatName) -> bool:
        """Whether both phases were measured, and of a GPTQ checkpoint's formats layers that are stored alike: groups, orders, 16 bits."""
        if not {(format_name, "prefill"), (format_name, "decode")} <= self.points.keys():
            return False
        measured = self.profile.stored.get(format_name)
        linears = (StoredLinear(each.out_features, each.in_features, each.stored) for each in layer.linears)
        return measured is None or Counter(linears) == Counter(measured)

    def step_layer(self, format_name: FormatName, step: Step) -> tuple[float, bool]:
        """Seconds of one layer for a step of any mix of decoding and prefilling; whether the grid covers it."""
        rows = self.profile.rows(sum(each.total_tokens for each in step))
        kernel = self.profile.kernel(format_name, rows)
        decoding = [each for each in step if each.tokens == 1]
        chunks = [each for each in step if each.tokens > 1]
        phase: PhaseName = "prefill" if chunks else "decode"
        fit = self._fits[format_name, phase]
        terms = self._attention.prefill(chunks) if chunks else self._attention.decode(decoding)
        seconds = fit.seconds(kernel, rows, terms)
        if chunks and decoding:  # their rows are counted already: what is left is their attention
            seconds += self._fits[format_name, "decode"].attention(self._attention.decode(decoding))
        return seconds, fit.covers(kernel, rows, terms)

    def step_overhead(self, step: Step) -> float:
        """Seconds of a step beside its layers and the head."""
        sums = (sum(each.sequences for each in step), sum(each.total_tokens for each in step))
        return float(self._step @ np.array([1.0, *sums]))

    @property
    def name(self) -> str:
        model, kv_bits = self.profile.model, self.profile.kv_bits
        kv = "" if kv_bits == max(KV_BITS) else f" with keys and values of {kv_bits} bits"
        return f"profile of {model.architecture} {model.hidden_size} wide on {self.profile.device.type}{kv}"

    @cached_property
    def leave_one_out(self) -> dict[str, float]:
        """Mean relative error per format and phase at points that are left out of the fit one by one."""
        errors = {f"{name} {phase}": points.leave_one_out() for (name, phase), points in self.points.items()}
        return {name: float(np.mean(each)) for name, each in errors.items() if each}

    @cached_property
    def points(self) -> dict[tuple[FormatName, PhaseName], Points]:
        """What is fitted, per format and phase."""
        groups: dict[tuple[FormatName, PhaseName], list[LatencyPoint]] = {}
        for point in self.profile.points:
            groups.setdefault((point.format, point.phase), []).append(point)
        return {name: self._gathered(name[1], points) for name, points in groups.items()}

    def _steps(self, phase: Phase) -> list[Step]:
        return steps_of(phase, self.profile.max_step_tokens)

    def _timed(self, parts: Iterable[tuple[float, bool]]) -> Timed:
        listed = list(parts)
        beyond = "" if all(covered for _, covered in listed) else ", extrapolated"
        return Timed(sum(seconds for seconds, _ in listed), self.name + beyond)

    def _gathered(self, phase: PhaseName, points: Sequence[LatencyPoint]) -> Points:
        of = self._attention.decode if phase == "decode" else self._attention.prefill
        return Points(
            np.array([float(self.profile.rows(point.sequences * point.tokens)) for point in points]),
            np.array([of([chunk_of(point)]) for point in points], dtype=float),
            np.array([point.layer_seconds for point in points]),
            tuple(point.kernel for point in points),
        )

    @cached_property
    def _attention(self) -> Attention:
        model, profile = self.profile.model, self.profile
        return Attention(kv_token_bytes(profile.kv_bits, model.kv_heads, model.head_dim, profile.compute_type))

    @cached_property
    def _fits(self) -> dict[tuple[FormatName, PhaseName], Fit]:
        return {name: points.fit() for name, points in self.points.items()}

    @cached_property
    def _head(self) -> Fit:
        points = self.profile.head
        rows = np.array([float(self.profile.rows(point.sequences)) for point in points])
        seconds = np.array([point.seconds for point in points])
        return Points(rows, np.zeros((len(rows), 0)), seconds, (_HEAD,) * len(rows)).fit()

    @cached_property
    def _step(self) -> Array:
        """Seconds of a step beside its layers: a constant, per sequence, per token."""
        points = [point for point in self.profile.points if point.step_seconds > 0]
        features = np.array([[1.0, point.sequences, point.sequences * point.tokens] for point in points])
        executor = relative_fit(features, np.array([point.step_seconds for point in points]))
        handling = self.profile.handling
        if not handling:
            return executor
        features = np.array([[1.0, point.sequences, point.tokens] for point in handling])
        return executor + relative_fit(features, np.array([point.seconds for point in handling]))


_HEAD = "head"
_LEAST_SHARE = 0.1  # of a rank's seconds: sums are assumed, and may be told longer than they were


def chunk_of(point: LatencyPoint) -> Phase:
    """Lengths of a decode point differ by one from sequence to sequence, and each token sees itself."""
    seen = (point.sequences + 1) / 2 if point.phase == "decode" else point.tokens / 2
    return Phase(point.sequences, point.tokens, point.past + seen)
