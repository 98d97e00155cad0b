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
# Measured on fresh slots (benchmarks.memory). Objects of the model's modules are there from loading on; the kernels that
# oneDNN compiles for each number of tokens come while serving, for dense weights and for weights brought back apart. A
# CUDA device's share is in its overhead.
MODULE_BYTES = 6 << 20
RUNTIME_BYTES = 20 << 20
# How the runtime's kernels bring quantized weights back: so many weights at once, in so many bytes each.
CONVERTED_AT_A_TIME = 1 << 21
CONVERTED_AT_A_TIME_ON_CUDA = 1 << 26
GROUPS_BYTES_PER_WEIGHT = 4.5


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
    """Peak bytes of a stage beside stored weights and KV. What is alive together is added, what follows is not."""

    runtime: int  # what the first role adds to an idle process: module objects, compiled kernels
    residual: int  # hidden states: the stream, its normalised copy, the received frame
    attention: int  # queries, keys, values, their rotated copies and the output; gathered pages of the pool
    mlp: int  # between the halves of the MLP
    logits: int  # float32 rows of the sampled sequences and their working copy (last stage)
    dequantization: int  # weights on their way back to the compute type
    loading: int  # a layer that is read and quantized, beyond what is stored of it; KV is not there yet

    @property
    def serving(self) -> int:
        """Beside weights and KV. Dequantized weights are alive with the MLP or the attention, never with the logits."""
        layer = max(self.attention, self.mlp) + self.dequantization
        return self.runtime + self.residual + max(layer, self.logits)

    def peak(self, kv_bytes: int) -> int:
        """Beside weights and `kv_bytes` of KV: while serving, or while loading where that is more than the KV makes up."""
        return max(self.serving, self.loading - kv_bytes)

    def __str__(self) -> str:
        return ", ".join(f"{field.name} {getattr(self, field.name)}" for field in fields(self))


@dataclass(frozen=True)
class StepShape:
    """The largest step: `tokens` of all segments, `sampled` rows that want logits, `context` keys of one sequence."""

    tokens: int
    sampled: int
    context: int


@dataclass(frozen=True)
class Storage:
    """How a stage stores its layers, and where: a processor's memory or a GPU's."""

    formats: frozenset[FormatName]
    compute_type: ComputeType
    on_cpu: bool

    @property
    def kernel_families(self) -> int:
        """Dense weights are multiplied by other kernels than quantized ones."""
        return len({name == "dense" for name in self.formats})

    @property
    def item(self) -> int:
        return COMPUTE_TYPE_BYTES[self.compute_type]


def temporaries(model: Model, step: StepShape, storage: Storage, *, head: bool) -> Temporaries:
    """The worst layer's terms at the worst of the formats."""
    item = storage.item
    layers = set(model.layers)
    return Temporaries(
        runtime=RUNTIME_BYTES * storage.kernel_families if storage.on_cpu else 0,
        residual=3 * step.tokens * model.hidden_size * item,
        attention=max(_attention_bytes(layer, step, item) for layer in layers),
        mlp=max(2 * step.tokens * layer.mlp_width * item for layer in layers),
        logits=2 * step.sampled * model.vocab_size * 4 if head else 0,
        dequantization=max(_dequantization_bytes(layer, storage) for layer in layers),
        loading=max(_loading_bytes(layer, storage) for layer in layers) + MODULE_BYTES * storage.on_cpu,
    )


def _largest_linear(layer: LayerShape) -> int:
    """Weights of the largest linear that can be quantized."""
    return max((each.out_features * each.in_features for each in layer.linears if each.quantizable), default=0)


def _dequantization_bytes(layer: LayerShape, storage: Storage) -> int:
    per_weight = {"dense": 0.0, "int8": storage.item, "w8a8": storage.item}
    worst = max((per_weight.get(name, GROUPS_BYTES_PER_WEIGHT) for name in storage.formats), default=0)
    return int(_converted_at_once(layer, storage) * worst)


def _converted_at_once(layer: LayerShape, storage: Storage) -> int:
    """Large weights are quantized and brought back a piece at a time."""
    return min(_largest_linear(layer), CONVERTED_AT_A_TIME if storage.on_cpu else CONVERTED_AT_A_TIME_ON_CUDA)


def _loading_bytes(layer: LayerShape, storage: Storage) -> int:
    """A whole dense layer is there while its linears are quantized one after the other, piece by piece."""
    dense = layer_weights_bytes(layer, "dense", storage.compute_type)
    stored = min(layer_weights_bytes(layer, name, storage.compute_type) for name in storage.formats)
    return dense - stored + int(_converted_at_once(layer, storage) * GROUPS_BYTES_PER_WEIGHT)


def _attention_bytes(layer: LayerShape, step: StepShape, item: int) -> int:
    queries, keys = layer.heads * layer.head_dim, layer.kv_heads * layer.head_dim
    projected = 2 * step.tokens * (queries + 2 * keys) * item
    gathered = max(2 * step.context * keys * item, min(GATHERED_BYTES, 2 * step.sampled * step.context * keys * item))
    return projected + step.tokens * queries * item + gathered
