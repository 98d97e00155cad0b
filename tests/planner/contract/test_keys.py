"""What follows from a secret: for every purpose another, for both ends of a connection the same."""

from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from strata_planner.contract.keys import gateway_secret, request_secret, role_keys, slot_secret
from strata_planner.contract.roles import Role

SECRETS = st.text(min_size=1)


@given(root=SECRETS, other=SECRETS, slots=st.lists(st.text(), unique=True))
def test_no_two_processes_share_a_secret_and_none_has_the_root(root: str, other: str, slots: list[str]) -> None:
    told = [gateway_secret(root), request_secret(root), *(slot_secret(root, slot) for slot in slots)]
    assert len({root, *told}) == 1 + len(told)
    if other != root:
        assert not {slot_secret(other, slot) for slot in slots} & set(told)


@given(role=st.deferred(lambda: st.from_type(Role)), stages=st.integers(1, 5))
def test_both_ends_of_a_connection_between_stages_have_its_secret(role: Role, stages: int) -> None:
    ring = [role_keys("an epoch's", structs.replace(role, stage=stage, stages=stages)) for stage in range(stages)]
    other = role_keys("an epoch's", structs.replace(role, replica=role.replica + 1, stage=0, stages=stages))
    for place, keys in enumerate(ring):
        assert keys.previous == ring[place - 1].own
        assert ring[place - 1].next == keys.own
    ports = {keys.own for keys in ring}
    assert len(ports) == stages
    assert not ports & {other.own, request_secret("an epoch's")}
