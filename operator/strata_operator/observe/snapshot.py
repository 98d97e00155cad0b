"""What is known of one deployment: its own objects, and what they say together. Cut from the `stock`, read by the controller. Pure."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from strata_operator.api import LLMDeployment
from strata_operator.render.names import (
    COMPONENT_LABEL,
    CONTROL_SECRET_KEY,
    SLOT,
    TEMPLATE_ANNOTATION,
    control_secret,
)
from strata_operator.render.objects import is_own, secret_text
from strata_operator.render.records import EpochRecord, UnreadRecord, epoch_number, moment, read_record, usable_records
from strata_planner.contract.values import ContractError

Object = dict[str, Any]
Records = tuple[tuple[EpochRecord, ...], tuple[UnreadRecord, ...]]


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """What carries the deployment's labels: whether it is its own is another question."""

    pods: tuple[Object, ...] = ()
    stateful_sets: tuple[Object, ...] = ()
    config_maps: tuple[Object, ...] = ()
    secrets: tuple[Object, ...] = ()

    def records(self, read: Callable[[Object, Object], EpochRecord] = read_record) -> Records:
        """Epochs by number, each read by `read`, and what this release cannot read, each for itself. One without its Secret is no epoch, but nobody may
        take its number: with a new Secret its plan would come back.
        """
        secrets = {_name(secret): secret for secret in self.secrets}
        found: list[EpochRecord] = []
        unread: list[UnreadRecord] = []
        halves: list[UnreadRecord] = []
        for config_map in self.config_maps:
            key, number = _name(config_map), epoch_number(config_map)
            if key not in secrets:
                halves.append(
                    UnreadRecord(key, number, "the Secret of the same name is not there; delete the ConfigMap")
                )
                continue
            try:
                found.append(read(secrets[key], config_map))
            except ContractError as error:
                unread.append(UnreadRecord(key, number, str(error)))
        records, passed = usable_records(found, unread)
        return records, (*passed, *halves)

    def lone_keys(self) -> set[int]:
        """Numbers of epochs that have a Secret alone: of attempts that ended early."""
        recorded = {_name(each) for each in self.config_maps}
        keys = [each for each in self.secrets if _name(each) not in recorded]
        return {number for each in keys if (number := epoch_number(each))}

    def control_key_of(self, deployment: LLMDeployment) -> str | None:
        for secret in self.secrets:
            if _name(secret) == control_secret(deployment) and is_own(deployment, secret):
                return secret_text(secret, CONTROL_SECRET_KEY)
        return None

    def stateful_sets_of(self, deployment: LLMDeployment) -> dict[str, datetime]:
        return {
            _name(each): moment(each["metadata"]["creationTimestamp"])
            for each in self.stateful_sets
            if _label(each, COMPONENT_LABEL) == SLOT and is_own(deployment, each)
        }

    def templates(self) -> dict[str, str]:
        """What the StatefulSets of its slots would make pods of, as noted in their templates."""
        return {
            _name(each): str(
                (each["spec"]["template"]["metadata"].get("annotations") or {}).get(TEMPLATE_ANNOTATION, "")
            )
            for each in self.stateful_sets
            if _label(each, COMPONENT_LABEL) == SLOT
        }


def _name(thing: Object) -> str:
    return str(thing["metadata"]["name"])


def _label(thing: Object, name: str) -> str:
    return str((thing["metadata"].get("labels") or {}).get(name, ""))
