"""Seconds to hand a micro-batch's hidden states to the next stage: latency + bytes / bandwidth (alpha-beta).

Called by the search once per link of a device order.
"""

from strata_planner.cluster import LinkRate
from strata_planner.contract.formats import COMPUTE_TYPE_BYTES, ComputeType
from strata_planner.model import Model

_TOKEN_BYTES = 64  # a sampled token with its logprob, on its way back to the first stage


def hidden_states_seconds(model: Model, link: LinkRate, tokens: int, compute_type: ComputeType) -> float:
    size = tokens * model.hidden_size * COMPUTE_TYPE_BYTES[compute_type]
    return link.latency_seconds + size / link.bytes_per_second


def sampled_tokens_seconds(link: LinkRate, sequences: int) -> float:
    return link.latency_seconds + sequences * _TOKEN_BYTES / link.bytes_per_second
