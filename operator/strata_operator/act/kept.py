"""What the controller keeps of one deployment between two looks: only what saves work. Losing it changes nothing.

What the API server refused, plans that failed and looks that broke are remembered here until their back-off is over.
"""

import asyncio
from dataclasses import dataclass
from datetime import datetime

from strata_operator.act.control_client import Links
from strata_operator.act.order_giving import OrderGiving
from strata_operator.api import LLMDeploymentStatus
from strata_operator.decide.backoff import Backoff
from strata_operator.decide.view import Foretold, Knocked, PlanFailure, PlanKey
from strata_operator.observe.inventory import Inventory
from strata_operator.render.records import Weighed
from strata_planner.contract.acceptance import DraftCounts
from strata_planner.contract.control import GatewayStatus
from strata_planner.contract.keys import new_secret
from strata_planner.contract.plan import Speculation
from strata_planner.question.cluster import Cluster

APPLY_AGAIN_SECONDS = 120.0  # drift that no watch shows is repaired this late
SAY_AGAIN_SECONDS = 300.0  # a status that somebody on its way made something else of
KEPT_FAILURES = 16  # plans that were not found, of a deployment


@dataclass(frozen=True, slots=True)
class Refusal:
    """What the API server would not do, and when it is asked again. `digest`: of the manifest that it refused."""

    sentence: str
    digest: str
    backoff: Backoff


@dataclass(frozen=True, slots=True)
class Asked:
    """A plan under way. `question`: planning is begun anew when it changes; `key`: all that the answer depends on; `without`: the
    digest of the nodes that it does without.
    """

    question: str
    key: PlanKey
    cluster: Cluster
    inventory_digest: str
    without: str
    since: float
    seconds: float = 0.0  # that it took, once it is there
    noticed: datetime | None = None  # when it was asked for


class DraftsHeard:
    """What a gateway has counted of drafts since it was first heard under the wish that is in force: before that it may have been under others."""

    def __init__(self) -> None:
        self._under: tuple[str, Speculation] | None = None  # incarnation and wish
        self._first = DraftCounts()

    def take(self, gateway: GatewayStatus | None, epoch: int, wish: Speculation) -> DraftCounts:
        """`epoch`, `wish`: of the newest plan. Nothing while the gateway does not route to it."""
        if gateway is None or gateway.epoch != epoch:
            return DraftCounts()
        now = gateway.drafted or DraftCounts()
        if (under := (gateway.incarnation, wish)) != self._under:
            self._under, self._first = under, now
        return now.since(self._first)


class Kept:
    """One deployment's."""

    def __init__(self, links: Links, since: float) -> None:
        self.links = links
        self.drafts = DraftsHeard()
        self.orders = OrderGiving()
        self.control_key = new_secret()  # used if the cluster has none yet
        self.applied: dict[str, tuple[str, float]] = {}  # kind and name -> what it was made last (digest), and when
        self.refusals: dict[str, Refusal] = {}  # by what was to be done
        self.failures: dict[PlanKey, PlanFailure] = {}  # of plans that were not found, the last few
        self.asked: Asked | None = None
        self._knocked: dict[str, Knocked] = {}
        self.foretold: Foretold | None = None  # what `asked` has found, where it is not taken yet
        self.weighed: Weighed | None = None  # the last choice since the newest epoch was made
        self.conflicts = Backoff()  # of plans whose devices were gone when they were done
        self.errors = Backoff()  # of looks that ended in an error
        self.generation = -1  # of the spec that they were at
        self.unsaid: LLMDeploymentStatus | None = None  # what the API server would not take as status
        self._meant: LLMDeploymentStatus | None = None  # what somebody on its way made something else of
        self._stored: LLMDeploymentStatus | None = None  # what it has instead
        self._said_at = since
        self.taken_number = 0  # an epoch that somebody else has made
        self.task: asyncio.Task[None] | None = None
        self.since = since
        self.is_touched = True  # something of it has changed since it was looked at
        self.due_at = 0.0  # when it is looked at although nothing has
        self.changed_at = since  # when something of it changed last, or was done for it
        self.inventory: Inventory | None = None  # at that look

    def status_over(self, stored: LLMDeploymentStatus) -> LLMDeploymentStatus:
        """What is to be gone on from: status, or what was to be written there and was refused or changed on its way, until somebody
        writes another.
        """
        if stored != self._stored:
            self.unsaid, self._meant, self._stored = None, None, stored
        return self.unsaid or self._meant or stored

    def note_said(self, status: LLMDeploymentStatus, stored: LLMDeploymentStatus, now: float) -> None:
        """It was written, and this is what became of it. An admission webhook may cut or change it: saying it at once again would
        not help.
        """
        self._said_at = now
        self.unsaid, self._stored = None, stored
        self._meant = None if self._stored == status else status

    def is_to_be_said(self, now: float) -> bool:
        """Although it is what was meant before."""
        return self.unsaid is not None or (self._meant is not None and now - self._said_at >= SAY_AGAIN_SECONDS)

    def leave_unsaid(self, status: LLMDeploymentStatus) -> bool:
        """Whether it is news. Decisions rest on what status says; a service must not end because nobody may write it."""
        is_news, self.unsaid = self.unsaid != status, status
        return is_news

    def still_applied(self, now: float, lasts_seconds: float) -> frozenset[str]:
        """Digests of what is in the cluster as far as anybody knows."""
        self.applied = {name: last for name, last in self.applied.items() if now - last[1] < lasts_seconds}
        return frozenset(digest for digest, _ in self.applied.values())

    def forget_applied(self, *names: str) -> None:
        """What is deleted, or may be: were it wanted again, its pods would wait for a Secret that is believed to be there."""
        for name in names:
            self.applied.pop(name, None)

    def still_refused(self, wanted: set[str]) -> tuple[str, ...]:
        """Sentences. What is not wanted any more is forgotten: another manifest of the same name is tried at once."""
        self.refusals = {
            name: refusal for name, refusal in self.refusals.items() if not refusal.digest or refusal.digest in wanted
        }
        return tuple(sorted(refusal.sentence for refusal in self.refusals.values()))

    def wants(self, names: set[str]) -> None:
        """What is done now, in words. What was refused and is not wanted any more is forgotten."""
        self.refusals = {name: each for name, each in self.refusals.items() if each.digest or name in names}

    def postponed(self, now: float) -> frozenset[str]:
        return frozenset(each.digest for each in self.refusals.values() if each.digest and each.backoff.waits(now))

    def has_no_plan_for(self, wish: str) -> bool:
        """Whether one was looked for, and there is none."""
        return any(each.wish == wish and not each.passing for each in self.failures.values())

    def knocked(self, now: datetime) -> dict[str, Knocked]:
        """Who answers knocks, each as long as looks have found the same: every change leads to one."""
        before, doors = self._knocked, self.links.doors
        same = {name for name, door in doors.items() if name in before and before[name].door == door}
        self._knocked = {name: before[name] if name in same else Knocked(door, now) for name, door in doors.items()}
        return self._knocked

    def note_weighed(self, weighed: Weighed | None) -> None:
        """The first choice tells most: later ones see the same restart with less of it left. Another choice is news."""
        if weighed is not None and (self.weighed is None or self.weighed.chosen != weighed.chosen):
            self.weighed = weighed

    def note_failure(self, failure: PlanFailure) -> None:
        self.failures.pop(failure.key, None)
        self.failures[failure.key] = failure
        while len(self.failures) > KEPT_FAILURES:
            self.failures.pop(next(iter(self.failures)))

    async def close(self) -> None:
        task, self.task = self.task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await self.links.close()
