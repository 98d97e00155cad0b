"""When slots get a changed template: `OnDelete` leaves the moment to the controller, and this is it.

A pod is outdated when what was asked of it (image, environment, resources, tokens, volumes, devices) is no longer what is
asked. While an epoch serves, one slot at a time is ended and comes back with the new template, and the next waits until all serve
again. Before an epoch is committed, slots that must change first are ended once all others have prepared. Another image ends
all at once, and nothing is prepared over two: releases need not speak with each other. Called by reconcile. Pure.
"""

from collections.abc import Iterable
from typing import Any

from strata_operator.decide.actions import DeletePod
from strata_operator.decide.epochs import CreateEpoch, SendToGateway, SendToSlot, Step
from strata_operator.decide.parts import holds
from strata_operator.decide.view import PodView, View
from strata_operator.render.names import DEVICE_ANNOTATION, TEMPLATE_ANNOTATION
from strata_operator.render.slots import asks_the_same
from strata_planner.contract.control import Prepare


def outdated(view: View) -> tuple[PodView, ...]:
    """Pods of the newest plan's slots that were made of another template, by slot."""
    wanted = {each["metadata"]["name"]: each["spec"]["template"] for each in view.manifests if _is_slot(each)}
    pods = ((name, view.pod_of(name)) for name in sorted(wanted))
    return tuple(pod for name, pod in pods if pod is not None and _differs(pod, wanted[name]))


def replaced(view: View, *, ready: bool) -> tuple[DeletePod, ...]:
    """The pods to end now: of those whose StatefulSet is in the cluster with its new template."""
    old = [pod for pod in outdated(view) if _may_end(view, pod)]
    if of_another_image := [pod for pod in old if pod.image != _image(view)]:
        return _ended(of_another_image)
    silent = [pod for pod in old if not view.answers(pod.stateful_set)]
    if not view.is_committed:
        others = {stage.slot for stage in view.stages()} - {pod.stateful_set for pod in old}
        prepared = all(_holds(view, slot) for slot in others)
        return _ended([pod for pod in old if not _holds(view, pod.stateful_set)] if prepared else silent)
    return _ended(old[:1] if ready else silent)


def speakable(view: View, steps: tuple[Step, ...]) -> tuple[Step, ...]:
    """The steps without those that must wait for a slot's new template."""
    old = {pod.stateful_set: pod for pod in outdated(view)}
    if any(pod.image != _image(view) for pod in old.values()):
        return tuple(step for step in steps if not isinstance(step, SendToSlot | SendToGateway | CreateEpoch))
    return tuple(
        step
        for step in steps
        if not (isinstance(step, SendToSlot) and isinstance(step.message, Prepare) and step.slot in old)
    )


def _ended(pods: Iterable[PodView]) -> tuple[DeletePod, ...]:
    return tuple(DeletePod(pod.name, pod.uid) for pod in pods)


def _is_slot(manifest: dict[str, Any]) -> bool:
    return bool(manifest["kind"] == "StatefulSet" and "template" in manifest.get("spec", {}))


def _differs(pod: PodView, template: dict[str, Any]) -> bool:
    """A pod of a release that did not note its template is judged by its image and devices."""
    notes = template["metadata"]["annotations"]
    if pod.template:
        return pod.template != str(notes[TEMPLATE_ANNOTATION])
    other_image = bool(pod.image) and pod.image != template["spec"]["containers"][0]["image"]
    return other_image or (bool(pod.device) and not asks_the_same(pod.device, notes[DEVICE_ANNOTATION]))


def _image(view: View) -> str:
    return next(
        (each["spec"]["template"]["spec"]["containers"][0]["image"] for each in view.manifests if _is_slot(each)), ""
    )


def _may_end(view: View, pod: PodView) -> bool:
    """A pod that would come back as it was is not ended. A node that is away ends no pod: its loss is another matter."""
    wanted = next(each for each in view.manifests if _is_slot(each) and each["metadata"]["name"] == pod.stateful_set)
    noted = wanted["spec"]["template"]["metadata"]["annotations"][TEMPLATE_ANNOTATION]
    node = view.nodes.get(pod.node)
    reachable = not pod.node or (node is not None and node.away_since is None)
    return reachable and not pod.is_ending and view.templates.get(pod.stateful_set) == noted


def _holds(view: View, slot: str) -> bool:
    return view.newest is not None and holds(view.newest.epoch, view.seen.slots.get(slot))
