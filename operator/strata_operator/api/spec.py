"""What a user asks for: the spec of an LLMDeployment. The CRD's schema and its descriptions are generated from here.

Every field is consumed by planning, rendering or reconciling; what is not supported is refused by a rule with a sentence.
The same noun means the same thing in the planner (workload, precision) and in the rendered objects (gateway, slot).
"""

import re
from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from strata_operator.api.base import ApiType, LabelMap, Name, Rule
from strata_operator.api.pod import PodOverlay, ResourceAmounts, Toleration
from strata_operator.api.status import LLMDeploymentStatus
from strata_planner.contract.control import STEP_TIMEOUT_SECONDS
from strata_planner.contract.origins import LONGEST_ORIGIN, MOST_ORIGINS, ORIGIN_PATTERN, ORIGIN_RULE

GROUP = "strata.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "LLMDeployment"
PLURAL = "llmdeployments"

Bits = Literal[3, 4, 5, 6, 7, 8, 16]
ComputeTypeName = Literal["bfloat16", "float16", "float32"]

# No regular expression features beyond RE2: the same text is the API server's rule.
URI_PATTERN = (
    r"^(hf://[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*(@[A-Za-z0-9][A-Za-z0-9._/-]*)?"
    r"|pvc://[a-z0-9]([-a-z0-9.]*[a-z0-9])?(/[A-Za-z0-9._-]+)*/?"
    r"|file:///.+)$"
)
UNSUPPORTED_URI_PATTERN = "^(s3|oci)://"


class SecretKeyRef(ApiType):
    name: Name
    """A Secret in the namespace of the deployment."""
    key: Annotated[str, Field(min_length=1, max_length=253, pattern=r"^[-._a-zA-Z0-9]+$")]
    """The key in it."""


class ApiKeysSecretRef(ApiType):
    name: Name
    """A Secret in the namespace of the deployment."""
    key: Annotated[str, Field(min_length=1, max_length=253, pattern=r"^[-._a-zA-Z0-9]+$")] = "keys"
    """The key in it whose value lists API keys, one per line."""


class ModelCache(ApiType):
    persistent_volume_claim: Name
    """An existing claim, writable by the pods of all nodes used: a new plan does not download again."""


_URI_RULES = (
    Rule(
        cel=f"!self.uri.matches('{UNSUPPORTED_URI_PATTERN}')",
        message="s3:// and oci:// are not supported yet; copy the model into a volume and use pvc://claim/path",
        holds=lambda place: not re.match(UNSUPPORTED_URI_PATTERN, place.uri),
        path="uri",
    ),
    Rule(
        cel=f"self.uri.matches('{URI_PATTERN}') || self.uri.matches('{UNSUPPORTED_URI_PATTERN}')",
        message="must be hf://owner/name[@revision], pvc://claim/path or file:///path; write the model's place so",
        holds=lambda place: (
            re.match(URI_PATTERN, place.uri) is not None or re.match(UNSUPPORTED_URI_PATTERN, place.uri) is not None
        ),
        path="uri",
    ),
    Rule(
        cel="!self.uri.matches('(^|/)[.][.](/|$)')",
        message="must not step upwards with '..'; write the path in full",
        holds=lambda place: not re.search(r"(^|/)[.][.](/|$)", place.uri),
        path="uri",
    ),
)


class ModelSpec(ApiType):
    uri: Annotated[str, Field(min_length=1, max_length=1024)]
    """`hf://owner/name[@revision]`, `pvc://claim/path`, or `file:///path` (in a volume of `runtime.pod.volumes`)."""
    token_secret_ref: SecretKeyRef | None = None
    """A token for gated models of the Hugging Face Hub."""
    cache: ModelCache | None = None
    """Where downloads of `hf://` models are kept; without it each pod downloads into its own scratch space."""
    max_model_len: Annotated[int, Field(ge=1, le=10_000_000)] | None = None
    """Most tokens of one request, prompt and answer together; by default the model's own limit."""

    rules: ClassVar[tuple[Rule, ...]] = (
        *_URI_RULES,
        Rule(
            cel="!has(self.tokenSecretRef) || self.uri.startsWith('hf://')",
            message="only hf:// models use a token; remove it or use an hf:// uri",
            holds=lambda model: model.token_secret_ref is None or model.uri.startswith("hf://"),
            path="tokenSecretRef",
        ),
        Rule(
            cel="!has(self.cache) || self.uri.startsWith('hf://')",
            message="only hf:// models are downloaded; remove the cache or use an hf:// uri",
            holds=lambda model: model.cache is None or model.uri.startswith("hf://"),
            path="cache",
        ),
    )


class WorkloadSpec(ApiType):
    """What to plan for."""

    prompt_tokens: Annotated[int, Field(ge=1, le=10_000_000)] = 512
    """Tokens of a typical prompt."""
    output_tokens: Annotated[int, Field(ge=1, le=10_000_000)] = 128
    """Tokens of a typical answer."""
    concurrency: Annotated[int, Field(ge=1, le=65_536)] = 32
    """Sequences in flight at once, at most (the global batch of LLM-PQ)."""
    prompt_tokens_deviation: Annotated[float, Field(ge=0, le=1e7)] = 0
    """Standard deviation of the tokens of prompts: where they differ, more KV is kept free and short ones wait for long ones."""
    output_tokens_deviation: Annotated[float, Field(ge=0, le=1e7)] = 0
    """Standard deviation of the tokens of answers: where they differ, long ones are in flight longer, and more KV is needed."""
    requests_per_second: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """How often requests arrive; needed by the goal `slo`."""


class SloSpec(ApiType):
    """What a request may take."""

    ttft_ms: Annotated[float, Field(gt=0, le=1e9)]
    """Longest time to the first token, milliseconds."""
    tpot_ms: Annotated[float, Field(gt=0, le=1e9)]
    """Longest time per further token, milliseconds."""


class ObjectiveSpec(ApiType):
    goal: Literal["throughput", "latency", "slo", "cost"] = "throughput"
    """What the plan makes best, against quality: `throughput` the time of the whole workload; with the solver `layout` also
    `latency` its slowest request, `slo` the requests per second within `slo`, `cost` the money per token."""
    slo: SloSpec | None = None
    """Needed by the goal `slo`, and only there."""
    quality_weight: Annotated[float, Field(ge=0, le=1e12)] = 1.0
    """The weight of quality against speed (theta of LLM-PQ): 0 is speed alone, more keeps more bits."""
    max_perplexity_increase: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """Most points of perplexity that lower precision may cost, on the text of the model's calibration; without it only the
    weight counts. Needs the file that `strata sensitivity` leaves beside the model."""


class PrecisionSpec(ApiType):
    allowed: Annotated[
        tuple[Bits, ...], Field(min_length=1, max_length=7, json_schema_extra={"x-kubernetes-list-type": "set"})
    ] = (
        3,
        4,
        8,
        16,
    )
    """Bits that the weights of a layer may have; the plan chooses per layer. 5 to 7 need the method anyPrecision."""
    method: Literal["auto", "roundToNearest", "anyPrecision", "float8"] = "auto"
    """How weights become fewer bits. anyPrecision: every width is cut from one copy that `strata quantize` made (without one, while
    loading, which takes long). float8: e4m3 with a scale per output, at 8 bits. auto: anyPrecision where the model's folder has that copy or tokens are
    drafted by selfPrecision, else roundToNearest."""
    activation_bits: Annotated[
        tuple[Literal[8, 16], ...],
        Field(min_length=1, max_length=2, json_schema_extra={"x-kubernetes-list-type": "set"}),
    ] = (16,)
    """8 beside 16 lets products with 8-bit weights (4-bit ones of anyPrecision) round activations too, on devices that are faster by it."""
    head_bits: Literal[16, 8] | None = None
    """Bits of the table that makes logits (the head). Left out: 8 where `allowed` has no 16 and all devices are processors, else 16."""
    kv_cache_bits: Literal[16, 8] = 16
    """Bits of the KV cache's entries. 8: integers with a scale per token and head, in about half the memory; 16: the compute type."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="",  # the list is a set: the API server refuses repetitions by itself
            message="lists a width twice; name each width once",
            holds=lambda precision: len(set(precision.allowed)) == len(precision.allowed),
            path="allowed",
        ),
    )


class PlacementSpec(ApiType):
    node_selector: LabelMap = Field(default_factory=dict)
    """Labels that a node must have to be used."""
    tolerations: Annotated[tuple[Toleration, ...], Field(max_length=32)] = ()
    """Taints that the pods of the deployment tolerate, as in a pod."""
    exclude: Annotated[tuple[Name, ...], Field(max_length=256)] = ()
    """Names of nodes that must not be used."""
    min_stages: Annotated[int, Field(ge=1, le=64)] = 1
    """Fewest stages of the pipeline; more than 1 forces a split."""
    max_stages: Annotated[int, Field(ge=1, le=64)] = 64
    """Most stages of a pipeline."""
    max_replicas: Annotated[int, Field(ge=1, le=64)] = 64
    """Most pipelines that serve side by side. Without it the plan takes all devices that add to its objective."""
    tensor_parallel: (
        Annotated[
            tuple[Annotated[int, Field(ge=1, le=64)], ...],
            Field(min_length=1, max_length=8, json_schema_extra={"x-kubernetes-list-type": "set"}),
        ]
        | None
    ) = None
    """How many devices of a node may share a stage; more than 1 needs the solver `auto` or `layout`. Without it these take as many as are best for
    the goal, where all devices are processors and the model can be cut; 1 elsewhere."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            # The API server checks the default of the object, {}, before it fills in the fields' defaults.
            cel="!has(self.minStages) || !has(self.maxStages) || self.minStages <= self.maxStages",
            message="minStages is more than maxStages; lower it or raise maxStages",
            holds=lambda placement: placement.min_stages <= placement.max_stages,
            path="minStages",
        ),
        Rule(
            cel="",  # the list is a set: the API server refuses repetitions by itself
            message="lists a degree twice; name each degree once",
            holds=lambda placement: len(set(placement.tensor_parallel or ())) == len(placement.tensor_parallel or ()),
            path="tensorParallel",
        ),
    )


class PlanningOverrides(ApiType):
    """Estimates that a user may correct."""

    memory_margin_bytes: Annotated[int, Field(ge=0, le=2**50)] | None = None
    """Bytes that the plan leaves free on each device, beside what the framework takes."""
    usable_memory_fraction: Annotated[float, Field(gt=0, le=1)] | None = None
    """Share of each device's memory that a plan may use."""
    link_gbps: Annotated[float, Field(gt=0, le=100_000)] | None = None
    """Bandwidth between any two nodes, in gigabits per second."""


class PlanningSpec(ApiType):
    solver: Literal["auto", "pipeline", "exact", "transfer", "layout"] = "auto"
    """`auto`: the best plan by the objective's goal, whatever its shape. The others restrict: `layout` to what HexGen's search over
    replicas and tensor-parallel groups finds; `pipeline` to one pipeline of single devices, the best one by LLM-PQ's objective and proven;
    `exact` proves the same by LLM-PQ's ILP, slower; `transfer` is LLM-PQ's heuristic."""
    time_limit_seconds: Annotated[int, Field(ge=1, le=3600)] = 30
    """Longest time to look for a better plan; the best one found until then is used."""
    chunk_tokens: Annotated[int, Field(ge=1, le=65_536)] | None = None
    """Tokens of prompts in one step beside a full micro-batch, at most; by default what the planner finds best. Fewer keep answers that are under way steadier, more
    bring first tokens sooner."""
    overrides: PlanningOverrides = PlanningOverrides()


MemoryQuantity = Annotated[str, Field(max_length=32, pattern=r"^[1-9][0-9]*([kMGTPE]|[KMGTPE]i)$")]


class ShadowSpec(ApiType):
    """Layers of other nodes that slots keep in host memory, those that they would take over: a takeover then reads memory, not a disk. Which,
    the planner finds.
    """

    max_memory: MemoryQuantity
    """Host memory of each slot that they may take, as 16Gi. Pods of GPU slots ask for it beside the rest, unless `runtime.pod.resources` says how much memory
    they ask for; a slot on a processor keeps them in what the plan leaves of its memory."""


class StandingOrdersSpec(ApiType):
    """Repairs that gateways and slots carry out by themselves while no operator is there: the plan carries one for the loss of each slot, and of each node."""

    silence_seconds: Annotated[int, Field(ge=10, le=3600)] = 20
    """How long each slot that takes part, and the gateway, must have heard no operator. Operators speak with everybody each 4 s; another one takes the
    place of one that dies within some 20. A slot that is away after that is waited for `gracePeriodSeconds`."""


class TakeoverSpec(ApiType):
    """What the plan that a loss is repaired by may cost in quality, while it serves: neighbours make room for lost layers by fewer bits."""

    min_bits: Literal[3, 4, 5, 6, 7, 8, 16] = 3
    """No layer is lowered below so many bits, whatever `precision.allowed` has."""
    max_perplexity_increase: Annotated[float, Field(gt=0, le=1000)] | None = None
    """Points of perplexity over 16 bits, at most; by default those of the objective. Needs the model's calibration (`strata sensitivity`)."""
    exact: bool = False
    """Lower no bits at all: answers go on as they would have. Where that leaves no room, fewer requests run at once, or a new plan is made."""
    shadow: ShadowSpec | None = None
    """By default none are kept: they take memory that nothing else uses, and where a node has the model's files in its page cache they bring little."""
    standing_orders: StandingOrdersSpec | None = None
    """By default a loss waits for the operator: with orders gateways may speak with slots, if only to have them do what the operator has written."""

    @property
    def wants_orders(self) -> bool:
        """Whether plans have standing orders."""
        return self.standing_orders is not None

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="!has(self.exact) || !self.exact || !has(self.maxPerplexityIncrease)",
            message="an exact takeover lowers no bits; remove maxPerplexityIncrease or set exact to false",
            holds=lambda wish: not wish.exact or wish.max_perplexity_increase is None,
            path="maxPerplexityIncrease",
        ),
    )


class ReplanningSpec(ApiType):
    grace_period_seconds: Annotated[int, Field(ge=0, le=3600)] = 5
    """How long a node may be not Ready before a new plan is made without it, and a slot that others still reach, or whose host answers, silent before it
    is ended. A node that neither those who worked with it nor the operator reach is planned without at once."""
    max_simultaneous_node_loss: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Share of the cluster's nodes. While more of them, and at least two, are not Ready, or silent, at once, that is a false alarm: nothing
    is moved away from them. 1 turns this off."""
    min_gain: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Where the cluster offers more than the plan was made for, a better plan is taken only if it gains this share."""
    max_per_hour: Annotated[int, Field(ge=0, le=12)] = 12
    """While so many plans were made within an hour, whatever for, no better one is looked for: what is lost, is to leave or does not come to serve is
    planned without all the same, and what you change is planned. 0: better plans are never taken."""
    prepare_timeout_seconds: Annotated[int, Field(ge=10, le=86_400)] = 1800
    """How long a slot may make no progress in loading its part of a new plan, the download of the model included, before it is
    planned without."""
    takeover: TakeoverSpec = TakeoverSpec()
    """Of the repair that is taken at once after a loss; a better plan is looked for while it serves, and taken if it gains `minGain`."""


class DraftModelSpec(ApiType):
    """A small model or a head that drafts, beside the leader's own layers."""

    uri: Annotated[str, Field(min_length=1, max_length=1024)]
    """A model of the same tokenizer, or a head made for this model, named as `model.uri` is. The hub's token and cache are those of `model`."""

    rules: ClassVar[tuple[Rule, ...]] = _URI_RULES


class SpeculationSpec(ApiType):
    """Tokens that are guessed and verified in one step. No text changes by it, at any temperature."""

    mode: Literal["none", "auto", "ngram", "suffix", "selfPrecision", "draft", "eagle"] = "none"
    """`ngram` guesses from the request's own prompt and answer, `suffix` from recent answers too; `selfPrecision` drafts with the model's own weights
    at fewer bits, for which layers need 16 bits or any-precision formats of more; `draft` with a small model; `eagle` with an EAGLE-3
    head of this model; `auto` is `suffix`, or drafts with the small model or the head if one is given, else with planes that layers hold anyway, as far
    as it makes more tokens a second."""
    tokens: Annotated[int, Field(ge=1, le=15)] = 4
    """Tokens of one guess, at most."""
    draft_bits: Literal[3, 4] = 4
    """Bits of the weights that draft."""
    draft_model: DraftModelSpec | None = None
    """The small model of the mode `draft`, the head of `eagle`; either for `auto`."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            # The API server checks the default of the object, {}, before it fills in the fields' defaults.
            cel="!has(self.mode) || !(self.mode in ['draft', 'eagle']) || has(self.draftModel)",
            message="the mode draft needs a small model of the same tokenizer, eagle a head of this model; give draftModel.uri",
            holds=lambda wish: wish.mode not in {"draft", "eagle"} or wish.draft_model is not None,
            path="draftModel",
        ),
        Rule(
            cel="!has(self.draftModel) || (has(self.mode) && self.mode in ['draft', 'eagle', 'auto'])",
            message="only the modes draft, eagle and auto use a draft model; remove it or choose one of these",
            holds=lambda wish: wish.draft_model is None or wish.mode in {"draft", "eagle", "auto"},
            path="draftModel",
        ),
    )


class BoundaryLogSpec(ApiType):
    """Each stage but the last keeps what it hands on in host memory, 2 bytes x hidden size for each token of its KV cache at 16 bits: when a slot is lost, its
    neighbours compute its layers again from there, and nobody the layers before.
    """

    max_memory: MemoryQuantity
    """Of each stage, as 4Gi. What there is no room for is computed again through all layers. Pods of GPU slots ask for it beside the rest, unless
    `runtime.pod.resources` says how much memory they ask for; on a processor it is part of what the plan counts."""


class RuntimeSpec(ApiType):
    image: Annotated[str, Field(min_length=1, max_length=512, pattern=r"^\S+$")] | None = None
    """Image of slots and gateway; by default that of the operator's release when the deployment was first planned."""
    compute_type: ComputeTypeName | None = None
    """Type of activations and unquantized weights; by default what the planner finds best for the model and devices."""
    prefix_caching: bool = True
    """What requests have in common at their beginning is computed once: its keys and values stay in the KV cache until their room is needed."""
    boundary_log: BoundaryLogSpec | None = None
    """Absent: what stages hand on is not kept, and layers before lost ones compute again, too."""
    speculation: SpeculationSpec = SpeculationSpec()
    step_timeout_seconds: Annotated[int, Field(ge=0, le=86_400)] = STEP_TIMEOUT_SECONDS
    """A step that has not got on for so long at a stage, and for five times what it takes by the plan and ever took there, counts as hung: its slot is ended and
    started anew. 0: none ever does."""
    pod: PodOverlay = PodOverlay()


MOST_GATEWAYS = 8  # each keeps the answers of all others


class GatewayService(ApiType):
    type: Literal["ClusterIP", "NodePort", "LoadBalancer"] = "ClusterIP"
    """Type of the Service that clients reach the OpenAI API through."""


class GatewaySpec(ApiType):
    replicas: Annotated[int, Field(ge=1, le=MOST_GATEWAYS)] = 2
    """Gateways in front of the same leaders. With two or more the death of one breaks no more than its connections: docs/openai-api.md says how a
    client goes on."""
    api_keys_secret_ref: ApiKeysSecretRef | None = None
    """Clients must present one of these keys; without it the API is open to whoever reaches the Service."""
    allowed_origins: Annotated[
        tuple[Annotated[str, Field(max_length=LONGEST_ORIGIN)], ...], Field(max_length=MOST_ORIGINS)
    ] = ()
    """Origins whose web pages may use the API from a browser, such as `https://chat.example.org`, or `*` for all; none by
    default."""
    docs: bool = False
    """Serve the interface's description at /openapi.json, and /docs, a page that shows it (a browser loads its scripts from a
    public site)."""
    service: GatewayService = GatewayService()
    resources: ResourceAmounts = ResourceAmounts(requests={"cpu": "250m", "memory": "512Mi"}, limits={"memory": "2Gi"})
    """Resources of the gateway's container. Without a request of processors whatever starts beside it starves it, and streams wait for seconds."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel=f"!has(self.allowedOrigins) || self.allowedOrigins.all(origin, origin.matches(r'{ORIGIN_PATTERN}'))",
            message=f"has what is no origin of a web page; {ORIGIN_RULE}",
            holds=lambda gateway: all(re.fullmatch(ORIGIN_PATTERN, origin) for origin in gateway.allowed_origins),
            path="allowedOrigins",
        ),
    )


class LLMDeploymentSpec(ApiType):
    """A large language model, served by a pipeline over whatever devices the cluster has."""

    model: ModelSpec
    """The model to serve."""
    workload: WorkloadSpec = WorkloadSpec()
    objective: ObjectiveSpec = ObjectiveSpec()
    precision: PrecisionSpec = PrecisionSpec()
    placement: PlacementSpec = PlacementSpec()
    planning: PlanningSpec = PlanningSpec()
    replanning: ReplanningSpec = ReplanningSpec()
    paused: bool = False
    """The operator leaves a paused deployment as it is: nothing is planned, changed or removed."""
    runtime: RuntimeSpec = RuntimeSpec()
    gateway: GatewaySpec = GatewaySpec()

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="!has(self.model.maxModelLen) || "
            "self.workload.promptTokens + self.workload.outputTokens <= self.model.maxModelLen",
            message="promptTokens + outputTokens is more than model.maxModelLen; lower them or raise maxModelLen",
            holds=lambda spec: (
                spec.model.max_model_len is None
                or spec.workload.prompt_tokens + spec.workload.output_tokens <= spec.model.max_model_len
            ),
            path="workload",
        ),
        Rule(
            cel="self.planning.solver in ['auto', 'layout'] || (self.objective.goal == 'throughput' && "
            "(!has(self.placement.tensorParallel) || self.placement.tensorParallel == [1]))",
            message="goals other than throughput and tensorParallel above 1 need planning.solver: auto or layout",
            holds=lambda spec: (
                spec.planning.solver in {"auto", "layout"}
                or (spec.objective.goal == "throughput" and spec.placement.tensor_parallel in {None, (1,)})
            ),
            path="planning.solver",
        ),
        Rule(
            cel="(self.objective.goal == 'slo') == has(self.objective.slo) && "
            "(self.objective.goal != 'slo' || has(self.workload.requestsPerSecond))",
            message="the goal slo needs objective.slo and workload.requestsPerSecond, other goals take no objective.slo",
            holds=lambda spec: (
                (spec.objective.goal == "slo") == (spec.objective.slo is not None)
                and (spec.objective.goal != "slo" or spec.workload.requests_per_second is not None)
            ),
            path="objective",
        ),
    )


NAME_PATTERN = "^[a-z]([-a-z0-9]*[a-z0-9])?$"


class ObjectMeta(BaseModel):
    """What is read of a Kubernetes object's metadata; the API server owns the rest, which is left unread."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore", use_attribute_docstrings=True)

    name: Annotated[str, Field(min_length=1, max_length=40, pattern=NAME_PATTERN)]
    """At most 40 of a-z, 0-9 and '-', a letter first: names of Services and pods are made from it."""
    namespace: Annotated[str, Field(min_length=1, max_length=63)] = "default"
    uid: str = ""
    generation: int = 0
    resource_version: str = Field(default="", alias="resourceVersion")
    annotations: dict[str, str] = {}
    labels: dict[str, str] = {}


class LLMDeployment(ApiType):
    """One object in, a running OpenAI-compatible service out."""

    api_version: Literal["strata.dev/v1alpha1"]
    kind: Literal["LLMDeployment"]
    metadata: ObjectMeta
    spec: LLMDeploymentSpec
    status: LLMDeploymentStatus = LLMDeploymentStatus()

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel=f"self.metadata.name.size() <= 40 && self.metadata.name.matches('{NAME_PATTERN}')",
            message="metadata.name must be at most 40 of a-z, 0-9 and '-', a letter first: Services are named after it",
        ),
    )

    @property
    def name(self) -> str:
        return self.metadata.name

    @property
    def namespace(self) -> str:
        return self.metadata.namespace
