"""A group of devices played by numpy: executes a strategy step by step on each rank's own part of every tensor.

What a rank holds it has from its own part, from its weights or from a collective: nothing else crosses between ranks. Shares
may be uneven or empty.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from strata_planner.partition.chain import WEIGHTS, Kind, Operation, WeightName
from strata_planner.partition.states import CS, RS, Collective, L, R, State
from strata_planner.partition.strategy import Apply, Move, Strategy

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Shape:
    """A small layer. Heads and KV heads must be multiples of the group's size."""

    tokens: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    gated: bool

    @property
    def columns_of(self) -> dict[str, tuple[int, ...]]:
        """The blocks that a tensor's columns consist of, by the weight that makes them; each block is dealt on its own."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "qkv": (queries, keys, keys),
            "w0": (self.hidden,),
            "w1": (self.mlp,) * (2 if self.gated else 1),
            "w2": (self.hidden,),
            "attention": (queries,),
            "activation": (self.mlp,),
            "hidden": (self.hidden,),
        }

    def weights(self, random: np.random.Generator) -> dict[WeightName, Array]:
        inputs = {"qkv": self.hidden, "w0": self.heads * self.head_dim, "w1": self.hidden, "w2": self.mlp}
        return {name: random.normal(size=(inputs[name], sum(self.columns_of[name]))) for name in WEIGHTS}


@dataclass(frozen=True)
class Tensor:
    """`parts[rank]` is what that rank holds; `blocks` are the columns' blocks of the whole tensor."""

    parts: tuple[Array, ...]
    state: State
    rows: int
    blocks: tuple[int, ...]

    @classmethod
    def placed(cls, whole: Array, state: State, blocks: tuple[int, ...], ranks: int) -> "Tensor":
        """As a loader lays it down."""
        parts = {
            R: lambda rank: whole,
            RS: lambda rank: whole[_rows(len(whole), ranks, rank)],
            CS: lambda rank: whole[:, _columns(blocks, ranks, rank)],
        }
        return cls(tuple(parts[state](rank) for rank in range(ranks)), state, len(whole), blocks)

    @property
    def ranks(self) -> int:
        return len(self.parts)

    def local_slice(self, state: State) -> "Tensor":
        """A view of a replicated tensor, each rank of its own copy."""
        assert self.state is R
        parts = [
            Tensor.placed(part, state, self.blocks, self.ranks).parts[rank] for rank, part in enumerate(self.parts)
        ]
        return Tensor(tuple(parts), state, self.rows, self.blocks)

    def moved(self, collective: Collective, after: State) -> "Tensor":
        """The collective's result, from the parts that ranks send."""
        if self.state is L:
            assert collective in {Collective.ALL_REDUCE, Collective.REDUCE_SCATTER}
            assert (collective is Collective.ALL_REDUCE) == (after is R)
            return Tensor.placed(np.sum(self.parts, axis=0), after, self.blocks, self.ranks)
        assert (collective is Collective.ALL_GATHER) == (after is R)
        return Tensor.placed(self._assembled(), after, self.blocks, self.ranks)

    def _assembled(self) -> Array:
        if self.state is RS:
            return np.concatenate(self.parts)
        assert self.state is CS
        whole = np.full((self.rows, sum(self.blocks)), np.nan)
        for rank, part in enumerate(self.parts):
            whole[:, _columns(self.blocks, self.ranks, rank)] = part
        return whole


def _rows(count: int, ranks: int, rank: int) -> NDArray[np.intp]:
    return np.array_split(np.arange(count), ranks)[rank]


def _columns(blocks: tuple[int, ...], ranks: int, rank: int) -> NDArray[np.intp]:
    starts = np.cumsum((0, *blocks[:-1]))
    return np.concatenate([start + _rows(width, ranks, rank) for start, width in zip(starts, blocks, strict=True)])


def run(strategy: Strategy, shape: Shape, hidden: Array, held: dict[WeightName, Tensor]) -> Array:
    """The layer's output, taken from the last rank. `held`: weights as they lie; a replicated one may be used by a view."""
    ranks = held["qkv"].ranks
    stream = Tensor.placed(hidden, R, (shape.hidden,), ranks)
    residual = stream
    wanted = strategy.layout
    weights = {
        name: tensor if tensor.state is wanted[name] else tensor.local_slice(wanted[name])
        for name, tensor in held.items()
    }
    for step in strategy.steps:
        if isinstance(step, Move) and step.weight:
            assert weights[step.weight].state is step.before
            weights[step.weight] = weights[step.weight].moved(step.collective, step.after)
        elif isinstance(step, Move):
            assert stream.state is step.before
            stream = stream.moved(step.collective, step.after)
        else:
            assert stream.state is step.before
            if step.operation.kind is Kind.NORM:
                residual = stream
            stream = _applied(step, shape, stream, residual, weights)
    assert stream.state is R
    assert all(np.array_equal(part, stream.parts[0]) for part in stream.parts)
    return stream.parts[-1]


def whole_layer(shape: Shape, hidden: Array, weights: dict[WeightName, Array], *, residuals: bool) -> Array:
    """The same layer on one device."""
    queries = shape.heads * shape.head_dim
    attended = _attention(_normed(hidden) @ weights["qkv"], shape, shape.heads, shape.kv_heads)
    assert attended.shape == (len(hidden), queries)
    middle = attended @ weights["w0"] + residuals * hidden
    return _activated(_normed(middle) @ weights["w1"], shape) @ weights["w2"] + residuals * middle


def _applied(step: Apply, shape: Shape, stream: Tensor, residual: Tensor, weights: dict[WeightName, Tensor]) -> Tensor:
    operation = step.operation
    if operation.weight:
        weight = weights[operation.weight]
        assert weight.state is step.weight
        parts = [left @ right for left, right in zip(stream.parts, weight.parts, strict=True)]
    else:
        parts = [_local(operation, shape, stream, residual, rank) for rank in range(stream.ranks)]
    kept = {Kind.NORM: "hidden", Kind.ADD: "hidden"}
    blocks = shape.columns_of[operation.weight or kept.get(operation.kind, operation.kind.value)]
    return Tensor(tuple(parts), step.after, stream.rows, blocks)


def _local(operation: Operation, shape: Shape, stream: Tensor, residual: Tensor, rank: int) -> Array:
    part = stream.parts[rank]
    if operation.kind is Kind.NORM:
        return _normed(part)
    if operation.kind is Kind.ACTIVATION:
        return _activated(part, shape)
    if operation.kind is Kind.ATTENTION:
        share = stream.ranks if stream.state is CS else 1
        return _attention(part, shape, shape.heads // share, shape.kv_heads // share)
    if residual.state is stream.state:
        return part + residual.parts[rank]
    if stream.state is L:
        return part + residual.parts[rank] if rank == 0 else part
    return part + residual.local_slice(stream.state).parts[rank]


def _normed(values: Array) -> Array:
    mean, deviation = values.mean(axis=1, keepdims=True), values.std(axis=1, keepdims=True)
    return np.asarray((values - mean) / (deviation + 1e-6))


def _activated(values: Array, shape: Shape) -> Array:
    if not shape.gated:
        return np.maximum(values, 0)
    gate, up = np.split(values, 2, axis=1)
    return np.asarray(gate / (1 + np.exp(-gate)) * up)


def _attention(qkv: Array, shape: Shape, heads: int, kv_heads: int) -> Array:
    """Causal, grouped queries."""
    tokens, width = len(qkv), shape.head_dim
    queries, keys, values = np.split(qkv, np.cumsum([heads * width, kv_heads * width]), axis=1)
    mask = np.tril(np.ones((tokens, tokens), dtype=bool))
    outputs = []
    for head in range(heads):
        group = slice(width * (head * kv_heads // heads), width * (head * kv_heads // heads + 1))
        scores = queries[:, head * width : (head + 1) * width] @ keys[:, group].T / np.sqrt(width)
        weights = np.exp(np.where(mask, scores, -np.inf) - scores.max(axis=1, keepdims=True, initial=-50))
        outputs.append(weights / weights.sum(axis=1, keepdims=True) @ values[:, group])
    return np.concatenate(outputs, axis=1)
