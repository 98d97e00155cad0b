"""What an LLMDeployment says in Kubernetes' own words, and what users add to the pods that run the runtime image.

Part of the spec (`spec.py`); the same names and meanings as in a pod.
"""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from strata_operator.api.base import ApiType, Name, Quantity, RawObject, Rule


class Toleration(ApiType):
    """As in a pod."""

    key: Annotated[str, Field(max_length=316)] | None = None
    operator: Literal["Exists", "Equal"] = "Equal"
    value: Annotated[str, Field(max_length=63)] | None = None
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    toleration_seconds: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="self.operator != 'Exists' || !has(self.value)",
            message="operator Exists takes no value; remove the value or use operator Equal",
            holds=lambda toleration: toleration.operator != "Exists" or toleration.value is None,
            path="value",
        ),
        Rule(
            cel="self.operator == 'Exists' || has(self.key)",
            message="operator Equal needs a key; name one or use operator Exists",
            holds=lambda toleration: toleration.operator == "Exists" or toleration.key is not None,
            path="key",
        ),
    )


class EnvVar(ApiType):
    """As in a container."""

    name: Annotated[str, Field(min_length=1, max_length=253)]
    value: Annotated[str, Field(max_length=32_768)] | None = None
    value_from: RawObject | None = None


class ResourceAmounts(ApiType):
    """Requests and limits as in a container."""

    requests: Annotated[dict[str, Quantity], Field(max_length=16)] = Field(default_factory=dict)
    limits: Annotated[dict[str, Quantity], Field(max_length=16)] = Field(default_factory=dict)


class PodOverlay(ApiType):
    """What is added to the pods that run the runtime image: slots and gateway."""

    resources: ResourceAmounts = ResourceAmounts()
    """Added to the container of a slot; what the plan itself asks for (GPUs; CPU and memory of CPU devices) wins."""
    env: Annotated[
        tuple[EnvVar, ...],
        Field(
            max_length=64, json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]}
        ),
    ] = ()
    """Environment variables of slots and gateway."""
    volumes: Annotated[tuple[RawObject, ...], Field(max_length=32)] = ()
    """Volumes of slots and gateway, as in a pod."""
    volume_mounts: Annotated[tuple[RawObject, ...], Field(max_length=32)] = ()
    """Where the containers of slots and gateway mount them, as in a container."""
    annotations: Annotated[dict[str, Annotated[str, Field(max_length=8192)]], Field(max_length=32)] = Field(
        default_factory=dict
    )
    """Annotations of slot and gateway pods."""
    priority_class_name: Name | None = None
    """PriorityClass of slot and gateway pods."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="!has(self.env) || self.env.all(each, each.name != 'STRATA_CONTROL_KEY')",
            message="STRATA_CONTROL_KEY is set by the operator; remove it",
            holds=lambda pod: all(each.name != "STRATA_CONTROL_KEY" for each in pod.env),
            path="env",
        ),
        Rule(
            cel="",  # the list is a map by name
            message="sets a variable twice; keep one",
            holds=lambda pod: len({each.name for each in pod.env}) == len(pod.env),
            path="env",
        ),
    )
