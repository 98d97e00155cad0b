"""The KV pool of a role: its shape from the role and the loaded model. Used by whoever loads one."""

from strata_planner.contract.roles import Role
from strata_runtime.loading.stage_model import StageModel
from strata_runtime.model.kv import PagedKvCache


def cache_of(role: Role, model: StageModel) -> PagedKvCache:
    return PagedKvCache(
        num_layers=model.num_layers,
        first_layer=role.layers[0],
        pages=role.kv_page_budget,
        page_tokens=role.page_tokens,
        kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        latent=model.latent,
        dtype=model.dtype,
        device=model.device,
        kv_bits=role.kv_bits,
    )
