"""One look at the cluster: every object that decides something, listed at the same moment. Read by the controller.

Listed live instead of kept from watches: a decision never rests on an object that is out of date by an event.
"""

import asyncio
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from strata_operator.api import LLMDeployment
from strata_operator.decide.view import NodeView, node_views
from strata_operator.errors import NotReadyError
from strata_operator.observe.kube import (
    CLAIMS,
    CONFIG_MAPS,
    DEPLOYMENTS_OF_STRATA,
    NODES,
    PODS,
    SECRETS,
    STATEFUL_SETS,
    ForbiddenError,
    Kube,
)
from strata_operator.render.names import (
    APP,
    COMPONENT_LABEL,
    CONTROL_SECRET_KEY,
    EPOCH_LABEL,
    INSTANCE_LABEL,
    MANAGER_LABEL,
    SLOT,
    TEMPLATE_ANNOTATION,
    control_secret,
)
from strata_operator.render.objects import is_own, secret_text
from strata_operator.render.records import EpochRecord, UnreadRecord, epoch_number, moment, read_record, usable_records
from strata_planner.contract.values import ContractError

Object = dict[str, Any]
Records = tuple[tuple[EpochRecord, ...], tuple[UnreadRecord, ...]]
OURS = f"{MANAGER_LABEL}={APP}"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """`deployments` may be of all namespaces; the objects below them are of the watched ones."""

    deployments: tuple[Object, ...]
    nodes: tuple[Object, ...]
    pods: tuple[Object, ...]  # of everyone
    stateful_sets: tuple[Object, ...]
    config_maps: tuple[Object, ...]
    secrets: tuple[Object, ...]
    claims: tuple[Object, ...] = ()  # volume claims
    unread: Mapping[str, str] = field(default_factory=dict)  # watched namespaces that are not in it, and why

    def records_of(self, namespace: str, name: str) -> Records:
        """Epochs by number, and what this release cannot read, each for itself. One without its Secret is no epoch, but nobody may
        take its number: with a new Secret its plan would come back.
        """
        secrets = {_name(secret): secret for secret in self.secrets if _belongs(secret, namespace, name)}
        read: list[EpochRecord] = []
        unread: list[UnreadRecord] = []
        halves: list[UnreadRecord] = []
        for config_map in self.config_maps:
            if not _belongs(config_map, namespace, name):
                continue
            key, number = _name(config_map), epoch_number(config_map)
            if key not in secrets:
                halves.append(
                    UnreadRecord(key, number, "the Secret of the same name is not there; delete the ConfigMap")
                )
                continue
            try:
                read.append(read_record(secrets[key], config_map))
            except ContractError as error:
                unread.append(UnreadRecord(key, number, str(error)))
        records, passed = usable_records(read, unread)
        return records, (*passed, *halves)

    def lone_keys_of(self, namespace: str, name: str) -> set[int]:
        """Numbers of epochs that have a Secret alone: of attempts that ended early."""
        recorded = {_name(each) for each in self.config_maps if _belongs(each, namespace, name)}
        keys = [each for each in self.secrets if _belongs(each, namespace, name) and _name(each) not in recorded]
        return {number for each in keys if (number := epoch_number(each))}

    def control_key_of(self, deployment: LLMDeployment) -> str | None:
        for secret in self.secrets:
            named = _belongs(secret, deployment.namespace, deployment.name) and _name(secret) == control_secret(
                deployment
            )
            if named and is_own(deployment, secret):
                return secret_text(secret, CONTROL_SECRET_KEY)
        return None

    def stateful_sets_of(self, deployment: LLMDeployment) -> dict[str, datetime]:
        return {
            _name(each): moment(each["metadata"]["creationTimestamp"])
            for each in self.stateful_sets
            if _belongs(each, deployment.namespace, deployment.name)
            and _label(each, COMPONENT_LABEL) == SLOT
            and is_own(deployment, each)
        }

    def templates_of(self, deployment: LLMDeployment) -> dict[str, str]:
        """What the StatefulSets of its slots would make pods of, as noted in their templates."""
        return {
            _name(each): str(
                (each["spec"]["template"]["metadata"].get("annotations") or {}).get(TEMPLATE_ANNOTATION, "")
            )
            for each in self.stateful_sets
            if _belongs(each, deployment.namespace, deployment.name) and _label(each, COMPONENT_LABEL) == SLOT
        }

    def stranded_pods(self, namespaces: tuple[str, ...]) -> list[Object]:
        """Slot and gateway pods on their way out whose deployment and node are both gone: nobody else confirms their end."""
        known = {(each["metadata"]["namespace"], _name(each)) for each in self.deployments}
        nodes = node_views(self.nodes)
        return [
            pod
            for pod in self.pods
            if pod["metadata"].get("deletionTimestamp")
            and _label(pod, MANAGER_LABEL) == APP
            and (not namespaces or pod["metadata"]["namespace"] in namespaces)
            and pod["metadata"]["namespace"] not in self.unread  # whose deployments nobody knows
            and (pod["metadata"]["namespace"], _label(pod, INSTANCE_LABEL)) not in known
            and _is_away(nodes.get(pod["spec"].get("nodeName", "")))
        ]


@dataclass(frozen=True, slots=True)
class _Part:
    """What a snapshot has of one namespace."""

    deployments: list[Object]
    stateful_sets: list[Object]
    config_maps: list[Object]
    secrets: list[Object]
    claims: list[Object]


async def take_snapshot(kube: Kube, namespaces: tuple[str, ...]) -> Snapshot:
    """`namespaces` empty: all. One that is gone, or may not be read any more, is left out whole: half of it would look like lost
    records. Raises NotReadyError, also where none may be read.
    """
    watched = namespaces or ("",)
    nodes, pods, found = await asyncio.gather(
        kube.list(NODES), kube.list(PODS), asyncio.gather(*(_part_of(kube, namespace) for namespace in watched))
    )
    unread = {name: each for name, each in zip(watched, found, strict=True) if isinstance(each, ForbiddenError)}
    if len(unread) == len(watched):
        raise next(iter(unread.values()))
    parts = [part for part in found if isinstance(part, _Part)]
    return Snapshot(
        deployments=_joined(part.deployments for part in parts),
        nodes=tuple(nodes),
        pods=tuple(pods),
        stateful_sets=_joined(part.stateful_sets for part in parts),
        config_maps=_joined(part.config_maps for part in parts),
        secrets=_joined(part.secrets for part in parts),
        claims=_joined(part.claims for part in parts),
        unread={name: str(error) for name, error in unread.items()},
    )


async def _part_of(kube: Kube, namespace: str) -> _Part | ForbiddenError:
    async def records() -> tuple[list[Object], list[Object]]:
        """Of an epoch the Secret is made first, so it is listed last: no epoch that is being recorded is seen without it."""
        config_maps = await kube.list(CONFIG_MAPS, namespace, f"{OURS},{EPOCH_LABEL}")
        return config_maps, await kube.list(SECRETS, namespace, OURS)

    try:
        deployments, stateful_sets, (config_maps, secrets) = await asyncio.gather(
            kube.list(DEPLOYMENTS_OF_STRATA, namespace), kube.list(STATEFUL_SETS, namespace, OURS), records()
        )
    except ForbiddenError as error:
        return error
    claims: list[Object] = []
    with suppress(NotReadyError):  # who may not read them is only warned less: roles may be an older release's
        claims = await kube.list(CLAIMS, namespace)
    return _Part(deployments, stateful_sets, config_maps, secrets, claims)


def _joined(lists: Iterable[list[Object]]) -> tuple[Object, ...]:
    return tuple(item for items in lists for item in items)


def _is_away(node: NodeView | None) -> bool:
    return node is None or node.away_since is not None


def _name(thing: Object) -> str:
    return str(thing["metadata"]["name"])


def _label(thing: Object, name: str) -> str:
    return str((thing["metadata"].get("labels") or {}).get(name, ""))


def _belongs(thing: Object, namespace: str, name: str) -> bool:
    return thing["metadata"].get("namespace") == namespace and _label(thing, INSTANCE_LABEL) == name
