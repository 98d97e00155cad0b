"""Whether the volume claims of a deployment can be mounted where its plan puts slots. Pure, over claim objects.

Called by the controller once a plan is found. Kubernetes itself would leave the second pod in ContainerCreating for ever.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from strata_operator.api import LLMDeployment
from strata_operator.render.pods import claim_of, draft_uri
from strata_planner.contract.plan import Plan

MANY_NODES = {"ReadWriteMany", "ReadOnlyMany"}


def unshared_claim(deployment: LLMDeployment, plan: Plan, claims: Iterable[Mapping[str, Any]]) -> str:
    """A sentence for a claim that one node alone may mount, where slots of the plan lie on several; empty if there is none."""
    nodes = sorted({stage.node for replica in plan.replicas for stage in replica.stages})
    for field, name in _claims(deployment) if len(nodes) > 1 else ():
        modes = next((_modes(claim) for claim in claims if _is(claim, deployment.namespace, name)), None)
        if modes and not modes & MANY_NODES:
            return (
                f"{field}: the claim {name} is {', '.join(sorted(modes))}, so that one node alone may mount it, and the plan puts slots on "
                f"{len(nodes)} nodes ({', '.join(nodes[:8])}); use a ReadWriteMany claim, or keep to one node with placement.nodeSelector"
            )
    return ""


def _claims(deployment: LLMDeployment) -> Iterator[tuple[str, str]]:
    """Field and name of every claim that slots mount."""
    model, pod = deployment.spec.model, deployment.spec.runtime.pod
    if model.cache is not None:
        yield "spec.model.cache", model.cache.persistent_volume_claim
    if (claim := claim_of(model.uri)) is not None:
        yield "spec.model.uri", claim
    if (claim := claim_of(draft_uri(deployment))) is not None:
        yield "spec.runtime.speculation.draftModel.uri", claim
    for volume in pod.volumes:
        source = volume.get("persistentVolumeClaim")
        if isinstance(source, Mapping) and source.get("claimName"):
            yield "spec.runtime.pod.volumes", str(source["claimName"])


def _is(claim: Mapping[str, Any], namespace: str, name: str) -> bool:
    meta = claim["metadata"]
    return bool(meta.get("namespace") == namespace and meta["name"] == name)


def _modes(claim: Mapping[str, Any]) -> set[str]:
    """As bound; as asked for before."""
    bound = (claim.get("status") or {}).get("accessModes")
    return set(bound or (claim.get("spec") or {}).get("accessModes") or ())
