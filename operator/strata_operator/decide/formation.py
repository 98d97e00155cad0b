"""In which epoch each replica of a plan was formed: those whose roles all run on, unchanged, pass into a new epoch as they are.

A replica goes on where an epoch that is known gives it the same roles in the same places and every one of its slots says that it runs them, formed
in the same epoch, without a failure and with all its neighbours. A slot that was started anew runs none; one of the epoch in force that its controller alone
does not hear is taken to run them, and says otherwise when it is heard. Its connections keep the key of that epoch.
Called by `epochs` and by whoever stores an epoch. Pure.
"""

from collections.abc import Collection, Mapping

from strata_operator.render.epoch import Epoch, Formation
from strata_planner.contract.control import RoleStats, SlotStatus
from strata_planner.contract.plan import Plan
from strata_planner.contract.roles import Role, roles_of

Places = dict[tuple[str, int], Role]  # (slot, place in its list) -> role


def replicas_going_on(
    plan: Plan, in_force: Epoch | None, newest: Epoch | None, slots: Mapping[str, SlotStatus]
) -> tuple[Formation, ...]:
    """The replicas of a new epoch's plan that need not be formed anew, from either epoch whose roles the slots may run."""
    wanted = places_by_replica(plan)
    found: dict[int, Formation] = {}
    for epoch in (in_force, newest):
        had = places_by_replica(epoch.plan) if epoch else {}
        for replica, places in wanted.items():
            heard = {place: role for place, role in places.items() if place[0] in slots or epoch is not in_force}
            if epoch and had.get(replica) == places and runs(heard, epoch.formed_in(replica), slots, among=places):
                found[replica] = Formation(replica, epoch.formed_in(replica), epoch.key_of(replica))
    return tuple(found[replica] for replica in sorted(found))


def why_not_going_on(epoch: Epoch, slots: Mapping[str, SlotStatus]) -> str:
    """Why a replica that was to go on into this epoch cannot, by the first of its slots that answer; empty: none says so."""
    for replica, places in places_by_replica(epoch.plan).items():
        formed = epoch.formed_in(replica)
        answering = {place: role for place, role in places.items() if place[0] in slots}
        if formed != epoch.number and not runs(answering, formed, slots, among=places):
            return f"replica {replica} was to go on from epoch {formed} and does not run as it did"
    return ""


def is_broken_again(epoch: Epoch, formations: Collection[Formation]) -> bool:
    """Whether the next epoch forms anew only replicas that this one formed, which did not last. One that had gone on into it has run for longer."""
    stay = {each.replica for each in formations}
    return all(each.replica in stay for each in epoch.formations)


def places_by_replica(plan: Plan) -> dict[int, Places]:
    places: dict[int, Places] = {}
    for slot, roles in roles_of(plan).items():
        for place, role in enumerate(roles):
            places.setdefault(role.replica, {})[slot, place] = role
    return places


def runs(places: Places, formed: int, slots: Mapping[str, SlotStatus], among: Places | None = None) -> bool:
    """Whether each of these roles runs as it was formed in that epoch, and has its neighbours: slots of all its replica (`among`)."""
    members = {slot for slot, _ in among or places}
    return all(slot in slots and _runs(slots[slot], role, formed, members) for (slot, _), role in places.items())


def _runs(status: SlotStatus, role: Role, formed: int, members: set[str]) -> bool:
    lost = {peer.slot for peer in status.lost_peers}
    return not lost & members and any(_is_it(stats, role, formed) for stats in status.roles)


def _is_it(stats: RoleStats, role: Role, formed: int) -> bool:
    return (stats.replica, stats.stage, stats.formed) == (role.replica, role.stage, formed) and not stats.failure
