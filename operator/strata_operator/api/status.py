"""What the operator reports of a deployment: bounded, so that the object stays small however long it lives.

Written by the reconciler, read by people, by the columns of `kubectl get` and by the next reconcile. Knows nothing of how
the figures are found.
"""

from typing import Annotated, Literal

from pydantic import Field

from strata_operator.api.base import ApiType, Text

MAX_STAGES = 64
MAX_REPLANS = 10
MAX_EXCLUSIONS = 32

Phase = Literal["Pending", "Planning", "Loading", "Ready", "Degraded", "Replanning", "Failed", "Paused"]
Sentence = Annotated[str, Field(max_length=32_768)]
Moment = Annotated[str, Field(max_length=64, json_schema_extra={"format": "date-time"})]


class Condition(ApiType):
    """A standard condition: one of Inventoried, Planned, Rendered, StagesReady, Updated, Ready, Degraded."""

    type: Annotated[str, Field(max_length=316)]
    status: Literal["True", "False", "Unknown"]
    reason: Annotated[str, Field(max_length=1024)]
    """One word in CamelCase."""
    message: Sentence
    """A sentence for people."""
    last_transition_time: Annotated[str, Field(max_length=64, json_schema_extra={"format": "date-time"})]
    observed_generation: Annotated[int, Field(ge=0)] = 0


class Performance(ApiType):
    """Figures of the planned workload."""

    tokens_per_second: Annotated[float, Field(ge=0)]
    ttft_ms: Annotated[float, Field(ge=0)] | None = None
    """Time to the first token, milliseconds."""
    tpot_ms: Annotated[float, Field(ge=0)] | None = None
    """Time per further token, milliseconds."""
    perplexity_increase: Annotated[float, Field(ge=0)] | None = None
    """Points of perplexity over 16 bits on the calibration's text, where the model was calibrated."""


class AlternativeStatus(ApiType):
    """A plan that was not chosen."""

    summary: Text
    predicted: Performance | None = None
    rejected_because: Text
    """What it is worse in, or by how much it does not fit."""


class PlanStatus(ApiType):
    """The plan in force; the whole of it is in the ConfigMap `<name>-epoch-<epoch>`."""

    epoch: Annotated[int, Field(ge=1)]
    inventory_hash: Text = ""
    """Of the cluster that the plan was made for: another one leads to a new plan."""
    bound_by: Text = ""
    """What keeps the plan from being faster."""
    predicted: Performance | None = None
    measured: Performance | None = None
    alternatives: Annotated[tuple[AlternativeStatus, ...], Field(max_length=3)] = ()
    """Other plans that were looked at."""


class StageStatus(ApiType):
    """One stage of the plan as it runs."""

    replica: Annotated[int, Field(ge=0)]
    stage: Annotated[int, Field(ge=0)]
    slot: Text
    """The StatefulSet that runs it."""
    node: Text
    devices: Annotated[tuple[Text, ...], Field(max_length=64)]
    layers: Annotated[tuple[int, ...], Field(min_length=2, max_length=2)]
    """First and last layer, inclusive."""
    bits: Annotated[dict[str, int], Field(max_length=8)]
    """How many layers have how many bits."""
    memory_predicted_bytes: Annotated[int, Field(ge=0)] | None = None
    memory_measured_bytes: Annotated[int, Field(ge=0)] | None = None
    ready: bool = False
    restarts: Annotated[int, Field(ge=0)] = 0
    progress: Annotated[int, Field(ge=0)] = 0
    """The furthest that its slot has come in the newest epoch: 1 for its first answer, 1 more for every layer it has loaded."""
    progress_at: Moment | None = None
    """Since when it is that far."""


class Replan(ApiType):
    """Why a new epoch was made and what it cost."""

    epoch: Annotated[int, Field(ge=1)]
    at: Annotated[str, Field(max_length=64, json_schema_extra={"format": "date-time"})]
    reason: Text
    """One word in CamelCase: NodeLost, NodeAdded, SpecChanged, ..."""
    node: Text | None = None
    seconds_to_plan: Annotated[float, Field(ge=0)] | None = None
    seconds_to_ready: Annotated[float, Field(ge=0)] | None = None


class Exclusion(ApiType):
    """A node that is planned without for a while, because a slot there did not come to serve."""

    node: Text
    reason: Text
    """One word in CamelCase: PrepareRefused, PrepareStalled, Unschedulable."""
    message: Text
    epoch: Annotated[int, Field(ge=1)]
    """The epoch in which it was seen last."""
    strikes: Annotated[int, Field(ge=0)]
    """How often it was seen; each time doubles how long it lasts."""
    until: Moment
    """The node may be planned with again from then on; the strikes are remembered longer."""


class Backoff(ApiType):
    """Plans that the operator made of itself since the deployment last served in peace, and when the next may be made."""

    attempts: Annotated[int, Field(ge=0)]
    last: Text
    """The newest attempt: an epoch, or a plan that was not found."""
    at: Moment
    retry_at: Moment
    """The next plan, unless the spec changes; after a node's loss within a minute."""


class LLMDeploymentStatus(ApiType):
    phase: Phase | None = None
    observed_generation: Annotated[int, Field(ge=0)] = 0
    url: Text | None = None
    """Base address of the OpenAI API inside the cluster."""
    committed_epoch: Annotated[int, Field(ge=0)] = 0
    """The epoch that all slots have switched to; 0: none yet."""
    image: Annotated[str, Field(max_length=512)] | None = None
    """The runtime image in use, recorded so that an upgrade of the operator restarts no slot."""
    stages_ready: Annotated[str, Field(max_length=32)] | None = None
    """Ready and planned stages, as in 2/3."""
    devices: Text | None = None
    """The devices in use, as in 3 x T4, 1 x V100-32GB."""
    conditions: Annotated[
        tuple[Condition, ...],
        Field(
            max_length=16, json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]}
        ),
    ] = ()
    plan: PlanStatus | None = None
    stages: Annotated[tuple[StageStatus, ...], Field(max_length=MAX_STAGES)] = ()
    replans: Annotated[tuple[Replan, ...], Field(max_length=MAX_REPLANS)] = ()
    """The last ten."""
    exclusions: Annotated[tuple[Exclusion, ...], Field(max_length=MAX_EXCLUSIONS)] = ()
    """Nodes that are planned without for a while. Any edit of the spec ends them."""
    backoff: Backoff | None = None
    """Absent while nothing is wrong."""
