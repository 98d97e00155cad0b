"""What the operator reports of a deployment: bounded, so that the object stays small however long it lives.

Written by the reconciler, read by people, by the columns of `kubectl get` and by the next reconcile. Texts are cut here, where
their bounds are, so that no report can be longer than the API server takes. Fields of another release are passed over: what an
operator has written must never keep its successor, or its predecessor, from working. Knows nothing of how the figures are found.
"""

import json
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, ValidationError

from strata_operator.api.base import ApiType

MAX_STAGES = 64
MAX_SHADOWED = 512  # layers
MAX_REPLANS = 12
RECONCILE_ERROR = "ReconcileError"  # a condition that is there only while something was not foreseen
MAX_EXCLUSIONS = 32
MAX_TEXT = 1024
MAX_SENTENCE = 32_768  # of a condition's message, as Kubernetes' own conditions have it

Phase = Literal["Pending", "Planning", "Loading", "Ready", "Degraded", "Replanning", "Failed", "Paused"]
Count = Annotated[int, Field(ge=0)]
Moment = Annotated[str, Field(max_length=64, json_schema_extra={"format": "date-time"})]


def shortened(text: Any, most: int) -> Any:
    """At most `most` characters of a text; what is left out is said by its end."""
    return f"{text[: most - 4]} ..." if isinstance(text, str) and len(text) > most else text


Text = Annotated[str, BeforeValidator(lambda text: shortened(text, MAX_TEXT)), Field(max_length=MAX_TEXT)]
Sentence = Annotated[str, BeforeValidator(lambda text: shortened(text, MAX_SENTENCE)), Field(max_length=MAX_SENTENCE)]


class StatusType(ApiType):
    """Strict about what it knows, silent about what it does not."""

    model_config = ConfigDict(extra="ignore")


class Condition(StatusType):
    """A standard condition: one of Inventoried, Planned, Rendered, StagesReady, Updated, Ready, Degraded, ReconcileError."""

    type: Annotated[str, Field(max_length=316)]
    status: Literal["True", "False", "Unknown"]
    reason: Annotated[str, Field(max_length=1024)]
    """One word in CamelCase."""
    message: Sentence
    """A sentence for people."""
    last_transition_time: Annotated[str, Field(max_length=64, json_schema_extra={"format": "date-time"})]
    observed_generation: Annotated[int, Field(ge=0)] = 0


class Performance(StatusType):
    """Figures of the planned workload."""

    tokens_per_second: Annotated[float, Field(ge=0)]
    ttft_ms: Annotated[float, Field(ge=0)] | None = None
    """Time to the first token, milliseconds."""
    tpot_ms: Annotated[float, Field(ge=0)] | None = None
    """Time per further token, milliseconds."""
    perplexity_increase: Annotated[float, Field(ge=0)] | None = None
    """Points of perplexity over 16 bits on the calibration's text, where the model was calibrated."""


class AlternativeStatus(StatusType):
    """A plan that was not chosen."""

    summary: Text
    objective: Text = ""
    """How good it is by the goal's number, in the unit of the plan's own."""
    predicted: Performance | None = None
    rejected_because: Text
    """What it is worse in, or by how much it does not fit."""


class PlanStatus(StatusType):
    """The plan in force; the whole of it is in the ConfigMap `<name>-epoch-<epoch>`."""

    epoch: Annotated[int, Field(ge=1)]
    inventory_hash: Text = ""
    """Of the cluster that the plan was made for: another one leads to a new plan."""
    bound_by: Text = ""
    """What keeps the plan from being faster."""
    objective: Text = ""
    """How good it is by the goal's number, with its unit: what plans are compared by."""
    search_ended: Text = ""
    """Why the search for it ended: proved, settled, workLimit, orderLimit, or timeLimit where the clock cut it. Empty for a repair."""
    predicted: Performance | None = None
    measured: Performance | None = None
    alternatives: Annotated[tuple[AlternativeStatus, ...], Field(max_length=3)] = ()
    """Other plans that were looked at."""


class StageStatus(StatusType):
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
    start_seconds: Annotated[float, Field(ge=0)] | None = None
    """From the birth of its slot's process until that listened, when it was started last, as it says itself."""
    load_seconds: Annotated[float, Field(ge=0)] | None = None
    """That this process took for all layers of the slot, when it loaded first. A restart is expected to take both."""
    ready: bool = False
    restarts: Annotated[int, Field(ge=0)] = 0
    progress: Annotated[int, Field(ge=0)] = 0
    """The furthest that its slot has come in the newest epoch: 1 for its first answer, 1 more for every layer it has loaded."""
    loaded: Annotated[int, Field(ge=0)] = 0
    """Tensors that it has stored and MiB that it has fetched on the way to the next layer, as far as they were counted."""
    progress_at: Moment | None = None
    """Since when it is that far."""


class ShadowStatus(StatusType):
    """What a slot keeps in host memory of layers that it would take over after the loss of another node."""

    slot: Text
    node: Text
    """Of the slot."""
    against: Text
    """The node whose loss it is kept for."""
    layers: Annotated[tuple[int, ...], Field(max_length=MAX_SHADOWED)]
    bits: Annotated[dict[str, int], Field(max_length=8)]
    """How many of these layers at how many bits."""
    planned_bytes: Annotated[int, Field(ge=0)]
    held: bool = False
    """Whether the slot says that it has read all that it keeps."""


class RepairStatus(StatusType):
    """How a loss was repaired, without any search: a better plan is looked for while this one serves."""

    kind: Text
    """How far it had to go: neighbours, reshuffle, spareDevices, fewerSequences or withoutReplica."""
    layers_moved: Annotated[int, Field(ge=0)]
    """Layers that changed their device."""
    bits_lowered: Annotated[int, Field(ge=0)]
    """Layers that have fewer bits than before."""
    loaded_bytes: Annotated[int, Field(ge=0)]
    shadowed_bytes: Annotated[int, Field(ge=0)] = 0
    """Of these, what the slots that load them had in host memory, as planned."""
    kept_share: Annotated[float, Field(ge=0)]
    """Of what the plan gave before the loss, as predicted, by the objective."""
    milliseconds: Annotated[float, Field(ge=0)]
    """That finding it took."""
    improvement: float | None = None
    """The share that the best plan found since would gain, less than `replanning.minGain`; absent while it is looked for or was taken."""


class ChoiceStatus(StatusType):
    """Of a slot whose process was gone: whether it was waited for, or the slots that were left took over. Seconds from then on, as predicted."""

    chosen: Text
    """restart or takeover."""
    restart_seconds: Annotated[float, Field(ge=0)]
    """Until the slot serves again: as it took before, or predicted from bytes."""
    takeover_seconds: Annotated[float, Field(ge=0)]
    """Until the repaired plan serves."""


class Replan(StatusType):
    """Why a new epoch was made and what it cost."""

    epoch: Annotated[int, Field(ge=1)]
    at: Annotated[str, Field(max_length=64, json_schema_extra={"format": "date-time"})]
    reason: Text
    """One word in CamelCase: NodeLost, NodeAdded, SpecChanged, ..."""
    node: Text | None = None
    seconds_to_plan: Annotated[float, Field(ge=0)] | None = None
    seconds_to_ready: Annotated[float, Field(ge=0)] | None = None
    noticed_at: Moment | None = None
    """When the operator first wanted this plan, to the millisecond, as the following."""
    planned_at: Moment | None = None
    prepared_at: Moment | None = None
    """When all its slots were seen to have loaded their parts."""
    committed_at: Moment | None = None
    """When all its slots were seen to have switched."""
    next_token_at: Moment | None = None
    """When the first of the requests that waited for it got its next token, by the clock of its gateway. This and the following are absent until nobody
    waits any more, and where a gateway did not live to tell."""
    pause_ms: Annotated[float, Field(ge=0)] | None = None
    """The longest that a client waited from one token to the next; 0: no answer had begun."""
    tokens_recomputed: Count | None = None
    """Of prompts and answers, through all layers."""
    tokens_refilled: Count | None = None
    """The same through the layers alone that were lost."""
    requests_held: Count | None = None
    """That no leader had for a while, those included that came meanwhile."""
    requests_lost: Count | None = None
    """Of them, those that ended in an error."""
    gain: float | None = None
    """Of a better plan: the share that it gains over the one before."""
    repair: RepairStatus | None = None
    """Absent where the plan was searched for."""
    choice: ChoiceStatus | None = None
    """Absent where there was none: no slot was lost alone, or no repair was known."""


class Exclusion(StatusType):
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


class Backoff(StatusType):
    """Plans that the operator made of itself since the deployment last served in peace, and when the next may be made."""

    attempts: Annotated[int, Field(ge=0)]
    last: Text
    """The newest attempt: an epoch, or a plan that was not found."""
    at: Moment
    retry_at: Moment
    """The next plan, unless the spec changes; after a node's loss within a minute."""


class SpeculationStatus(StatusType):
    """How good guesses are, as the gateway has counted them under the plan's wish."""

    mode: Text
    tokens: Annotated[int, Field(ge=1)]
    draft_bits: Annotated[int, Field(ge=1)] | None = None
    """Of weights that draft, where the mode names any."""
    draft_model: Text | None = None
    acceptance: Annotated[float, Field(ge=0, le=1)] | None = None
    """The chance that a guessed token is right if all before it are; absent until 300 were verified. Written anew when it has moved by 0.05."""


class LLMDeploymentStatus(StatusType):
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
    gateways_ready: Annotated[str, Field(max_length=32)] | None = None
    """Gateways that reach all leaders of the newest epoch, and those that are wanted, as in 2/2."""
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
    shadows: Annotated[tuple[ShadowStatus, ...], Field(max_length=MAX_STAGES)] = ()
    """By `replanning.takeover.shadow`, the largest first."""
    replans: Annotated[tuple[Replan, ...], Field(max_length=MAX_REPLANS)] = ()
    """The last twelve."""
    exclusions: Annotated[tuple[Exclusion, ...], Field(max_length=MAX_EXCLUSIONS)] = ()
    """Nodes that are planned without for a while. Any edit of the spec ends them."""
    backoff: Backoff | None = None
    """Absent while nothing is wrong."""
    speculation: SpeculationStatus | None = None
    """Absent where nothing is guessed."""


def read_status(status: Any) -> dict[str, Any]:
    """What of a stored status this release can read: the smallest part that another one has written otherwise is left out."""
    kept: dict[str, Any] = dict(status) if isinstance(status, dict) else {}
    while True:
        try:
            LLMDeploymentStatus.model_validate_json(json.dumps(kept), by_alias=True, by_name=False)
        except ValidationError as error:
            locations = [detail["loc"] for detail in error.errors(include_url=False)]
            kept = _without(kept, {(str(loc[0]), loc[1] if loc[1:] else None) for loc in locations})
        else:
            return kept


def stored_status(status: Any) -> LLMDeploymentStatus:
    """The same as a value."""
    return LLMDeploymentStatus.model_validate_json(json.dumps(read_status(status)), by_alias=True, by_name=False)


def _without(status: dict[str, Any], places: set[tuple[str, int | str | None]]) -> dict[str, Any]:
    """Less some fields, or some members of lists that are fields. A problem in a field that is no list takes the field."""
    kept = {}
    for field, value in status.items():
        members = {member for name, member in places if name == field}
        if isinstance(value, list) and members and all(isinstance(member, int) for member in members):
            kept[field] = [each for index, each in enumerate(value) if index not in members]
        elif not members:
            kept[field] = value
    return kept
