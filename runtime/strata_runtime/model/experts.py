"""The experts of a layer that tokens were sent to, one after the other; on a CPU each over rows padded to few numbers.

Registered with transformers and chosen by `load_stage`. transformers' own grouped product multiplies as many rows as the
router happened to send to an expert, and oneDNN keeps 0.65 MB for every number of rows it ever met: a slot would grow by
hundreds of megabytes. GPUs keep the grouped product for experts in the compute type; quantized ones are multiplied as linears are.
"""

from typing import Any

import torch
from torch.nn import functional
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

from strata_runtime.formats.expert_stack import ExpertProjection
from strata_runtime.model.padding import padded

EXPERTS = "strata"
_ROWS_AT_A_TIME = 128  # more gain nothing, and what does not fill them would be padded to the next multiple


def use_padded_experts(model: Any) -> None:
    """Make every layer of a transformers model that has fused experts compute them here. Others are left as they are."""
    model.set_experts_implementation(EXPERTS)


def experts(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """hidden_states: [tokens, hidden]; top_k_index, top_k_weights: [tokens, k] -> [tokens, hidden].

    A token's sum is in float32 and in the order of its experts' numbers, whatever else is in the batch. Where ranks share the experts
    (`model.divided`), each multiplies those that it holds, and the sums are added up.
    """
    on_cpu = hidden_states.device.type == "cpu"
    weigh_inputs = getattr(module, "weigh_inputs", False)
    quantized = isinstance(module.gate_up_proj, ExpertProjection)
    own = getattr(module, "own_experts", None)
    if not (quantized or on_cpu or weigh_inputs or own) or not _plain(module):
        grouped: torch.Tensor = grouped_mm_experts_forward(module, hidden_states, top_k_index, top_k_weights)
        return grouped
    chosen, count = top_k_index.flatten(), module.num_experts
    if own is not None:
        chosen, count = chosen - own[0], own[1] - own[0]
        chosen = chosen.where((chosen >= 0) & (chosen < count), count)  # behind all: another rank's
    weights = top_k_weights.flatten()[:, None]
    total = torch.zeros_like(hidden_states, dtype=torch.float32)
    order = chosen.argsort(stable=True)
    counts = torch.bincount(chosen, minlength=count + 1).tolist()
    for expert, routed in enumerate(torch.split_with_sizes(order, counts)[:count]):
        for places in torch.split_with_sizes(routed, _pieces(len(routed), on_cpu=on_cpu)):
            rows = places // top_k_index.shape[1]
            gathered = hidden_states[rows]
            if weigh_inputs:
                gathered = gathered * weights[places]
            out = _expert(module, expert, padded(gathered) if on_cpu else gathered)[: len(rows)].float()
            total.index_add_(0, rows, out if weigh_inputs else out * weights[places])
    if own is not None:
        module.collectives.all_reduce(total)
    return total.to(hidden_states.dtype)


def _expert(module: Any, expert: int, rows: torch.Tensor) -> torch.Tensor:
    between = module._apply_gate(_product(module, "gate_up_proj", expert, rows))  # noqa: SLF001, the hook that transformers gives
    return _product(module, "down_proj", expert, between)


def _product(module: Any, name: str, expert: int, rows: torch.Tensor) -> torch.Tensor:
    weights, bias = getattr(module, name), getattr(module, f"{name}_bias")[expert] if module.has_bias else None
    if not isinstance(weights, ExpertProjection):
        return functional.linear(rows, weights[expert], bias)
    out = weights.multiply(expert, rows)
    return out if bias is None else out.add_(bias)


def _pieces(rows: int, *, on_cpu: bool) -> list[int]:
    at_a_time = _ROWS_AT_A_TIME if on_cpu else max(rows, 1)
    return [min(at_a_time, rows - start) for start in range(0, rows, at_a_time)]


def _plain(module: Any) -> bool:
    """Gated, [out, in], no norm behind them: what every supported architecture has."""
    return module.has_gate and not (module.is_transposed or module.has_post_expert_norm)


ALL_EXPERTS_FUNCTIONS.register(EXPERTS, experts)
