"""What of a slot's KV outlives a change of epoch: pages of the layers that stay, and what their blocks hold.

A role that is formed anew takes the pages of one that has ended. Whether it may is decided here, by the two roles alone; what of them is served
the survey of all stages says (`stage.inheritance`). Used by the slot and by whoever prepares an epoch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from strata_planner.contract.roles import Role
from strata_runtime.model.kv.paged import HeldPages
from strata_runtime.stage.handover import Leaving
from strata_runtime.stage.inheritance import Inheritance


@dataclass(frozen=True, slots=True)
class KeptRole:
    """A role that has ended."""

    role: Role
    pages: HeldPages
    inherited: Inheritance

    def shrunk(self, new: Role) -> "KeptRole":
        """To what `new` can take of it."""
        layers = layers_in_common(self.role, new)
        self.pages.shrink(layers, new.kv_page_budget)
        return replace(self, inherited=self.inherited.of(layers, new.kv_page_budget))


def why_emptied(old: Role, new: Role) -> str:
    """Why `new` cannot take the pages of `old`: its sequences are computed anew, whole. Empty: it can."""
    for what, mine, its in (
        ("model", old.model_uri, new.model_uri),
        ("compute type", old.compute_type, new.compute_type),
        ("KV bits", old.kv_bits, new.kv_bits),
        ("tokens of a page", old.page_tokens, new.page_tokens),
        ("type of device", old.devices[0].type, new.devices[0].type),
        ("index of the device", old.devices[0].index, new.devices[0].index),
    ):
        if mine != its:
            return f"another {what}: {its} after {mine}"
    reasons = (reason for role in (old, new) for reason in [why_never(role)] if reason)
    return next(reasons, "" if layers_in_common(old, new) else "no layer in common")


def why_never(role: Role) -> str:
    """Why such a role neither gives pages nor takes any. Empty: it does."""
    step = role.micro_batch.max_step_tokens
    reasons = {
        "a stage of several ranks has pages in each of them": role.tensor_parallel > 1,
        "sequences keep state, of their last position alone": role.state_slots > 0,
        "without prefix caching no block is known by what it holds": not role.prefix_caching,
        "a head drafts from hidden states of every token": role.speculation.has_head,
        f"a step of {step} tokens does not carry a block of {role.page_tokens}": step < role.page_tokens,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def layers_in_common(old: Role, new: Role) -> range:
    return range(max(old.layers[0], new.layers[0]), min(old.layers[1], new.layers[1]) + 1)


def leaving_of(kept: KeptRole | None, new: Role) -> Leaving:
    """What of an ended role the new one, which takes its pages, has for its neighbours. Asked before it takes them."""
    if kept is None or new.stages == 1:
        return Leaving()
    pools = {number: pool for number, pool in kept.pages.layers.items() if not new.layers[0] <= number <= new.layers[1]}
    return Leaving(kept.inherited, pools)


def taken_from(old: Sequence[Role], new: Sequence[Role]) -> dict[int, int]:
    """Which of the roles that end each new one takes the pages of, by their places: of its own replica before others, then whose layers are
    most of its own. No role gives its pages twice.
    """
    found: dict[int, int] = {}
    for place, role in enumerate(new):
        able = [
            (one.replica == role.replica, len(layers_in_common(one, role)), -number)
            for number, one in enumerate(old)
            if number not in found.values() and not why_emptied(one, role)
        ]
        if able:
            found[place] = -max(able)[-1]
    return found
