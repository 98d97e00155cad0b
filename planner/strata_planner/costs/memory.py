"""What a stage stores, byte for byte: weights, KV, state of sequences, embedding and head. What it needs beside is in `working`.

Called by the search for every stage it considers. Weights count by contract.formats, which the runtime allocates by.
Source of the model: LLM-PQ (arXiv 2403.01136) section 4.1, with real shapes in place of OPT's.
"""

from functools import lru_cache

from strata_planner.contract.draft_weights import draft_bytes
from strata_planner.contract.formats import COMPUTE_TYPE_BYTES, ComputeType, FormatName, stored_bytes
from strata_planner.contract.kv import kv_token_bytes
from strata_planner.contract.plan import NO_SPECULATION, Speculation
from strata_planner.question.linear import Linear
from strata_planner.question.model import LayerShape, Model

PAGE_TOKENS = 16


@lru_cache(maxsize=4096)
def layer_weights_bytes(
    layer: LayerShape, format_name: FormatName, compute_type: ComputeType, speculation: Speculation = NO_SPECULATION
) -> int:
    """One decoder layer at a format: its linears with scales and zeros and what they draft with, biases and norms in the compute type."""
    item = COMPUTE_TYPE_BYTES[compute_type]
    total = layer.other_parameters * item + layer.float32_values * COMPUTE_TYPE_BYTES["float32"]
    for linear in layer.linears:
        total += linear.all_bytes(format_name, compute_type) + _draft_bytes(
            linear, format_name, compute_type, speculation
        )
    return total


def _draft_bytes(linear: Linear, layer_format: FormatName, compute_type: ComputeType, speculation: Speculation) -> int:
    """Of a linear that has an any-precision form; experts and what routes to them have none."""
    if linear.copies > 1 or not linear.quantizable or linear.stored:
        return 0
    shape = linear.out_features, linear.in_features
    return draft_bytes(linear.format_in(layer_format), *shape, compute_type, speculation)


def kv_bytes_per_token(layer: LayerShape, kv_bits: int, compute_type: ComputeType) -> int:
    """Keys and values of one token in one layer, with their scales; 16 bits mean the compute type. 0: the layer is no attention."""
    return kv_token_bytes(kv_bits, layer.kv_heads, layer.head_dim, compute_type, latent=layer.latent)


def boundary_log_page_bytes(hidden_size: int, compute_type: ComputeType) -> int:
    """Of a page of what a stage hands on, kept in host memory."""
    return PAGE_TOKENS * hidden_size * COMPUTE_TYPE_BYTES[compute_type]


def state_bytes_per_sequence(layer: LayerShape, compute_type: ComputeType) -> int:
    """What a sequence keeps in one layer that is no attention, however long it is."""
    return layer.state.bytes(compute_type) if layer.state else 0


def embedding_bytes(model: Model, *, embedding: bool, head: bool, compute_type: ComputeType) -> int:
    """Token table, positions and projections where the embedding is; final norm and head's table where the head is.

    A tied table lies once on a stage that has both, unless the head is stored in fewer bits, and on both stages where they differ.
    """
    rounded = head and model.head_format != "dense"
    tables = 1 if embedding and head and model.tied and not rounded else embedding + head
    parameters = (tables - rounded) * model.table + embedding * model.embedding_other + head * model.head_other
    head_bytes = stored_bytes(model.head_format, model.vocab_size, model.embedding_size, compute_type) if rounded else 0
    return parameters * COMPUTE_TYPE_BYTES[compute_type] + head_bytes
