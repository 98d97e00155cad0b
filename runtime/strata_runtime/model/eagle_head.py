"""An EAGLE-3 head as a function: from tokens and the hidden states before them to logits of what comes next. Made by its loader, called by the drafter.

The entry of position p in its one layer's keys and values is made of the token there and of the state before it: of the model that verifies, fused, or,
of what is being drafted, the head's own. So a block holds what its own tokens and those before them say, as in every other pool; position 0, which has no
state before it, has no entry, and nobody sees its place.
Source: EAGLE-3 (arXiv 2503.01840), section 3.1. Rotary positions count from the first entry, as in training.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from strata_planner.contract.draft_head import DraftHead
from strata_planner.contract.rows import padded_rows
from strata_runtime.kernels import native_rowwise
from strata_runtime.model.attention import attend
from strata_runtime.model.attention_rule import AttentionRule
from strata_runtime.model.kv.batch import Batch
from strata_runtime.model.padding import padded, pads
from strata_runtime.model.rotary import turned_halves

Rotary = Callable[
    [Tensor, Tensor], tuple[Tensor, Tensor]
]  # of a type, at positions [1, tokens]: cos and sin [1, tokens, head_dim]

FIRST = 1  # the first position with an entry
LAYER = 0  # its number in its own pool


class HeadNorms(NamedTuple):
    """Weights [hidden] of its RMS norms: of embeddings, of fused states, before the MLP, before the logits."""

    embedding: Tensor
    hidden: Tensor
    mlp: Tensor
    out: Tensor


class HeadLinears(NamedTuple):
    """[..., inputs] -> [..., outputs]. `fc`: 3 * target's hidden -> hidden; `qkv`: 2 * hidden -> queries, keys, values; `gate_up`: gate, then up;
    `logits`: hidden -> draft vocabulary.
    """

    fc: nn.Module
    qkv: nn.Module
    out: nn.Module
    gate_up: nn.Module
    down: nn.Module
    logits: nn.Module


@dataclass(frozen=True)
class EagleHead:
    """`embed`: token ids [tokens] -> [tokens, hidden]. `targets`: the token of each of its logits, int64 [draft vocabulary], ascending."""

    shape: DraftHead
    norms: HeadNorms
    linears: HeadLinears
    embed: Callable[[Tensor], Tensor]
    rotary: Rotary
    targets: Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.norms.out.dtype

    @property
    def device(self) -> torch.device:
        return self.norms.out.device

    def fuse(self, states: Sequence[Tensor]) -> Tensor:
        """states: three of [tokens, target's hidden] -> [tokens, hidden]."""
        tokens = states[0].shape[0]
        fused: Tensor = self.linears.fc(
            self._rows(torch.cat([each.to(self.device, self.dtype) for each in states], dim=-1))
        )
        return fused[:tokens]

    def forward(self, tokens: Tensor, before: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """tokens: [tokens] int64, at `batch.positions`, none of them 0. before: [tokens, hidden], the state at the position before each.

        Returns logits [rows, draft vocabulary] float32 of `batch.sample_rows`, and the head's own states there [rows, hidden]. Keys and values of all
        tokens are stored.
        """
        count, rows = tokens.shape[0], batch.sample_rows
        before = self._rows(before)
        normed = self._norm(before, self.norms.hidden)
        residual = normed if self.shape.norm_before_residual else before
        embedded = self._norm(self._rows(self.embed(tokens)), self.norms.embedding)
        query, key, value = self._turned(self.linears.qkv(torch.cat((embedded, normed), dim=-1))[:count], batch)
        if not rows.numel():
            batch.layers[LAYER].store(batch.places, key, value)
            return before.new_empty(0, self.targets.shape[0]).float(), before[:0]
        rule = AttentionRule(self.shape.head_dim**-0.5, first=FIRST)
        attended = attend(batch, LAYER, query, key, value, rule)[rows].flatten(1)
        hidden = residual[rows] + self.linears.out(self._rows(attended))[: len(rows)]
        hidden += self._mlp(self._norm(hidden, self.norms.mlp))
        logits = self.linears.logits(self._rows(self._norm(hidden, self.norms.out)))[: len(rows)]
        return logits.float(), hidden

    def fuse_sizes(self, tokens: int) -> set[tuple[str, int, int]]:
        """As `kernel_sizes`, of fusing the states of so many."""
        return {("fuse", padded_rows(tokens), 0)} if pads(self.dtype) else set()

    def kernel_sizes(self, batch: Batch) -> set[tuple[str, int, int]]:
        """All that the libraries make kernels for in a step of this batch on a processor."""
        sizes = {("linears", padded_rows(batch.tokens), 0), ("head", padded_rows(len(batch.sample_rows)), 0)}
        return sizes if pads(self.dtype) else set()

    def _turned(self, projected: Tensor, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """projected: [tokens, queries + keys + values] -> [heads, tokens, head_dim] each, positions applied."""
        shape = self.shape
        heads = projected.view(projected.shape[0], -1, shape.head_dim).transpose(0, 1)
        query, key, value = torch.split(heads, [shape.heads, shape.kv_heads, shape.kv_heads])
        cos, sin = self.rotary(projected, (batch.positions - FIRST)[None])
        if native_rowwise.takes(projected) and cos.dtype is projected.dtype:
            for each in (query, key):
                native_rowwise.rotate(each, cos[0], sin[0])
            return query, key, value
        return turned_halves(query, cos, sin), turned_halves(key, cos, sin), value.contiguous()

    def _mlp(self, rows: Tensor) -> Tensor:
        gate, up = self.linears.gate_up(self._rows(rows)).chunk(2, dim=-1)
        projected: Tensor = self.linears.down(functional.silu(gate) * up)
        return projected[: rows.shape[0]]

    def _norm(self, rows: Tensor, weight: Tensor) -> Tensor:
        if native_rowwise.takes(rows):
            return native_rowwise.rms_norm(rows, weight, self.shape.norm_eps)
        wide = rows.float()
        scaled = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + self.shape.norm_eps)
        return weight * scaled.to(rows.dtype)

    @staticmethod
    def _rows(rows: Tensor) -> Tensor:
        """Padded where libraries keep kernels for every number of rows."""
        return padded(rows) if rows.device.type == "cpu" else rows


def rotary_of(config: dict[str, object], device: torch.device) -> Rotary:
    """By the fields of a head's config.json. Raises whatever transformers does for fields that make none."""
    made: Rotary = LlamaRotaryEmbedding(LlamaConfig.from_dict(dict(config))).to(device)
    return made
