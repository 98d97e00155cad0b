"""What of a slot's KV outlives a change of epoch: pages of the layers that stay, and what their blocks hold.

A role that is formed anew takes the pages of one that has ended; what it does not take another slot may get (`slot.giver`). Whether it may is decided by the two roles
alone (`contract.moves`); what of them is served the survey of all stages says (`stage.inheritance`). Used by the slot and by whoever prepares an epoch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from strata_planner.contract.moves import layers_in_common, taken_from
from strata_planner.contract.roles import Role
from strata_runtime.model.kv.paged import HeldPages
from strata_runtime.stage.handover import LeftPages
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


def leaving(kept: Sequence[KeptRole], new: Sequence[Role]) -> list[LeftPages]:
    """Of roles that have ended what those of the same slot, which take their pages, leave. Asked before they take them."""
    taken = {source: new[place] for place, source in taken_from([each.role for each in kept], new).items()}
    found = []
    for number, each in enumerate(kept):
        stays = layers_in_common(each.role, taken[number]) if number in taken else range(0)
        pools = {layer: pool for layer, pool in each.pages.layers.items() if layer not in stays}
        found.append(LeftPages(each.role.replica, each.inherited, pools))
    return found
