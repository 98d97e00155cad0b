"""What keeps a pod from running, in words: what the kubelet says of its containers, and what a person can do about it.

Called by view for the pods of slots and gateway. Pure, over Pod objects; knows no deployment. FailedMount is told only in
events, which are not read: a pod that is being created for long is named with the remedies instead.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from strata_operator.decide.comeback import BACK_OFF_SECONDS

LONG_CREATION = timedelta(seconds=60)  # volumes are mounted and networks set up within this, if nothing is wrong
_LONG_AGO = datetime.min.replace(tzinfo=UTC)

_PULL = "check spec.runtime.image, and that its node may pull it"
_CONFIG = "a Secret or ConfigMap that it names is missing or lacks a key: create it, or correct spec.runtime.pod"
_REMEDIES = {
    "ImagePullBackOff": _PULL,
    "ErrImagePull": _PULL,
    "ImageInspectError": _PULL,
    "InvalidImageName": _PULL,
    "ErrImageNeverPull": _PULL,
    "CreateContainerConfigError": _CONFIG,
    "CreateContainerError": "the container runtime refuses it: check spec.runtime.pod",
    "RunContainerError": "the container runtime cannot start it: check spec.runtime.image and spec.runtime.pod",
}
_UNPULLED = {"ImagePullBackOff", "ErrImagePull"}
_UNFIT = "exec format error"
_ENDS = ("waiting", "terminated")
_BACK_OFF = re.compile(r"back-off (?:(?P<minutes>\d+)m)?(?P<seconds>\d+)s")
_CREATING = {"ContainerCreating", "PodInitializing"}


@dataclass(frozen=True, slots=True)
class PodTrouble:
    """`reason`: the kubelet's word. `since`: it counts as trouble once it has lasted for `grace`."""

    reason: str
    message: str
    since: datetime
    grace: timedelta = timedelta()
    image_since: datetime | None = None  # its node cannot pull or run its image, as far as is known since then

    def is_there(self, now: datetime) -> bool:
        return now - self.since >= self.grace


def pod_trouble(pod: Mapping[str, Any]) -> PodTrouble | None:
    """The first container's that has one. Figures that change by themselves are left out of the message."""
    name = pod["metadata"]["name"]
    for status in _containers(pod):
        waiting = (status.get("state") or {}).get("waiting") or {}
        reason = waiting.get("reason", "")
        if reason == "CrashLoopBackOff":
            return PodTrouble(reason, _crashes(name, status), _LONG_AGO, image_since=_image_since(pod, status))
        if reason in _REMEDIES:
            told = _told(name, reason, status, waiting)
            return PodTrouble(reason, told, _LONG_AGO, image_since=_image_since(pod, status))
        if reason in _CREATING and (since := _scheduled_at(pod)):
            return PodTrouble(reason, _creating(name), since, LONG_CREATION)
    return None


def back_off_seconds(pod: Mapping[str, Any]) -> float:
    """So long the kubelet waits, from the end of the last process, before it starts a container again; 0 where it does not wait. The longest of all containers."""
    waits = [(status.get("state") or {}).get("waiting") or {} for status in _containers(pod)]
    return max((_told_wait(each) for each in waits if each.get("reason") == "CrashLoopBackOff"), default=0.0)


def _told_wait(waiting: Mapping[str, Any]) -> float:
    """`back-off 1m20s restarting failed container=...`; of a kubelet that says it otherwise, the least that it is."""
    found = _BACK_OFF.search(str(waiting.get("message", "")))
    return 60.0 * int(found["minutes"] or 0) + int(found["seconds"]) if found else BACK_OFF_SECONDS


def out_of_memory_at(pod: Mapping[str, Any]) -> datetime | None:
    """When the kernel last ended one of its containers for more memory than its limit."""
    ends = [
        ended["finishedAt"]
        for status in _containers(pod)
        for state in ("lastState", "state")
        if (ended := (status.get(state) or {}).get("terminated") or {}).get("reason") == "OOMKilled"
        and ended.get("finishedAt")
    ]
    return max(map(datetime.fromisoformat, ends), default=None)


def _containers(pod: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    status = pod.get("status") or {}
    return [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]


def _told(pod: str, reason: str, status: Mapping[str, Any], waiting: Mapping[str, Any]) -> str:
    image = f" of {status['image']}" if status.get("image") and _REMEDIES[reason] is _PULL else ""
    said = "" if image else f" ({waiting['message'][:256]})" if waiting.get("message") else ""
    return f"pod {pod}: {reason}{image}{said}; {_REMEDIES[reason]}"


def _crashes(pod: str, status: Mapping[str, Any]) -> str:
    ended = (status.get("lastState") or {}).get("terminated") or {}
    how = ended.get("reason", "")
    how = f"exit code {ended['exitCode']}" if how in {"", "Error"} and "exitCode" in ended else how
    why = "raise its memory, or plan less for it" if how == "OOMKilled" else f"see kubectl logs --previous {pod}"
    return f"pod {pod}: CrashLoopBackOff: its process ends again and again{f' ({how})' if how else ''}; {why}"


def _creating(pod: str) -> str:
    return (
        f"pod {pod}: is being created for more than {LONG_CREATION.seconds} s; kubectl describe pod {pod} names why: for "
        "FailedMount see that its claims exist, are bound and may be mounted on its node, and that its Secrets exist"
    )


def _image_since(pod: Mapping[str, Any], status: Mapping[str, Any]) -> datetime | None:
    """Neither pulled, nor built for its node's processor; the kubelet does not say since when, so since it has had the pod."""
    states = [(status.get(which) or {}).get(how) or {} for which in ("state", "lastState") for how in _ENDS]
    unpulled = any(each.get("reason") in _UNPULLED for each in states)
    unfit = any(_UNFIT in str(each.get("message", "")) for each in states)
    return _scheduled_at(pod) if unpulled or unfit else None


def _scheduled_at(pod: Mapping[str, Any]) -> datetime | None:
    conditions = (pod.get("status") or {}).get("conditions") or ()
    placed = next((each for each in conditions if each["type"] == "PodScheduled" and each["status"] == "True"), None)
    return datetime.fromisoformat(placed["lastTransitionTime"]) if placed and placed.get("lastTransitionTime") else None
