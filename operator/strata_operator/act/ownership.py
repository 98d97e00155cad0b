"""Objects that are not ours are refused and named, never taken over: what stands between the controller and an apply.

An object is a deployment's own if its owner is that very deployment, or if it has no owner and carries the deployment's labels
(a deployment that was deleted without its objects). Called by the controller. Knows no plan.
"""

from collections.abc import Mapping
from typing import Any

from strata_operator.api import KIND, LLMDeployment
from strata_operator.errors import NotReadyError
from strata_operator.observe.kube import SECRETS, AlreadyExistsError, Kube, RefusedError, kind_of
from strata_operator.render.objects import is_own, owners_of

Object = dict[str, Any]


class ForeignObjectError(NotReadyError):
    """An object that someone else made has a name that this deployment needs. It was not touched."""


async def apply_own(kube: Kube, deployment: LLMDeployment, manifest: Object) -> None:
    """Create the object, or bring our own up to date; a Secret that is there stays as it is. Raises ForeignObjectError.

    The first apply is not forced: where someone creates the object at the same moment, the API server names the conflict.
    """
    if kind_of(manifest) is SECRETS:
        await create_own(kube, deployment, manifest)
        return
    meta = manifest["metadata"]
    there = await kube.get(kind_of(manifest), meta["namespace"], meta["name"])
    if there is not None:
        check_owner(deployment, manifest["kind"], there)
    await kube.apply(manifest, force=there is not None)


async def create_own(kube: Kube, deployment: LLMDeployment, manifest: Object) -> bool:
    """Whether it was created; False: our own is there already. Raises ForeignObjectError, and RefusedError for a conflict that is
    about something else, as one about a quota is.
    """
    try:
        await kube.create(kind_of(manifest), manifest)
    except AlreadyExistsError as error:
        meta = manifest["metadata"]
        there = await kube.get(kind_of(manifest), meta["namespace"], meta["name"])
        if there is None:
            raise RefusedError(f"{error}; and it is not there") from error
        check_owner(deployment, manifest["kind"], there)
        return False
    return True


def check_owner(deployment: LLMDeployment, kind: str, thing: Mapping[str, Any]) -> None:
    """Raises ForeignObjectError."""
    if is_own(deployment, thing):
        return
    name = thing["metadata"]["name"]
    owner = next((each for each in owners_of(thing) if each.get("controller")), None)
    if owner and (owner.get("kind"), owner.get("name")) == (KIND, deployment.name):
        raise ForeignObjectError(
            f"{kind} {name} is of an earlier LLMDeployment '{deployment.name}' and has not been removed yet; wait until it is, "
            "or delete it"
        )
    of = f" (of {owner.get('kind')} {owner.get('name')})" if owner else ""
    raise ForeignObjectError(
        f"{kind} {name}{of} is in the way: it is not of this LLMDeployment and was left as it is; give the LLMDeployment "
        f"another name than '{deployment.name}', or remove the object"
    )
