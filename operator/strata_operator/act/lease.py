"""Which of several operators is the active one: a Lease of our own (coordination.k8s.io), taken, renewed, lost.

`next_lease` is the pure decision; `Leadership` carries it out. kopf's own peering would pause every operator of equal
priority. A holder that cannot renew in time stops acting before another may take over: the epoch ConfigMap is the fence for
what slips through.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from strata_operator.errors import NotReadyError
from strata_operator.observe.kube import LEASES, Kube

log = logging.getLogger(__name__)

LASTS = timedelta(seconds=15)
RENEWED_EVERY_SECONDS = 3.0
STOP_BEFORE = timedelta(seconds=5)  # before its end, the holder acts no more

Object = dict[str, Any]


@dataclass(frozen=True, slots=True)
class LeaseName:
    namespace: str
    name: str


def next_lease(lease: Object | None, name: LeaseName, me: str, now: datetime) -> Object | None:
    """The Lease to write to become or stay the holder; None while another holds it."""
    spec = dict(lease["spec"]) if lease else {}
    holder = spec.get("holderIdentity") or ""
    if holder not in {"", me} and now < _ends(spec):
        return None
    taken = holder != me
    return {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": dict(lease["metadata"]) if lease else {"namespace": name.namespace, "name": name.name},
        "spec": {
            "holderIdentity": me,
            "leaseDurationSeconds": int(LASTS.total_seconds()),
            "acquireTime": _stamp(now) if taken else spec.get("acquireTime", _stamp(now)),
            "renewTime": _stamp(now),
            "leaseTransitions": int(spec.get("leaseTransitions", 0)) + (1 if taken and lease else 0),
        },
    }


def released(lease: Object) -> Object:
    """The Lease without a holder: the next operator need not wait for its end."""
    return {**lease, "spec": {**lease["spec"], "holderIdentity": ""}}


class Leadership:
    """Keeps trying to hold the lease; `leading` says whether this operator may act now."""

    def __init__(self, kube: Kube, name: LeaseName, me: str, changed: Callable[[], None]) -> None:
        self._kube, self._name, self._me, self._changed = kube, name, me, changed
        self._held: Object | None = None
        self._until = datetime.min.replace(tzinfo=UTC)

    @property
    def leading(self) -> bool:
        return datetime.now(UTC) < self._until

    async def keep(self) -> None:
        """Runs until cancelled; then gives the lease back."""
        try:
            while True:
                await self._try()
                await asyncio.sleep(RENEWED_EVERY_SECONDS)
        finally:
            await self._release()

    async def _try(self) -> None:
        now, was = datetime.now(UTC), self.leading
        try:
            current = await self._kube.get(LEASES, self._name.namespace, self._name.name)
            wanted = next_lease(current, self._name, self._me, now)
            if wanted is not None:
                write = self._kube.replace if current else self._kube.create
                self._held = await write(LEASES, wanted)
                self._until = now + LASTS - STOP_BEFORE
            elif was:
                self._until = now  # somebody else holds it
        except NotReadyError as error:
            log.warning("the lease could not be renewed: %s", error)
        if was != self.leading:
            self._say(datetime.now(UTC) - now)
            self._changed()

    def _say(self, took: timedelta) -> None:
        if self.leading:
            log.info("this operator leads")
        else:
            log.warning("this operator leads no more; renewing the lease took %.1f s", took.total_seconds())

    async def _release(self) -> None:
        if not self.leading or self._held is None:
            return
        self._until = datetime.now(UTC)
        try:
            await self._kube.replace(LEASES, released(self._held))
        except NotReadyError as error:
            log.warning("the lease could not be given back: %s", error)


def _ends(spec: Object) -> datetime:
    seconds = float(spec.get("leaseDurationSeconds") or 0)
    renewed = spec.get("renewTime")
    if not renewed:
        return datetime.min.replace(tzinfo=UTC)
    return datetime.fromisoformat(renewed) + timedelta(seconds=seconds)


def _stamp(moment: datetime) -> str:
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
