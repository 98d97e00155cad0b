"""What the checker would find: the real code is broken in one place, and the scene that meets it fails.

Each scene passes where nothing is broken (`test_moves`, `test_losses`).
"""

from collections.abc import Callable
from typing import Any

import pytest

from strata_planner.contract import block_names
from strata_runtime.gateway.keeping import keeper, twins
from strata_runtime.model.kv import boundary_log, paged
from strata_runtime.scheduler import blocks, sequence
from strata_runtime.slot import slot
from strata_runtime.stage import contents, handover, inheritance
from tests.chain import scenes, world
from tests.laws import swept

Break = Callable[[pytest.MonkeyPatch], None]


def replaced(where: Any, name: str, by: Any) -> Break:
    return lambda patch: patch.setattr(where, name, by)


def _without_bytes(take: Any) -> Any:
    """Pages are noted and not written."""

    def taken(self: Any, pages: Any, bodies: Any) -> None:
        take(self, pages, [memoryview(bytearray(len(body))) for body in bodies])

    return taken


def _half(take: Any) -> Any:
    """Of two pages the second is noted and not written."""

    def taken(self: Any, pages: Any, bodies: Any) -> None:
        zeroed = [bytearray(body) for body in bodies]
        for body in zeroed if len(pages.blocks) > 1 else ():
            body[len(body) // 2 :] = bytes(len(body) - len(body) // 2)
        take(self, pages, [memoryview(body) for body in zeroed])

    return taken


def _anything(self: Any, layer: int, wanted: Any) -> Any:
    """Blocks are given as what they were when they were listed."""
    return wanted, self._executor.boundary.read(lambda: handover._pages_of(self._executor.pools[layer], list(wanted)))


def _no_tokens(hear: Any) -> Any:
    """They are confirmed and not kept."""

    def heard(self: Any, change: Any, owner: str) -> None:
        if not isinstance(change, keeper.Grown):
            hear(self, change, owner)

    return heard


def _of_nothing(self: Any, record: Any, requests: Any, suffix: str = "") -> None:
    """What is taken over begins with its first token."""
    tokens_of = record.tokens_of
    record.tokens_of = lambda _: ()
    run(self, record, requests, suffix)
    record.tokens_of = tokens_of


run = keeper.Keeper._run

CASES = {
    "pages are noted and not written": (
        replaced(handover.Arriving, "take", _without_bytes(handover.Arriving.take)),
        scenes.pages_move,
        "other weights",
    ),
    "of two pages one is written": (
        replaced(handover.Arriving, "take", _half(handover.Arriving.take)),
        scenes.pages_move,
        "other weights|no beginning",
    ),
    "a cache forgets what it has taken": (
        replaced(paged, "with_pages", lambda held, pages: paged.make_pool(held.shape, 16)),
        scenes.leaders_die,
        "other weights",
    ),
    "what was handed on is another place's": (
        replaced(boundary_log.BoundaryLog, "read", lambda self, places: self.rows.index_select(0, 0 * places)),
        scenes.later_stages_die,
        "does not go on|no beginning",
    ),
    "whose weights have changed keeps its pages": (
        replaced(inheritance.Inheritance, "_holds", lambda self, survey, number, weights: number in self.through),
        scenes.bits_change,
        "other weights",
    ),
    "a block is known by its own tokens alone": (
        lambda patch: [
            patch.setattr(each, "name_of", lambda _, tokens: block_names.name_of(b"-", tokens))
            for each in (blocks, contents, handover, sequence)
        ],
        scenes.chats_look_alike,
        "no beginning",
    ),
    "nobody makes room": (
        replaced(slot.Slot, "_make_room", lambda self, prepare, held: False),
        scenes.bits_and_roles_change,
        "bytes of",
    ),
    "planes are moved under a role that serves": (
        replaced(slot.Slot, "_make_room", lambda self, prepare, held: True),
        scenes.bits_change,
        "computes with",
    ),
    "gateways do not keep each other's tokens": (
        replaced(keeper.Keeper, "hear", _no_tokens(keeper.Keeper.hear)),
        scenes.gateways_die,
        "does not go on",
    ),
    "ids name no tokens that are not confirmed": (
        replaced(twins.TwinLinks, "confirmed", lambda self, key, of: of),
        scenes.a_gateway_dies_that_had_more_to_tell,
        "does not go on",
    ),
    "what is taken over begins anew": (
        replaced(keeper.Keeper, "_run", _of_nothing),
        scenes.a_client_changes_gateways,
        "no beginning|due",
    ),
    "a gateway that begins asks nobody": (
        replaced(twins.TwinLinks, "knows_all", True),
        scenes.gateways_die,
        "does not go on",
    ),
}


LOGGED = 8  # pages of 32: of some blocks what was handed on is kept, of others it is not
QUICK = {"ids name no tokens that are not confirmed"}


@pytest.mark.parametrize("case", swept(CASES, QUICK))
def test_what_is_broken_is_found(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    breaks, scene, says = CASES[case]
    made = world.ChainWorld(logged=LOGGED)
    try:
        breaks(monkeypatch)
        with pytest.raises(AssertionError, match=says):
            scene(made)
    finally:
        made.close()
