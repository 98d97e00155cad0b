"""An epoch as it is kept: an immutable ConfigMap with the plan and the nodes that it takes, and a Secret with the epoch's key.

Creating the ConfigMap is what makes an epoch: AlreadyExists means that another controller won, so it is created, never
applied. The Secret is made first; one that exists already, left by an attempt that ended early, holds the key to use. `read_epoch` is the way back. Called by render's users; knows no API client.
"""

from dataclasses import dataclass
from typing import Any

from strata_operator.api import LLMDeployment
from strata_operator.render.names import APP, EPOCH_LABEL, epoch_name, labels
from strata_operator.render.objects import Object, metadata, secret_text
from strata_planner.contract.plan import Plan
from strata_planner.contract.values import from_json, to_json
from strata_planner.question.cluster import Cluster

PLAN_FILE = "plan.json"
CLUSTER_FILE = "cluster.json"
EPOCH_SECRET_KEY = "key"  # noqa: S105  the field's name


@dataclass(frozen=True, slots=True)
class Epoch:
    """One plan with its number and the secret that those of its connections follow from."""

    number: int
    key: str
    plan: Plan


def epoch_objects(deployment: LLMDeployment, epoch: Epoch, cluster: Cluster) -> tuple[Object, Object]:
    """The Secret and the ConfigMap of an epoch, in the order to create them. `cluster`: what its plan was made for.

    Of that only the plan's own nodes are kept: links join every pair of nodes, and an object holds a megabyte.
    """
    taken = cluster.restricted_to({stage.node for stage in epoch.plan.stages})
    name = epoch_name(deployment, epoch.number)
    own_labels = labels(deployment, APP) | {EPOCH_LABEL: str(epoch.number)}
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": metadata(deployment, name, own_labels),
        "type": "Opaque",
        "immutable": True,
        "stringData": {EPOCH_SECRET_KEY: epoch.key},
    }
    config_map = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(deployment, name, own_labels),
        "immutable": True,
        "data": {PLAN_FILE: epoch.plan.encode().decode(), CLUSTER_FILE: to_json(taken).decode()},
    }
    return secret, config_map


def read_epoch(secret: dict[str, Any], config_map: dict[str, Any]) -> tuple[Epoch, Cluster]:
    """An epoch from its stored objects. Raises ContractError when another release wrote what this one cannot read."""
    number = int(config_map["metadata"]["labels"][EPOCH_LABEL])
    key = secret_text(secret, EPOCH_SECRET_KEY)
    data = config_map["data"]
    return Epoch(number, key, Plan.decode(data[PLAN_FILE])), from_json(data[CLUSTER_FILE], Cluster)
