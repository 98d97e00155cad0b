"""A language model as its shapes: what each decoder layer, the embedding and the head hold. Read from config.json.

Made by `strata plan` and the operator, read by the costs. Real shapes: grouped queries, gated MLPs, tied tables, OPT's
projections, experts. Knows no weights, no device and no precision.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any, Self

import msgspec

from strata_planner.contract.architectures import ROUTING, check_architecture
from strata_planner.contract.formats import (
    BITS_OF_FORMAT,
    FormatName,
)
from strata_planner.contract.kv import has_one_key_head
from strata_planner.contract.quantization import (
    BlockFloat8,
    Quantization,
    read_quantization,
    with_old_description,
    without_description,
)
from strata_planner.contract.sequence_state import SequenceState
from strata_planner.contract.text_part import text_part
from strata_planner.contract.values import Value
from strata_planner.errors import ModelError
from strata_planner.question.config_fields import check_fields
from strata_planner.question.families import Family, expert_path, family_of, flag, linear_path, unsaid
from strata_planner.question.linear import Linear
from strata_planner.question.mixers import (
    convolution_mlp_width,
    other_parameters,
    projections,
    read_states,
)


class LayerShape(Value, frozen=True):
    """One decoder layer: its attention heads, its linear operators, and what stays in the compute type beside them. `part_of`: the layer of which this is
    the share of one of `ranks`, 0: of ranks with unlike shares. `of_query`, `of_key`: how many of the other parameters belong to each query head, each key head.
    """

    heads: int
    kv_heads: int
    head_dim: int
    linears: tuple[Linear, ...]
    other_parameters: int  # norms, routers
    float32_values: int = 0  # that no compute type rounds: what experts are chosen by
    latent: bool = False  # keys and values of all heads come of one entry of `head_dim` values
    state: SequenceState | None = None  # in place of keys and values: the layer is no attention, and has no heads
    part_of: "LayerShape | None" = None
    ranks: int = 1
    of_query: int = 0
    of_key: int = 0

    @property
    def parameters(self) -> int:
        return sum(linear.parameters for linear in self.linears) + self.other_parameters

    @property
    def linear_parameters(self) -> int:
        return sum(linear.copies * linear.out_features * linear.in_features for linear in self.linears)

    @property
    def stored_format(self) -> FormatName | None:
        """The format of most of its quantized weights, where the checkpoint holds the layer quantized; None: it is plain."""
        weights: Counter[FormatName] = Counter()
        for linear in self.linears:
            if linear.stored:
                weights[linear.stored.format] += linear.copies * linear.out_features * linear.in_features
        return max(weights, key=lambda name: (weights[name], BITS_OF_FORMAT[name]), default=None)

    @property
    def mlp_width(self) -> int:
        """Values per token between the two halves of the MLP, gate included."""
        return sum(linear.active * linear.out_features for linear in self.linears if linear.name in MLP_IN)


class Model(Value, frozen=True):
    """A decoder-only model. Parameters: `table` (token embedding), `embedding_other` (positions, projection into the
    hidden size, norm) on the first stage; `head_other` (final norm, projection out, bias) and the head's table on the last.
    `tied`: head and embedding share one table where they share a device. `max_positions`: 0 where nothing bounds them. `quantization`: what
    the checkpoint says of weights that are quantized already; its layers then have `stored_formats`, and 16 bits, and nothing else.
    `head_format`: how the head's table is stored where it is served; one of fewer bits is shared with no embedding.
    """

    architecture: str
    hidden_size: int
    embedding_size: int  # width of the token table; OPT-350m's differs from the hidden size (d_t)
    vocab_size: int
    max_positions: int
    layers: tuple[LayerShape, ...]
    embedding_other: int
    head_other: int
    tied: bool
    quantization: Quantization | BlockFloat8 | None = None
    head_format: FormatName = "dense"

    @property
    def has_experts(self) -> bool:
        return any(linear.copies > 1 for layer in set(self.layers) for linear in layer.linears)

    @property
    def keeps_state(self) -> bool:
        """Of sequences, beside keys and values: such state cannot be shared, and nobody can go back in it."""
        return any(layer.state for layer in set(self.layers))

    @property
    def stored_formats(self) -> tuple[FormatName | None, ...]:
        """Of each layer; None: the checkpoint holds it in 16 bits."""
        return tuple(layer.stored_format for layer in self.layers)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def table(self) -> int:
        return self.vocab_size * self.embedding_size

    @property
    def parameters(self) -> int:
        """Of the whole model, a tied table counted once."""
        tables = self.table * (1 if self.tied else 2)
        return sum(layer.parameters for layer in self.layers) + self.embedding_other + self.head_other + tables

    @classmethod
    def from_folder(cls, path: Path | str, *, for_serving: bool = True) -> Self:
        """Reads `config.json` in a folder, or that file itself. Raises ModelError, UnsupportedModelError."""
        file = Path(path)
        file = file / "config.json" if file.is_dir() or file.suffix != ".json" else file
        try:
            config = json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise ModelError(f"model '{path}': there is no {file}; give the folder of a Hugging Face model") from error
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise ModelError(f"model '{path}': {file} cannot be read as JSON ({error})") from error
        if isinstance(config, dict):
            config = with_old_description(config, file.parent)
        return cls.from_config(config, for_serving=for_serving)

    @classmethod
    def from_config(cls, config: dict[str, Any], *, for_serving: bool = True) -> Self:
        """Raises UnsupportedModelError where the engine lacks something (unless only shapes are studied), ModelError."""
        if not isinstance(config, dict):
            raise ModelError(f"config.json holds a {type(config).__name__}; an object with model_type is needed")
        whole, config = config, text_part(config)
        check_fields(config)
        quantization = read_quantization(whole)
        if for_serving:
            check_architecture(without_description(config))
        reader = _Reader(config, quantization)
        layers = tuple(reader.layer(index) for index in range(reader.num_layers))
        return cls(
            architecture=reader.model_type,
            hidden_size=reader.hidden,
            embedding_size=reader.embedding_size,
            vocab_size=reader.number("vocab_size"),
            max_positions=reader.max_positions,
            layers=layers,
            embedding_other=reader.embedding_other(),
            head_other=reader.head_other(),
            tied=bool(config.get("tie_word_embeddings", reader.family.tied)),
            quantization=quantization,
        )


MLP_IN = (
    "gate_up_proj",
    "gate_proj",
    "up_proj",
    "experts.gate_up",
    "experts.gate",
    "experts.up",
    "shared_expert.gate_proj",
    "shared_expert.up_proj",
)


_MLP_WIDTHS = ("intermediate_size_mlp", "intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size")


class _Reader:
    """One config.json, its synonyms resolved."""

    def __init__(self, config: dict[str, Any], quantization: Quantization | BlockFloat8 | None) -> None:
        self.model_type = str(config.get("model_type", "llama"))
        said = {name for name, value in config.items() if value is not None}
        self._config = config | {name: value for name, value in unsaid(self.model_type).items() if name not in said}
        self._quantization = quantization
        self.family: Family = family_of(self.model_type)
        self.hidden = self.number("hidden_size", "n_embd", "n_embed", "d_model")
        self.num_layers = self.number("num_hidden_layers", "n_layer", "num_layers")
        self.heads = self.number("num_attention_heads", "n_head")
        grouped = ("num_key_value_heads", "num_kv_heads") if self.family.grouped_queries else ()
        self.kv_heads = 1 if has_one_key_head(self._config) else self.number(*grouped, default=self.heads)
        if self.kv_heads < 1 or self.heads % self.kv_heads:
            raise ModelError(f"num_key_value_heads {self.kv_heads} must divide num_attention_heads {self.heads}")
        self.head_dim = self.number("head_dim", default=self.hidden // self.heads)
        if self.head_dim < 1:
            raise ModelError(
                f"num_attention_heads {self.heads} is more than hidden_size {self.hidden}: a head has no width"
            )
        if self.family.latent:
            self.kv_heads, self.head_dim = 1, self._latent_width()
        self.embedding_size = self.number("word_embed_proj_dim", default=self.hidden)
        learned = self.family.positions_offset is not None
        unbounded = 0 if self.model_type == "bloom" else None
        names = ("n_positions", "max_position_embeddings") if learned else ("max_position_embeddings", "n_positions")
        self.max_positions = self.number(*names, default=unbounded)
        self._states = read_states(self._config | {"num_hidden_layers": self.num_layers})

    def number(self, *names: str, default: int | None = None) -> int:
        """The first of `names` that config.json gives; raises ModelError unless it is a whole number of at least 1."""
        value = next((self._config[name] for name in names if self._config.get(name) is not None), default)
        if isinstance(value, bool) or not isinstance(value, int) or value < (0 if value == default else 1):
            raise ModelError(f"config.json: {names[0]} is {value!r}; a whole number of at least 1 is needed")
        return value

    def layer(self, index: int) -> LayerShape:
        state = self._states[index]
        mixing = self._attention() if state is None else projections(self._config, state, self.hidden)
        linears = tuple(self._as_stored(index, linear) for linear in (*mixing, *self._mlp(index)))
        others = self._norms() + self._router(index)
        biases = self._experts(index) * flag(self._config, self.family.routing_bias)
        if state is not None:
            others += other_parameters(self._config, state) - self._norms_of_heads()
            return LayerShape(0, 0, 0, linears, others, biases, state=state)
        normed = self._norm_of_every_head
        return LayerShape(
            self.heads,
            self.kv_heads,
            self.head_dim,
            linears,
            others,
            biases,
            self.family.latent,
            of_query=normed + self.family.sinks,
            of_key=normed,
        )

    def _as_stored(self, index: int, linear: Linear) -> Linear:
        """With what the checkpoint says of it. All experts of a layer are stored as the first; GPTQ's are merged in 16 bits."""
        if self._quantization is None or not linear.quantizable:
            return linear
        if linear.copies == 1:
            path = linear_path(self.model_type, index, linear.name)
        elif self._experts_apart:
            path = expert_path(self.model_type, index, linear.name)
        else:
            return linear
        return msgspec.structs.replace(linear, stored=self._quantization.of(path))

    @property
    def _experts_apart(self) -> bool:
        """Experts of a float8 checkpoint stay as they are stored: gates and ups are not merged."""
        return isinstance(self._quantization, BlockFloat8)

    def _latent_width(self) -> int:
        width = self.number("kv_lora_rank") + self.number("qk_rope_head_dim")
        if width % 2:
            raise ModelError(f"config.json: kv_lora_rank and qk_rope_head_dim make {width}; an even number is needed")
        return width

    def _latent_attention(self) -> tuple[Linear, ...]:
        """Queries in one step or over a narrow middle; one entry for keys and values, and what makes them of it, which is multiplied in parts."""
        nope, value = self.number("qk_nope_head_dim"), self.number("v_head_dim")
        bias = flag(self._config, self.family.qkv_bias)
        queries, middle = self.heads * (nope + self.number("qk_rope_head_dim")), self._query_middle()
        asking: tuple[Linear, ...] = (Linear("q_proj", queries, self.hidden),)
        if middle:
            asking = (Linear("q_a_proj", middle, self.hidden, bias), Linear("q_b_proj", queries, middle))
        return (
            *asking,
            Linear("kv_a_proj_with_mqa", self.head_dim, self.hidden, bias),
            Linear("kv_b_proj", self.heads * (nope + value), self.number("kv_lora_rank"), quantizable=False),
            Linear("o_proj", self.hidden, self.heads * value, bias),
        )

    def _query_middle(self) -> int:
        return self.number("q_lora_rank", default=0)

    def _attention(self) -> tuple[Linear, ...]:
        family = self.family
        if family.latent:
            return self._latent_attention()
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        bias = flag(self._config, family.qkv_bias)
        out = Linear("o_proj", self.hidden, queries, flag(self._config, family.out_bias))
        if family.fused_qkv:
            return (Linear("qkv_proj", queries + 2 * keys, self.hidden, bias), out)
        return (
            Linear("q_proj", queries * (1 + family.gated_attention), self.hidden, bias),
            Linear("k_proj", keys, self.hidden, bias),
            Linear("v_proj", keys, self.hidden, bias),
            out,
        )

    def _mlp(self, index: int) -> tuple[Linear, ...]:
        experts = self._experts(index)
        if experts:
            return self._expert_mlp(experts)
        width = self.number(*_MLP_WIDTHS, default=4 * self.hidden)
        if self.model_type == "lfm2":
            width = convolution_mlp_width(self._config, width)
        bias = flag(self._config, self.family.mlp_bias)
        down = Linear("down_proj", self.hidden, width, bias)
        if not self.family.gated:
            return (Linear("up_proj", width, self.hidden, bias), down)
        if self.family.fused_gate_up:
            return (Linear("gate_up_proj", 2 * width, self.hidden, bias), down)
        return (Linear("gate_proj", width, self.hidden, bias), Linear("up_proj", width, self.hidden, bias), down)

    def _experts(self, index: int) -> int:
        """How many experts layer `index` has; 0: a plain MLP."""
        config = self._config
        kinds = config.get("mlp_layer_types")
        if kinds and (index >= len(kinds) or kinds[index] != "sparse"):
            return 0
        listed = config.get("moe_layers")
        if listed is not None and index not in listed:
            return 0
        step = int(config.get("decoder_sparse_step") or config.get("interleave_moe_layer_step") or 1)
        if listed is None and (index in (config.get("mlp_only_layers") or ()) or (index + 1) % step):
            return 0
        if index < int(config.get("first_k_dense_replace") or config.get("num_dense_layers") or 0):
            return 0
        return self.number("num_local_experts", "num_experts", "n_routed_experts", default=0)

    def _expert_mlp(self, experts: int) -> tuple[Linear, ...]:
        width = self.number("moe_intermediate_size", "intermediate_size")
        active = self.number("num_experts_per_tok", "moe_top_k", default=1)
        if active > experts:
            raise ModelError(
                f"config.json: a token takes {active} of {experts} experts; correct num_experts_per_tok, or the number of experts"
            )
        bias = self.family.expert_bias
        first = (("gate", width), ("up", width)) if self._experts_apart else (("gate_up", 2 * width),)
        routed = (
            *(Linear(f"experts.{name}", outputs, self.hidden, bias, experts, active) for name, outputs in first),
            Linear("experts.down", self.hidden, width, bias, experts, active),
        )
        return routed + self._shared_expert(width)

    def _shared_expert(self, width: int) -> tuple[Linear, ...]:
        """That every token passes; Qwen's is weighed by a gate, those of experts' own `width` are not."""
        weighed = self.number("shared_expert_intermediate_size", default=0)
        shared = width * self.number("n_shared_experts", default=1) if self.family.shares_expert else weighed
        if not shared:
            return ()
        return (
            Linear("shared_expert.gate_proj", shared, self.hidden),
            Linear("shared_expert.up_proj", shared, self.hidden),
            Linear("shared_expert.down_proj", self.hidden, shared),
            *(Linear(name, 1, self.hidden, quantizable=False) for name in ROUTING if weighed),
        )

    def _router(self, index: int) -> int:
        return self._experts(index) * (self.hidden + self.family.expert_bias)

    def _norm(self, width: int) -> int:
        return width * (1 + self.family.norm_bias) if self.family.affine_norm else 0

    def _norms(self) -> int:
        family = self.family
        shared = family.shares_norm is not None and family.shares_norm(self._config)
        total = (family.norms - shared) * self._norm(self.hidden) + family.other_per_layer
        total += self.heads * family.sinks
        if family.latent:
            total += self.number("kv_lora_rank") + self._query_middle()
        return total + self._norms_of_heads()

    def _norms_of_heads(self) -> int:
        """Of an attention's queries and keys."""
        family = self.family
        if not family.qk_norm or (family.qk_norm_key and not self._config.get(family.qk_norm_key)):
            return 0
        if family.qk_norm == "head":
            return 2 * self._norm(self.head_dim)
        return (self.heads + self.kv_heads) * self._norm_of_every_head

    @property
    def _norm_of_every_head(self) -> int:
        """Where each has one of its own, or a part of one over all."""
        family = self.family
        is_there = family.qk_norm not in {"", "head"} and (
            not family.qk_norm_key or self._config.get(family.qk_norm_key)
        )
        return self.head_dim if is_there else 0

    def embedding_other(self) -> int:
        """Positions, projection into the hidden size, norm of the embedding."""
        offset = self.family.positions_offset
        positions = 0 if offset is None else (self.max_positions + offset) * self.hidden
        norm = self._norm(self.hidden) * self.family.embedding_norm
        return positions + norm + self._projection()

    def head_other(self) -> int:
        """Final norm, projection out of the hidden size, bias."""
        post_norm = self.model_type == "opt" and self._config.get("do_layer_norm_before") is False
        bias = self.number("vocab_size") * self.family.head_bias
        return (0 if post_norm else self._norm(self.hidden)) + self._projection() + bias

    def _projection(self) -> int:
        return 0 if self.embedding_size == self.hidden else self.embedding_size * self.hidden
