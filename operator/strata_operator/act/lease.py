"""Which of several operators is the active one: a Lease of our own (coordination.k8s.io), taken, renewed, lost.

client-go's rule: whether a lease has run out is judged by how long this process has seen it unchanged, by its own clock,
never by the times written in it: another machine's clock may be minutes off. A holder acts for RENEW_DEADLINE after its last
renewal, others take the lease after LASTS: what lies between is for a request that was sent in the last moment.
`next_lease` is the pure decision; `Leadership` carries it out, and is the fence that every write asks. kopf's own peering
would pause every operator of equal priority.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from strata_operator.errors import NotReadyError
from strata_operator.observe.kube import LEASES, Kube

log = logging.getLogger(__name__)

LASTS_SECONDS = 15.0
RENEW_DEADLINE_SECONDS = 10.0  # without a renewal for so long, the holder acts no more
RENEWED_EVERY_SECONDS = 3.0

Object = dict[str, Any]


class NotLeadingError(NotReadyError):
    """This operator's lease is no longer safely its own: another one may be acting by now."""


@dataclass(frozen=True, slots=True)
class LeaseName:
    namespace: str
    name: str


@dataclass(frozen=True, slots=True)
class Sighting:
    """A lease as it was last seen, and since when it has been seen so, by this process's monotonic clock."""

    spec: Object
    since: float

    def runs_out(self) -> float:
        """After its own duration; without one it is nobody's."""
        return self.since + float(self.spec.get("leaseDurationSeconds") or 0)


def sighted(before: Sighting | None, lease: Object | None, now: float) -> Sighting | None:
    """The clock starts anew with every change of the lease."""
    if lease is None:
        return None
    spec = dict(lease.get("spec") or {})
    return before if before is not None and before.spec == spec else Sighting(spec, now)


def next_lease(lease: Object | None, seen: Sighting | None, name: LeaseName, me: str, now: float) -> Object | None:
    """The Lease to write to become or stay the holder; None while another holds it. `seen`: of this very lease."""
    spec = dict(lease.get("spec") or {}) if lease else {}
    holder = spec.get("holderIdentity") or ""
    if holder not in {"", me} and seen is not None and now < seen.runs_out():
        return None
    taken = holder != me
    stamp = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")  # for people: nobody judges by it
    return {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": dict(lease["metadata"]) if lease else {"namespace": name.namespace, "name": name.name},
        "spec": {
            "holderIdentity": me,
            "leaseDurationSeconds": int(LASTS_SECONDS),
            "acquireTime": stamp if taken else spec.get("acquireTime", stamp),
            "renewTime": stamp,
            "leaseTransitions": int(spec.get("leaseTransitions", 0)) + (1 if taken and lease else 0),
        },
    }


def released(lease: Object) -> Object:
    """The Lease without a holder: the next operator need not wait for its end."""
    return {**lease, "spec": {**lease["spec"], "holderIdentity": ""}}


class Leadership:
    """Keeps trying to hold the lease; `leading` says whether this operator may act now."""

    def __init__(
        self,
        kube: Kube,
        name: LeaseName,
        me: str,
        changed: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._kube, self._name, self._me, self._changed, self._clock = kube, name, me, changed, clock
        self._held: Object | None = None
        self._seen: Sighting | None = None
        self._renewed: float | None = None  # when the request of the last renewal was begun; None: not ours
        self._was = False

    @property
    def leading(self) -> bool:
        return self._renewed is not None and self._clock() < self._renewed + RENEW_DEADLINE_SECONDS

    def seconds_left(self) -> float:
        """The fence: until another operator may take the lease. Raises NotLeadingError once this one must not act."""
        renewed = self._renewed
        if renewed is None or self._clock() >= renewed + RENEW_DEADLINE_SECONDS:
            raise NotLeadingError(f"{self._me} holds the lease {self._name.name} no longer: nothing is written")
        return renewed + LASTS_SECONDS - self._clock()

    async def keep(self) -> None:
        """Runs until cancelled; then gives the lease back."""
        try:
            while True:
                await self.renew()
                await asyncio.sleep(RENEWED_EVERY_SECONDS)
        finally:
            await self._release()

    async def renew(self) -> None:
        """One try to become or stay the holder."""
        began = self._clock()
        try:
            current = await self._kube.get(LEASES, self._name.namespace, self._name.name)
            self._seen = sighted(self._seen, current, self._clock())
            wanted = next_lease(current, self._seen, self._name, self._me, self._clock())
            if wanted is not None:
                write = self._kube.replace if current else self._kube.create
                self._held = await write(LEASES, wanted)
                self._seen = sighted(self._seen, self._held, self._clock())
                self._renewed = began
            else:
                self._renewed = None  # somebody else holds it
        except NotReadyError as error:
            log.warning("the lease could not be renewed: %s", error)
        self._tell(self._clock() - began)

    def _tell(self, took: float) -> None:
        if self.leading == self._was:
            return
        self._was = self.leading
        if self.leading:
            log.info("this operator leads")
        else:
            log.warning("this operator leads no more; renewing the lease took %.1f s", took)
        self._changed()

    async def _release(self) -> None:
        if not self.leading or self._held is None:
            return
        self._renewed = None
        try:
            await self._kube.replace(LEASES, released(self._held))
        except NotReadyError as error:
            log.warning("the lease could not be given back: %s", error)
