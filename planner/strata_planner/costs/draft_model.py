"""What a small model, or a head, that drafts takes beside the stage that leads: weights, working memory, keys and values in as many pages. Called by the
search.

It runs whole on that stage's device, at 16 bits, between the stage's own steps; its working memory counts in full, since kernels and modules stay.
"""

from strata_planner.contract.formats import COMPUTE_TYPE_BYTES, ComputeType
from strata_planner.costs.memory import PAGE_TOKENS, embedding_bytes, kv_bytes_per_token, layer_weights_bytes
from strata_planner.costs.working import StepShape, Storage, working_memory
from strata_planner.question.cluster import Accelerator
from strata_planner.question.draft_head import EAGLE
from strata_planner.question.model import Model


def draft_weights_bytes(model: Model, compute_type: ComputeType) -> int:
    tables = embedding_bytes(model, embedding=True, head=True, compute_type=compute_type)
    return tables + sum(layer_weights_bytes(each, "dense", compute_type) for each in model.layers)


def draft_working_bytes(
    model: Model, device: Accelerator, step: StepShape, compute_type: ComputeType, kv_bits: int
) -> int:
    storage = Storage.on(device, frozenset({"dense"}), compute_type, kv_bits)
    return working_memory(model, step, storage, head=True).serving


def draft_page_bytes(model: Model, kv_bits: int, compute_type: ComputeType) -> int:
    """Of a head with the fused hidden state of each token."""
    states = model.embedding_size * COMPUTE_TYPE_BYTES[compute_type] if model.architecture == EAGLE else 0
    return PAGE_TOKENS * (states + sum(kv_bytes_per_token(each, kv_bits, compute_type) for each in model.layers))
