"""An epoch as it is kept: an immutable ConfigMap with the plan and the nodes that it takes, and a Secret with the epoch's key.

Creating the ConfigMap is what makes an epoch: AlreadyExists means that another controller won, so it is created, never
applied. The Secret is made first; one that exists already, left by an attempt that ended early, holds the key to use. It holds the keys of the
earlier epochs, too, in which replicas that go on were formed: no record lives longer for them. `read_epoch` is the way back. Called by render's users; knows no API client.
"""

import json
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
FORMED_FILE = "formed.json"  # replica -> the epoch in which it was formed, of those that go on
RESERVED_FILE = "reserved"  # the last number that its forerunner kept, of an epoch that a standing order has made
EPOCH_SECRET_KEY = "key"  # noqa: S105  the field's name


@dataclass(frozen=True, slots=True)
class Formation:
    """A replica that goes on from an earlier epoch: the one in which it was formed, and the key of that."""

    replica: int
    epoch: int
    key: str


@dataclass(frozen=True, slots=True)
class Epoch:
    """One plan with its number and the secret that those of its connections follow from, but for the replicas that go on (`formations`). Its standing
    orders have the numbers behind its own, whoever carries them out; an epoch that one of them has made has none to give.
    """

    number: int
    key: str
    plan: Plan
    formations: tuple[Formation, ...] = ()
    reserved: int = 0  # of one that a standing order has made: the last number that its forerunner kept for orders

    @property
    def has_orders(self) -> bool:
        """Whether it has any to give."""
        return not self.reserved and self.plan.orders is not None

    @property
    def last_number(self) -> int:
        """The highest that it keeps: its own, and one for each of its standing orders."""
        return self.reserved or self.number + order_count(self.plan)

    def formed_in(self, replica: int) -> int:
        return next((each.epoch for each in self.formations if each.replica == replica), self.number)

    def key_of(self, replica: int) -> str:
        return next((each.key for each in self.formations if each.replica == replica), self.key)


def order_count(plan: Plan) -> int:
    """Of the numbers that a plan's standing orders take: one for each loss, one to form each replica anew and, of several, one for all."""
    replicas = len(plan.replicas)
    return 0 if plan.orders is None else len(plan.orders) + replicas + (replicas > 1)


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
        "stringData": {EPOCH_SECRET_KEY: epoch.key} | {_key_field(each.epoch): each.key for each in epoch.formations},
    }
    formed = {str(each.replica): each.epoch for each in epoch.formations}
    config_map = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(deployment, name, own_labels),
        "immutable": True,
        "data": {PLAN_FILE: epoch.plan.encode().decode(), CLUSTER_FILE: to_json(taken).decode()}
        | ({FORMED_FILE: json.dumps(formed)} if formed else {})
        | ({RESERVED_FILE: str(epoch.reserved)} if epoch.reserved else {}),
    }
    return secret, config_map


def _key_field(epoch: int) -> str:
    return f"{EPOCH_SECRET_KEY}-{epoch}"


def read_epoch(secret: dict[str, Any], config_map: dict[str, Any]) -> tuple[Epoch, Cluster]:
    """An epoch from its stored objects. Raises ContractError when another release wrote what this one cannot read."""
    number = int(config_map["metadata"]["labels"][EPOCH_LABEL])
    key = secret_text(secret, EPOCH_SECRET_KEY)
    data = config_map["data"]
    formed = {int(replica): int(epoch) for replica, epoch in json.loads(data.get(FORMED_FILE, "{}")).items()}
    formations = tuple(Formation(each, at, secret_text(secret, _key_field(at))) for each, at in sorted(formed.items()))
    epoch = Epoch(number, key, Plan.decode(data[PLAN_FILE]), formations, int(data.get(RESERVED_FILE, "0")))
    return epoch, from_json(data[CLUSTER_FILE], Cluster)
