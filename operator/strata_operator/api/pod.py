"""What an LLMDeployment says in Kubernetes' own words, and what users add to the pods that run the runtime image.

Part of the spec (`spec.py`); the same names and meanings as in a pod.
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from strata_operator.api.base import ApiType, Name, Quantity, RawObject, Rule

# What anybody may use: it reaches nothing beyond the deployment's namespace and holds no Secret. The chart's value `tenants`
# adds others (`strata_operator.api.tenants`).
VOLUME_KINDS = ("configMap", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected")
ENV_SOURCES = ("configMapKeyRef", "fieldRef", "resourceFieldRef")
# Those of the rest that clusters still mount: the API server refuses them by a rule, the operator whatever is not allowed.
CLOSED_VOLUME_KINDS = ("hostPath", "secret", "csi", "nfs", "iscsi", "image", "flexVolume", "gitRepo")
CLOSED_ENV_SOURCES = ("secretKeyRef", "fileKeyRef")


def closed(kinds: tuple[str, ...], what: str, value: str) -> dict[str, Any]:
    """Additions to the schema of a part that is passed on whole: the API server refuses these fields. The chart opens a rule
    by its text, where a value of it allows the field.
    """
    return {
        "properties": {kind: {"type": "object", "x-kubernetes-preserve-unknown-fields": True} for kind in kinds},
        "x-kubernetes-preserve-unknown-fields": True,
        "x-kubernetes-validations": [
            {
                "rule": closed_rule(kind),
                "message": f"{what} {kind} is not allowed here; use another, or have the administrator allow it by the chart's value {value}",
            }
            for kind in kinds
        ],
    }


def closed_rule(kind: str) -> str:
    """The rule in CEL that refuses a field."""
    return f"!has(self.{kind})"


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


Volume = Annotated[
    RawObject,
    Field(json_schema_extra=closed(CLOSED_VOLUME_KINDS, "a volume of kind", "tenants.volumes or tenants.secrets")),
]


class EnvVar(ApiType):
    """As in a container."""

    name: Annotated[str, Field(min_length=1, max_length=253)]
    value: Annotated[str, Field(max_length=32_768)] | None = None
    value_from: (
        Annotated[
            RawObject,
            Field(
                json_schema_extra=closed(CLOSED_ENV_SOURCES, "a value from", "tenants.secrets or tenants.envSources")
            ),
        ]
        | None
    ) = None


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
    volumes: Annotated[tuple[Volume, ...], Field(max_length=32)] = ()
    """Volumes of slots and gateway, as in a pod; of the kinds that are allowed (docs/security.md)."""
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
