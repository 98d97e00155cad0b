"""What slots keep for a takeover: asked of them with every epoch, said in status, and followed when the wish changes."""

from typing import Any

import pytest

from strata_operator.api import deployment_from_object
from strata_operator.decide.planning import shadow_bytes_of
from strata_operator.errors import InvalidInputError
from tests.operator.builders import a_deployment
from tests.operator.world import World


def wishing(**shadow: Any) -> dict[str, Any]:
    return {"takeover": {"shadow": shadow or None}}


def test_status_says_who_keeps_what_against_which_loss_and_that_it_is_held(serving: World) -> None:
    assert serving.status.shadows == ()
    serving.edit(replanning=wishing(maxMemory="1Gi"))
    serving.passes(60)
    assert serving.status.phase == "Ready"
    (told,) = serving.status.shadows
    first, second = serving.status.stages
    assert (told.slot, told.node, told.against) == (first.slot, first.node, second.node)
    assert (told.layers, told.bits) == ((second.layers[0],), {next(iter(second.bits)): 1})
    assert (told.planned_bytes, told.held) == (1 << 20, True)
    writes = len(serving.cluster.wrote("PATCH", "/status"))
    serving.passes(20)
    assert len(serving.cluster.wrote("PATCH", "/status")) == writes


def test_without_the_wish_slots_let_go_and_no_replica_is_formed_anew(serving: World) -> None:
    serving.edit(replanning=wishing(maxMemory="1Gi"))
    serving.passes(60)
    restarts = [stage.restarts for stage in serving.status.stages]
    serving.edit(replanning=wishing())
    serving.passes(60)
    assert serving.status.phase == "Ready"
    assert serving.status.shadows == ()
    assert [stage.restarts for stage in serving.status.stages] == restarts


@pytest.mark.parametrize("wrong", ["0Gi", "many", "-1Gi", "16", ""])
def test_memory_that_is_none_is_refused(wrong: str) -> None:
    with pytest.raises(InvalidInputError, match="maxMemory"):
        deployment_from_object(a_deployment().with_spec(replanning=wishing(maxMemory=wrong)).to_object())


def test_the_object_says_how_much_memory_slots_may_keep_shadows_in() -> None:
    assert shadow_bytes_of(a_deployment().build()) == 0
    assert shadow_bytes_of(a_deployment().with_spec(replanning=wishing(maxMemory="16Gi")).build()) == 16 << 30
