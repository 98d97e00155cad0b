"""A claim that one node alone may mount is refused for slots on two."""

import re

import pytest

from strata_operator.decide.claims import unshared_claim
from tests.operator.builders import a_deployment
from tests.operator.fakes import a_plan


@pytest.mark.parametrize(
    ("modes", "nodes", "refused"),
    [
        pytest.param(["ReadWriteOnce"], ("a", "b"), True, id="one-node-alone"),
        pytest.param(["ReadWriteOncePod"], ("a", "b"), True, id="one-pod-alone"),
        pytest.param(["ReadWriteOnce"], ("a",), False, id="and-it-is-one"),
        pytest.param(["ReadWriteOnce", "ReadWriteMany"], ("a", "b"), False, id="many"),
        pytest.param([], ("a", "b"), False, id="not-known"),
    ],
)
def test_a_cache_that_one_node_alone_may_mount_is_refused_for_slots_on_two(
    modes: list[str],
    nodes: tuple[str, ...],
    refused: bool,  # noqa: FBT001
) -> None:
    deployment = a_deployment("chat").with_spec(model={"cache": {"persistentVolumeClaim": "models"}}).build()
    claim = {"metadata": {"name": "models", "namespace": "default"}, "status": {"accessModes": modes}}
    elsewhere = {"metadata": {"name": "models", "namespace": "other"}, "status": {"accessModes": ["ReadWriteOnce"]}}
    sentence = unshared_claim(deployment, a_plan(*nodes), [elsewhere, claim])
    assert bool(sentence) is refused
    if refused:
        assert re.match(r"spec.model.cache: the claim models is ReadWriteOnce.* 2 nodes \(a, b\)", sentence)


def test_the_claim_of_a_draft_model_likewise() -> None:
    speculation = {"mode": "draft", "draftModel": {"uri": "pvc://small/1b"}}
    deployment = a_deployment("chat").with_spec(runtime={"speculation": speculation}).build()
    claim = {"metadata": {"name": "small", "namespace": "default"}, "status": {"accessModes": ["ReadWriteOnce"]}}
    sentence = unshared_claim(deployment, a_plan("a", "b"), [claim])
    assert sentence.startswith("spec.runtime.speculation.draftModel.uri: the claim small is ReadWriteOnce")
