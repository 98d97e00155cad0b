"""Memory of a stage, byte for byte as the runtime stores it: weights, KV, embedding and head, temporaries.

Called by the search for every stage it considers. Weights count by contract.formats, which the runtime allocates by; the
temporaries are the one estimate, in named terms. Source of the model: LLM-PQ (arXiv 2403.01136) section 4.1, with real
shapes in place of OPT's.
"""

from dataclasses import dataclass, fields

from strata_planner.contract.formats import COMPUTE_TYPE_BYTES, ComputeType, FormatName, stored_bytes
from strata_planner.model import LayerShape, Model

PAGE_TOKENS = 16
# Keys and values that the runtime's attention gathers at once for one group of decoding sequences.
GATHERED_BYTES = 16 << 20


def layer_weights_bytes(layer: LayerShape, format_name: FormatName, compute_type: ComputeType) -> int:
    """One decoder layer at a format: its linears with scales and zeros, biases and norms in the compute type."""
    item = COMPUTE_TYPE_BYTES[compute_type]
    total = layer.other_parameters * item
    for linear in layer.linears:
        name: FormatName = format_name if linear.quantizable else "dense"
        one = stored_bytes(name, linear.out_features, linear.in_features, compute_type)
        total += linear.copies * (one + linear.out_features * linear.bias * item)
    return total


def kv_bytes_per_token(layer: LayerShape, kv_bits: int, compute_type: ComputeType) -> int:
    """Keys and values of one token in one layer; 16 bits mean the compute type."""
    values = 2 * layer.kv_heads * layer.head_dim
    return values * COMPUTE_TYPE_BYTES[compute_type] if kv_bits == 16 else values * kv_bits // 8


def embedding_bytes(model: Model, *, embedding: bool, head: bool, compute_type: ComputeType) -> int:
    """Token table, positions and projections where the embedding is; final norm and head's table where the head is.

    A tied table lies once on a stage that has both, and on both stages where they differ.
    """
    tables = 1 if embedding and head and model.tied else embedding + head
    parameters = tables * model.table + embedding * model.embedding_other + head * model.head_other
    return parameters * COMPUTE_TYPE_BYTES[compute_type]


@dataclass(frozen=True)
class Temporaries:
    """Peak bytes of one step beside weights and KV. What is alive together is added, what follows is not."""

    residual: int  # hidden states: the stream, its normalised copy, the received frame
    attention: int  # queries, keys, values, their rotated copies and the output; gathered pages of the pool
    mlp: int  # between the halves of the MLP
    logits: int  # float32 rows of the sampled sequences and their working copy (last stage)
    dequantization: int  # the largest quantized linear, back in the compute type

    @property
    def without_dequantization(self) -> int:
        return self.residual + max(self.attention, self.mlp, self.logits)

    @property
    def total(self) -> int:
        """Dequantized weights are alive during the MLP as well as during attention, never during the logits."""
        return self.residual + max(max(self.attention, self.mlp) + self.dequantization, self.logits)

    def __str__(self) -> str:
        return ", ".join(f"{field.name} {getattr(self, field.name)}" for field in fields(self))


@dataclass(frozen=True)
class StepShape:
    """The largest step: `tokens` of all segments, `sampled` rows that want logits, `context` keys of one sequence."""

    tokens: int
    sampled: int
    context: int


def temporaries(model: Model, step: StepShape, compute_type: ComputeType, *, head: bool) -> Temporaries:
    """The worst layer's terms; the dequantization term as if some layer of the stage were quantized."""
    item = COMPUTE_TYPE_BYTES[compute_type]
    layers = set(model.layers)
    return Temporaries(
        residual=3 * step.tokens * model.hidden_size * item,
        attention=max(_attention_bytes(layer, step, item) for layer in layers),
        mlp=max(2 * step.tokens * layer.mlp_width * item for layer in layers),
        logits=2 * step.sampled * model.vocab_size * 4 if head else 0,
        dequantization=max(
            (
                linear.out_features * linear.in_features * item
                for layer in layers
                for linear in layer.linears
                if linear.quantizable
            ),
            default=0,
        ),
    )


def _attention_bytes(layer: LayerShape, step: StepShape, item: int) -> int:
    queries, keys = layer.heads * layer.head_dim, layer.kv_heads * layer.head_dim
    projected = 2 * step.tokens * (queries + 2 * keys) * item
    gathered = max(2 * step.context * keys * item, min(GATHERED_BYTES, 2 * step.sampled * step.context * keys * item))
    return projected + step.tokens * queries * item + gathered
