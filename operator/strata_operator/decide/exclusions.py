"""What is remembered of trouble: nodes that are planned without for a while, and how long the next plan waits.

Both live in status, so that they outlast the operator: reconcile writes them down before it acts on them. Each time a node is
excluded lasts twice as long as the last, and beyond as many of the next plans as it has had strikes, or one more where plan after plan has failed: nodes that are found
out one by one, a plan each, are then left out together. Each plan that the operator makes of itself waits twice as long as the last, until
the deployment has served in peace. Any edit of the spec ends both: whoever has mended the cause need not wait. Pure.
"""

from dataclasses import dataclass
from datetime import datetime, timedelta

from strata_operator.api.status import MAX_EXCLUSIONS, Backoff, Exclusion
from strata_operator.decide.troubles import SILENT, Trouble
from strata_operator.decide.view import View
from strata_operator.render.records import NODE_BACK, RENEWED, EpochRecord, moment, stamp

EXCLUDED, LONGEST_EXCLUSION = timedelta(seconds=60), timedelta(hours=1)
REMEMBERED = timedelta(hours=1)  # after an exclusion ended, its strikes count for so long
FIRST_DELAY, LONGEST_DELAY = timedelta(seconds=10), timedelta(seconds=600)
PEACE = timedelta(seconds=600)  # so long a deployment serves before its troubles are forgotten
# A loss is repaired and a wish is tried again sooner: someone waits for it.
LOST = "NodeLost"
TAKEN_OVER = "Takeover"  # of slots whose processes would take longer to come back
LONGEST_DELAYS = {LOST: timedelta(seconds=60), "Created": timedelta(seconds=120), "SpecChanged": timedelta(seconds=120)}
WISHED = {"Created", "SpecChanged"}  # reasons for epochs that a person gave
_FEW_ATTEMPTS, _MOST_PLANS = (
    2,
    6,
)  # plans in a row that may fail by chance; that an exclusion outlasts, an hour where they wait longest
TEXT = 1024  # characters that status takes of a message


@dataclass(frozen=True, slots=True)
class Memory:
    """What status is to say."""

    exclusions: tuple[Exclusion, ...] = ()
    backoff: Backoff | None = None

    def excluded(self, now: datetime) -> frozenset[str]:
        return frozenset(each.node for each in self.exclusions if now < moment(each.until))

    def silent(self, now: datetime) -> frozenset[str]:
        """Those that are lost although Kubernetes calls them Ready."""
        return frozenset(each.node for each in self.exclusions if each.reason == SILENT and now < moment(each.until))

    def may_plan(self, now: datetime, reason: str) -> bool:
        """Whether a plan for this reason need not wait any more. A loss waits for nothing but other losses."""
        if self.backoff is None or (reason == LOST and not self.backoff.last.startswith(LOST)):
            return True
        return now >= moment(self.backoff.at) + delay(self.backoff.attempts, LONGEST_DELAYS.get(reason, LONGEST_DELAY))


def remember(view: View, found: tuple[Trouble, ...]) -> Memory:
    """What status remembers, brought up to date."""
    backoff = _backoff(view)
    return Memory(_exclusions(view, found, backoff), backoff)


def delay(attempts: int, longest: timedelta) -> timedelta:
    """None after the first attempt, then doubling."""
    return min(longest, FIRST_DELAY * 2 ** min(attempts - 2, 16)) if attempts > 1 else timedelta()


def _is_edited(view: View) -> bool:
    status = view.deployment.status
    return 0 < status.observed_generation != view.deployment.metadata.generation


def _exclusions(view: View, found: tuple[Trouble, ...], backoff: Backoff | None) -> tuple[Exclusion, ...]:
    kept = {each.node: each for each in view.deployment.status.exclusions if _is_remembered(view, each)}
    if _is_edited(view):
        ended = {"strikes": 0, "until": stamp(view.now)}
        kept = {node: each.model_copy(update=ended) for node, each in kept.items()}
    for node, each in kept.items():
        if each.reason == SILENT and _is_judged(view, node) and view.now < moment(each.until):
            kept[node] = each.model_copy(update={"until": stamp(view.now)})
    for trouble in found:
        before = kept.get(trouble.node)
        if view.newest and (before is None or before.epoch != view.newest.epoch.number):
            kept[trouble.node] = _struck(view, view.newest, trouble, before, backoff)
    newest = sorted(kept.values(), key=lambda each: (each.until, each.node))[-MAX_EXCLUSIONS:]
    return tuple(sorted(newest, key=lambda each: each.node))


def _is_judged(view: View, name: str) -> bool:
    """Kubernetes has noticed: from now on its word counts for the node, also when it is back. Or it was heard again in time, and is part of the plan."""
    is_back = view.newest is not None and view.newest.cause.reason == NODE_BACK
    return not view.is_there(name) or (is_back and name in {stage.node for stage in view.stages()})


def _is_remembered(view: View, exclusion: Exclusion) -> bool:
    """That of the newest epoch is: the trouble may still be there, and counts once."""
    is_newest = view.newest is not None and exclusion.epoch == view.newest.epoch.number
    return is_newest or view.now < moment(exclusion.until) + REMEMBERED


def _struck(
    view: View, newest: EpochRecord, trouble: Trouble, before: Exclusion | None, backoff: Backoff | None
) -> Exclusion:
    strikes = 1 + (before.strikes if before else 0)
    until = view.now + min(LONGEST_EXCLUSION, EXCLUDED * 2 ** min(strikes - 1, 16))
    if backoff is not None:  # else it might be over when the next plan is made, which would take the node again
        plans = min(strikes + (backoff.attempts > _FEW_ATTEMPTS), _MOST_PLANS)
        waits = (delay(backoff.attempts + number, LONGEST_DELAY) for number in range(1, plans))
        until = max(until, moment(backoff.retry_at) + sum(waits, EXCLUDED))
    return Exclusion(
        node=trouble.node,
        reason=trouble.reason,
        message=trouble.message[:TEXT],
        epoch=newest.epoch.number,
        strikes=strikes,
        until=stamp(until),
    )


def _backoff(view: View) -> Backoff | None:
    """An attempt is a plan that the operator made of itself, or one that was not found; each counts once."""
    before = view.deployment.status.backoff
    last = _last_attempt(view)
    if not last:
        return before if view.newest and view.newest.cause.reason in {RENEWED, NODE_BACK} else None
    calm = _is_edited(view) or _is_at_peace(view)
    attempts = 0 if calm or before is None else before.attempts
    if before is not None and before.last == last:
        return before if attempts == before.attempts else before.model_copy(update={"attempts": attempts})
    wait = delay(attempts + 1, LONGEST_DELAY)
    return Backoff(attempts=attempts + 1, last=last, at=stamp(view.now), retry_at=stamp(view.now + wait))


def _last_attempt(view: View) -> str:
    """Its reason first; empty where the newest plan was a person's wish, or is an old one in a new epoch."""
    newest = view.newest
    failed = max((each for each in view.failures.values() if not each.kept), key=lambda each: each.at, default=None)
    if failed is not None and (newest is None or failed.at >= newest.at):
        return f"{failed.wish}: not found at {stamp(failed.at)}"
    if newest is None or newest.cause.reason in {*WISHED, RENEWED, NODE_BACK}:
        return ""
    return f"{newest.cause.reason}: epoch {newest.epoch.number}"


def _is_at_peace(view: View) -> bool:
    status = view.deployment.status
    ready = next((each for each in status.conditions if each.type == "Ready" and each.status == "True"), None)
    since = [
        moment(each) for each in (ready and ready.last_transition_time, status.backoff and status.backoff.at) if each
    ]
    return ready is not None and view.now - max(since) >= PEACE
