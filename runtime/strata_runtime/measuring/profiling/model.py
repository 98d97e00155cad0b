"""A model's shapes with random weights, few layers deep: what is measured in place of a checkpoint, which need not be here.

Used by `survey` and by benchmarks. Layers must be alike: those of a model whose depth is cut are the first ones.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from strata_planner.contract.formats import ComputeType, FormatName, stored_bytes
from strata_planner.contract.kv import kv_token_bytes
from strata_planner.contract.latencies import LinearShape, ProfiledModel
from strata_planner.contract.quantization import without_description
from strata_planner.contract.sequence_state import keeps_state
from strata_runtime.errors import InputError
from strata_runtime.formats import QuantLinear
from strata_runtime.loading.blocked import BlockedLinear
from strata_runtime.loading.stage_model import StageModel
from strata_runtime.measuring.profiling.fields import DEPTHS, depth_of
from strata_runtime.model.cached_heads import cached_heads
from strata_runtime.model.random_model import make_random_model


@dataclass(frozen=True)
class Sizes:
    """What decides how many layers and cached tokens a survey holds."""

    depth: int
    hidden: int
    width: int  # of the MLP
    heads: int
    kv_heads: int
    head_dim: int
    latent: bool
    positions: int

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> "Sizes":
        """From config.json by transformers' own reading of it, which knows every architecture's names."""
        config = AutoConfig.for_model(**without_description(fields))
        hidden, heads = int(config.hidden_size), int(config.num_attention_heads)
        kept = cached_heads(config)
        width = getattr(config, "intermediate_size", None) or getattr(config, "ffn_dim", None) or 4 * hidden
        return cls(
            depth=int(config.num_hidden_layers),
            hidden=hidden,
            width=int(width),
            heads=heads,
            kv_heads=kept.heads,
            head_dim=kept.width,
            latent=kept.latent,
            positions=int(getattr(config, "max_position_embeddings", 0) or 0),
        )

    def layer_bytes(self, name: FormatName, compute_type: ComputeType) -> int:
        """About what one layer's weights take: attention and a gated MLP."""
        linear, square = ((out, self.hidden) for out in (self.width, self.hidden))
        return 3 * stored_bytes(name, *linear, compute_type) + 3 * stored_bytes(name, *square, compute_type)

    def cached_token_bytes(self, kv_bits: int, compute_type: ComputeType) -> int:
        """Of one layer."""
        return kv_token_bytes(kv_bits, self.kv_heads, self.head_dim, compute_type, latent=self.latent)


def make_shallow(fields: Mapping[str, Any], layers: int, folder: Path) -> Path:
    """A model of the same shapes with so many layers; lists with one entry per layer follow. Raises InputError for models with state."""
    if keeps_state(str(fields.get("model_type"))):
        raise InputError(
            f"a profile knows no '{fields['model_type']}': its layers are of two kinds, of which one keeps state; plan it without one"
        )
    depth = depth_of(fields)
    shallow: dict[str, Any] = {
        name: (value + value[-1:] * layers)[:layers] if isinstance(value, list) and len(value) == depth else value
        for name, value in without_description(fields).items()
    }
    shallow |= {name: layers for name in DEPTHS if name in fields}
    kind = shallow.pop("model_type")
    return make_random_model(folder, kind, dtype=torch.bfloat16, **shallow)


def shapes_of(model: StageModel, fields: Mapping[str, Any]) -> ProfiledModel:
    """Of a loaded stage, whose layers must be alike; raises InputError where they are not."""
    linears = {_linears(layer) for layer in model.layers}
    if model.latent:
        raise InputError(
            f"a profile knows no '{fields['model_type']}': its keys and values are one entry; plan it without one"
        )
    if len(linears) != 1:
        raise InputError(
            f"the first layers of this '{fields['model_type']}' model differ in shape; a profile is of layers that are alike: "
            "plan this model without one"
        )
    return ProfiledModel(
        architecture=fields["model_type"],
        hidden_size=model.hidden_size,
        vocab_size=model.vocab_size,
        heads=Sizes.of(fields).heads,
        kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        linears=linears.pop(),
    )


def _linears(layer: torch.nn.Module) -> tuple[LinearShape, ...]:
    found = [module for module in layer.modules() if isinstance(module, (QuantLinear, BlockedLinear, torch.nn.Linear))]
    return tuple(sorted(LinearShape(int(each.out_features), int(each.in_features)) for each in found))
