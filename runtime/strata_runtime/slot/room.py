"""Whether what an epoch needs fits beside what a slot has: bytes as the plan predicts them. Called by the slot when it is asked to prepare."""

from collections.abc import Sequence

from strata_planner.contract.control import Prepare
from strata_planner.contract.devices import is_processor
from strata_planner.contract.roles import Role
from strata_runtime.slot.epoch import LoadedRole, changed_roles
from strata_runtime.slot.prepare import same_weights, store_of


def not_held(prepare: Prepare, held: Sequence[LoadedRole]) -> list[Role]:
    """The roles that change and whose weights are not all there."""
    return [role for role in changed_roles(prepare).roles if not any(same_weights(role, other.role) for other in held)]


def bytes_beside(prepare: Prepare, held: Sequence[LoadedRole]) -> int:
    """Of the roles that end with it and serve until then (`held`), the new ones, and those that go on; what the first two share once."""
    changed, new, store = changed_roles(prepare).roles, not_held(prepare, held), store_of(held)
    going_on = [role for role in prepare.roles if role not in changed]
    shared = sum(store.kept_bytes(role) for role in new)
    return sum(role.total_bytes for role in (*(each.role for each in held), *new, *going_on)) - shared


def usable_bytes(prepare: Prepare) -> int:
    return sum(device.usable_bytes for role in prepare.roles for device in role.devices)


def is_on_processors(prepare: Prepare) -> bool:
    """Whether its weights lie in host memory."""
    return all(is_processor(device.type) for role in prepare.roles for device in role.devices)


def shadows_beside(prepare: Prepare, held: Sequence[LoadedRole], shadow_bytes: int) -> set[int | None]:
    """Of which layers shadows stay meanwhile (None: of what lies outside of all): of those that are loaded now, which take their place, and of those that are to
    be kept on, unless all `shadow_bytes` do not fit beside the weights, where these lie in host memory. `held`: what serves on.
    """
    changed = changed_roles(prepare).roles
    loaded: set[int | None] = {layer for role in changed for layer in range(role.layers[0], role.layers[1] + 1)}
    if any(role.embedding or role.head for role in changed):
        loaded.add(None)
    order = prepare.shadow
    short = is_on_processors(prepare) and bytes_beside(prepare, held) + shadow_bytes > usable_bytes(prepare)
    if order is None or short:
        return loaded
    return {*loaded, *order.layers, *([None] if order.embedding or order.head else [])}
