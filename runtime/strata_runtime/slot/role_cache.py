"""The KV pool of a role: its shape from the role and the loaded model. Used by whoever loads one."""

from collections.abc import Collection

from strata_planner.contract.roles import Role
from strata_runtime.errors import InputError
from strata_runtime.loading.stage_model import StageModel
from strata_runtime.model.kv import PagedKvCache


def cache_of(role: Role, model: StageModel, awaited: Collection[int] = ()) -> PagedKvCache:
    """`awaited`: layers whose pages are taken from a cache that still serves, when that has ended. Raises InputError for a role that asks of a model with state what nobody can do with it."""
    if model.keeps_state and not _goes_forward(role):
        raise InputError(
            f"this model keeps state of sequences, and its role has stateSlots {role.state_slots}, prefixCaching {role.prefix_caching} and "
            f"speculation {role.speculation.mode}: such state has a slot for each sequence, and is neither shared nor gone back in; plan again"
        )
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
        states=model.states,
        state_slots=role.state_slots,
        awaited=awaited,
        log_hidden=model.hidden_size,
        log_pages=role.logged_pages,
    )


def _goes_forward(role: Role) -> bool:
    """Every sequence that runs has a state of its own, and computes each position once."""
    return role.state_slots > 0 and not role.prefix_caching and role.speculation.mode == "none"
