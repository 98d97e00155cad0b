"""A published EAGLE-3 head as its config.json tells it: one decoder layer that drafts from hidden states of the model that verifies.

Read by the planner, which counts what it takes, and by the runtime, which loads it, so that both refuse the same. Knows no tensors.
Source: EAGLE-3 (arXiv 2503.01840), section 3.1; the layout is that of SafeAILab's, SpecForge's and NVIDIA's checkpoints.
"""

from typing import Any, Self

from strata_planner.contract.architectures import UnsupportedModelError
from strata_planner.contract.values import Value

FUSED = 3  # hidden states of the model that verifies: of a low, a middle and a high layer
_NAMES = frozenset({"LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM"})
# What some heads do otherwise; where it is set, they would draft from the wrong values.
_OTHERWISE = ("norm_output", "norm_before_fc", "fc_norm", "use_mtp_layernorm", "parallel_drafting")


def is_draft_head(config: dict[str, Any]) -> bool:
    """Whether a config.json is that of a head. SafeAILab's call themselves plain Llamas, and tell it by their small vocabulary."""
    return config.get("draft_vocab_size") is not None or not _NAMES.isdisjoint(config.get("architectures") or ())


class DraftHead(Value, frozen=True):
    """Its shapes. `hidden_size`: of its own layer, `target_hidden_size`: of each hidden state that it fuses. `vocab_size`: rows of the embedding
    whose tokens it reads, `draft_vocab_size`: tokens that it can draft. `positions`: that it was made for.

    `outputs`: the layers of the model that verifies, from 0, whose outputs are fused, in this order; empty: the usual ones.
    """

    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    positions: int
    norm_eps: float
    outputs: tuple[int, ...] = ()
    norm_before_residual: bool = False
    attention_bias: bool = False

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """Raises UnsupportedModelError for what is no head, or one of another kind."""
        if not is_draft_head(config):
            raise UnsupportedModelError(
                f"its config.json ({config.get('architectures')}) is that of no EAGLE-3 head, which has draft_vocab_size: give a head's folder, or "
                "take the mode draft for a small model"
            )
        _check_kind(config)
        hidden, heads = _number(config, "hidden_size"), _number(config, "num_attention_heads")
        vocabulary = _number(config, "vocab_size")
        head = cls(
            hidden_size=hidden,
            target_hidden_size=_number(config, "target_hidden_size", hidden),
            intermediate_size=_number(config, "intermediate_size"),
            heads=heads,
            kv_heads=_number(config, "num_key_value_heads", heads),
            head_dim=_number(config, "head_dim", hidden // heads),
            vocab_size=vocabulary,
            draft_vocab_size=_number(config, "draft_vocab_size", vocabulary),
            positions=_number(config, "max_position_embeddings", 2048),
            norm_eps=float(config.get("rms_norm_eps") or 1e-6),
            outputs=_outputs(config),
            norm_before_residual=bool(config.get("norm_before_residual")),
            attention_bias=bool(config.get("attention_bias")),
        )
        if head.heads % head.kv_heads:
            raise UnsupportedModelError(
                f"its num_key_value_heads {head.kv_heads} must divide its num_attention_heads {head.heads}: correct its config.json"
            )
        return head

    def fused_layers(self, layers: int) -> tuple[int, ...]:
        """Of a model of so many layers: those whose outputs it fuses. By default what enters the layers 2, n // 2 and n - 3.

        Raises UnsupportedModelError where the model has no such layers.
        """
        chosen = self.outputs or tuple(entered - 1 for entered in (2, layers // 2, layers - 3))
        if any(not 0 <= layer < layers for layer in chosen):
            raise UnsupportedModelError(
                f"it fuses the outputs of the layers {list(chosen)}, and the model that it drafts for has the layers 0..{layers - 1}: name others in "
                "eagle_aux_hidden_state_layer_ids of its config.json, or take a head of this model"
            )
        return chosen

    def read_layers(self, layers: int) -> tuple[int, ...]:
        """The same, each once, ascending: the order in which a pipeline computes them. Raises as `fused_layers`."""
        return tuple(sorted(set(self.fused_layers(layers))))

    def check_target(self, hidden_size: int, layers: int) -> None:
        """Raises UnsupportedModelError for a model whose hidden states it was not made for."""
        if self.target_hidden_size != hidden_size:
            raise UnsupportedModelError(
                f"it fuses hidden states of {self.target_hidden_size} values, those of the model that it drafts for have {hidden_size}: a head belongs "
                "to one model; take that model's"
            )
        self.fused_layers(layers)


def _check_kind(config: dict[str, Any]) -> None:
    activation, layers = config.get("hidden_act", "silu"), config.get("num_hidden_layers", 1)
    if layers != 1 or activation != "silu":
        raise UnsupportedModelError(
            f"it has {layers} layers and the activation {activation}: heads of one Llama layer with silu run here; take one of these"
        )
    odd = [name for name in _OTHERWISE if config.get(name)]
    if odd or config.get("tie_word_embeddings"):
        raise UnsupportedModelError(
            f"its config.json sets {', '.join(odd) or 'tie_word_embeddings'}: heads that compute so do not run here; take one without"
        )
    if (config.get("eagle_config") or {}).get("use_aux_hidden_state") is False:
        raise UnsupportedModelError(
            "its eagle_config has use_aux_hidden_state false: heads of EAGLE-3 fuse three hidden states; take one of these"
        )


def _number(config: dict[str, Any], name: str, default: int | None = None) -> int:
    value = default if config.get(name) is None else config[name]
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UnsupportedModelError(
            f"its {name} is {value!r}, a whole number of at least 1 is needed: correct its config.json, or fetch the head again"
        )
    return value


def _outputs(config: dict[str, Any]) -> tuple[int, ...]:
    """By name at the top of config.json layers are those that a state enters (vLLM), in `eagle_config` those that it leaves (SpecForge, SGLang)."""
    name = "eagle_aux_hidden_state_layer_ids"
    entered, left = config.get(name), (config.get("eagle_config") or {}).get(name)
    listed = entered if entered is not None else left
    if listed is None:
        return ()
    if not isinstance(listed, list) or len(listed) != FUSED or any(type(each) is not int for each in listed):
        raise UnsupportedModelError(
            f"its {name} is {listed!r}, a list of {FUSED} layers is needed: correct its config.json"
        )
    return tuple(each - (entered is not None) for each in listed)
