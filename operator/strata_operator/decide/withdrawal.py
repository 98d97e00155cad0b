"""A repair that is still being prepared is withdrawn where whoever was lost is heard again: the plan in force goes on.

Called by reconcile. Pure. A cut that heals while the others load would else cost a plan of fewer devices, and a minute until the better one. Whoever was silent
once may be so again: within the hour a node is believed so once (`exclusions` counts). Where the repair lowers bits, those who prepare it have let them go
already, and it is carried out.
"""

from strata_operator.decide.actions import RenewEpoch
from strata_operator.decide.brake import cordoned, losses
from strata_operator.decide.epochs import slots_of
from strata_operator.decide.exclusions import LOST
from strata_operator.decide.troubles import SILENT
from strata_operator.decide.view import View
from strata_operator.render.records import EpochRecord


def withdrawal(view: View) -> RenewEpoch | None:
    """The plan in force once more; None: the repair goes on, if there is one."""
    newest, before = view.newest, view.in_force
    if newest is None or before is None or before is newest or newest.cause.reason != LOST:
        return None
    repair, same_spec = newest.cause.repair, before.cause.spec_digest == newest.cause.spec_digest == view.spec_digest
    if repair is None or repair.bits_lowered or not same_spec or losses(view).lost or cordoned(view):
        return None
    if not _serves(view, before) or not _is_first_silence(view, before):
        return None
    told = f"node {newest.cause.node} is there again, and the plan of epoch {before.epoch.number} goes on"
    return RenewEpoch(newest.epoch.last_number + 1, told, back_to=before)


def _serves(view: View, before: EpochRecord) -> bool:
    """Whether everybody of it is there, and runs what it ran."""
    plan = before.epoch.plan
    return all(view.is_there(stage.node) and not view.nodes[stage.node].cordoned for stage in plan.stages) and all(
        slot in view.seen.slots
        and view.seen.slots[slot].committed_epoch == before.epoch.number
        and not (view.seen.slots[slot].failure or view.seen.slots[slot].hung)
        for slot in slots_of(plan)
    )


def _is_first_silence(view: View, before: EpochRecord) -> bool:
    nodes = {stage.node for stage in before.epoch.plan.stages}
    excluded = [each for each in view.deployment.status.exclusions if each.node in nodes]
    return all(each.reason == SILENT and each.strikes == 1 for each in excluded)
