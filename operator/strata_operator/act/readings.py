"""What has been read of objects, kept as long as they stay the same: parsing what nobody has changed is most of what a look would cost.

Called by a look. The stock hands out the same object until it changes, so that being the same object is enough.
"""

from typing import Any

from strata_operator.api import LLMDeployment, deployment_from_object
from strata_operator.api.spec import LLMDeploymentSpec
from strata_operator.observe.snapshot import Records, Snapshot
from strata_operator.once import Same
from strata_operator.render import RenderOptions, render
from strata_operator.render.records import EpochRecord, as_planned, read_record
from strata_operator.render.slots import Claim, claims_of, slots_of

Object = dict[str, Any]
Rendered = tuple[Same[LLMDeploymentSpec], Same[EpochRecord], RenderOptions]
Read = tuple[Object, Object, EpochRecord]  # of a Secret and a ConfigMap


class Readings:
    """Of all deployments, by uid."""

    def __init__(self) -> None:
        self._deployments: dict[str, tuple[Object, LLMDeployment]] = {}
        self._records: dict[str, tuple[Snapshot, Records]] = {}
        self._epochs: dict[str, dict[str, Read]] = {}
        self._manifests: dict[str, tuple[Rendered, tuple[Object, ...]]] = {}
        self._claims: dict[str, tuple[EpochRecord, tuple[Claim, ...]]] = {}

    def deployment(self, thing: Object) -> LLMDeployment:
        """Raises InvalidInputError."""
        uid = thing["metadata"]["uid"]
        known = self._deployments.get(uid)
        if known is None or known[0] is not thing:
            read = deployment_from_object(thing)
            if known is not None and known[1].spec == read.spec:  # what was worked out of it still holds
                read = read.model_copy(update={"spec": known[1].spec})
            known = self._deployments[uid] = (thing, read)
        return known[1]

    def manifests(self, deployment: LLMDeployment, newest: EpochRecord, options: RenderOptions) -> tuple[Object, ...]:
        """What serves the newest plan, as it was planned for: another spec changes nothing before it has a plan."""
        uid, basis = deployment.metadata.uid, (Same(deployment.spec), Same(newest), options)
        known = self._manifests.get(uid)
        if known is None or known[0] != basis:
            slots = slots_of(newest.epoch.plan, newest.cluster)
            known = (basis, tuple(render(as_planned(deployment, newest), slots, options)))
            self._manifests[uid] = known
        return known[1]

    def records(self, deployment: LLMDeployment, part: Snapshot) -> Records:
        uid = deployment.metadata.uid
        known = self._records.get(uid)
        if known is None or known[0] is not part:
            before, now = self._epochs.get(uid, {}), {}

            def read(secret: Object, config_map: Object) -> EpochRecord:
                name = config_map["metadata"]["name"]
                last = before.get(name)
                is_same = last is not None and last[0] is secret and last[1] is config_map
                now[name] = last if last and is_same else (secret, config_map, read_record(secret, config_map))
                return now[name][2]

            known = (part, part.records(read))
            self._records[uid], self._epochs[uid] = known, now
        return known[1]

    def claims(self, deployment: LLMDeployment, newest: EpochRecord) -> tuple[Claim, ...]:
        """Of the newest epoch. Raises KeyError for a plan that is not of its own cluster."""
        uid = deployment.metadata.uid
        known = self._claims.get(uid)
        if known is None or known[0] is not newest:
            known = (newest, claims_of(deployment, newest.epoch.plan, newest.cluster))
            self._claims[uid] = known
        return known[1]

    def drop(self, uid: str) -> None:
        for each in (self._deployments, self._records, self._epochs, self._claims, self._manifests):
            each.pop(uid, None)
