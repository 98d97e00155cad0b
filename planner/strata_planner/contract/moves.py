"""Where KV pages go when roles change: which stay with their slot, which another slot has to give, and what both are told.

By the roles of the epoch in force and of the next one alone. Used by whoever makes epochs, and by slots for their own roles. Pure.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from strata_planner.contract.control import PageGiving, PageSource, SlotAddress
from strata_planner.contract.keys import pages_secret
from strata_planner.contract.roles import Role


class PageMove(NamedTuple):
    """Layers of a role whose pages another slot has, or another role of its own that goes on in none."""

    giver: str
    taker: str
    replica: int
    stage: int
    layers: tuple[int, ...]
    waits: bool = False  # a stage of the replica does not run: nothing is served meanwhile


@dataclass(frozen=True, slots=True)
class PageOrders:
    """What each slot is told, by its name."""

    sources: Mapping[str, tuple[PageSource, ...]] = field(default_factory=dict)
    giving: Mapping[str, PageGiving] = field(default_factory=dict)


def moves_between(old: Mapping[str, Sequence[Role]], new: Mapping[str, Sequence[Role]]) -> tuple[PageMove, ...]:
    """`old`: the roles of each slot that runs and answers; `new`: those of each slot that are formed anew. Within one replica, as both number it."""
    having = {
        (role.replica, layer): (slot, role)
        for slot, roles in old.items()
        for role in roles
        for layer in range(role.layers[0], role.layers[1] + 1)
    }
    waiting = _waiting(old)
    found = []
    for slot, roles in new.items():
        had = old.get(slot, ())
        taken = taken_from(had, roles)
        for place, role in enumerate(roles):
            stays = layers_in_common(had[taken[place]], role) if place in taken else range(0)
            givers: dict[str, list[int]] = {}
            for layer in range(role.layers[0], role.layers[1] + 1):
                giver, its = having.get((role.replica, layer), ("", role))
                if giver and layer not in stays and not why_not_given(its, role):
                    givers.setdefault(giver, []).append(layer)
            found += [
                PageMove(giver, slot, role.replica, role.stage, tuple(each), role.replica in waiting)
                for giver, each in givers.items()
            ]
    return tuple(found)


def _waiting(running: Mapping[str, Sequence[Role]]) -> set[int]:
    """The replicas of which a stage is missing."""
    seen: dict[int, set[tuple[int, int]]] = {}
    for roles in running.values():
        for role in roles:
            seen.setdefault(role.replica, set()).add((role.stage, role.stages))
    return {replica for replica, stages in seen.items() if any(len(stages) < count for _, count in stages)}


def page_orders(moves: Sequence[PageMove], addresses: Mapping[str, SlotAddress], epoch_key: str) -> PageOrders:
    """Without the moves from slots that have no port for pages. `epoch_key`: of the next epoch."""
    sources: dict[str, tuple[PageSource, ...]] = {}
    giving: dict[str, PageGiving] = {}
    for move in moves:
        address, key = addresses.get(move.giver), pages_secret(epoch_key, move.giver)
        if address is None or not address.pages_port:
            continue
        endpoint = f"tcp://{address.host}:{address.pages_port}"
        source = PageSource(move.replica, move.stage, move.layers, move.giver, endpoint, key, move.waits)
        sources[move.taker] = (*sources.get(move.taker, ()), source)
        takers = giving[move.giver].takers if move.giver in giving else 0
        giving[move.giver] = PageGiving(address.pages_port, key, takers + 1)
    return PageOrders(sources, giving)


def why_emptied(old: Role, new: Role) -> str:
    """Why `new` cannot take the pages of `old`: its sequences are computed anew, whole. Empty: it can."""
    for what, mine, its in (
        ("type of device", old.devices[0].type, new.devices[0].type),
        ("index of the device", old.devices[0].index, new.devices[0].index),
    ):
        if mine != its:
            return f"another {what}: {its} after {mine}"
    return why_not_given(old, new) or ("" if layers_in_common(old, new) else "no layer in common")


def why_not_given(old: Role, new: Role) -> str:
    """Why pages of `old` are none of `new`, wherever both are. Empty: they could be."""
    for what, mine, its in (
        ("model", old.model_uri, new.model_uri),
        ("compute type", old.compute_type, new.compute_type),
        ("KV bits", old.kv_bits, new.kv_bits),
        ("tokens of a page", old.page_tokens, new.page_tokens),
    ):
        if mine != its:
            return f"another {what}: {its} after {mine}"
    return why_never(old) or why_never(new)


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
