"""From an LLMDeployment and a Cluster to the planner's question. Shared by the command line and the operator.

Pure: reads no file and asks no API; whoever calls it has read the model's config.json.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from strata_operator.api import LLMDeployment
from strata_operator.decide.standing_orders import OrderTerms
from strata_operator.render.requests import parse_quantity
from strata_planner.contract.architectures import UnsupportedModelError
from strata_planner.contract.calibration import Calibration
from strata_planner.contract.divided import DIVIDED_FORMATS, check_divided, check_groups
from strata_planner.contract.draft_head import DraftHead, is_draft_head
from strata_planner.contract.formats import ComputeType, FormatName, Method
from strata_planner.contract.plan import Plan, Speculation
from strata_planner.contract.quantization import CONFIG_FIELD
from strata_planner.errors import ClusterError, WorkloadError
from strata_planner.question.catalogue import CPU
from strata_planner.question.cluster import CPU_USABLE_FRACTION, CUDA_USABLE_FRACTION, Cluster, Device
from strata_planner.question.draft_head import head_model
from strata_planner.question.model import Model
from strata_planner.question.request import MOST_PADDED_ROWS, ONE_PIPELINE, Objective, PlanRequest
from strata_planner.question.workload import Workload
from strata_planner.replan.repair import Takeover
from strata_planner.replan.shadows import with_shadows
from strata_planner.replan.standing_orders import with_orders
from strata_planner.search.planning import PlanOutcome
from strata_planner.sensitivity import Sensitivity, check_shapes, penalty_bound, prior


@dataclass(frozen=True, slots=True)
class BesideModel:
    """`calibration`: of `strata sensitivity`; without it the prior stands in. `copied_bits`: widths of the any-precision
    copy that `strata quantize` made, all layers of it, which slots will find: what `precision.method: auto` asks for. `activations`: their ranges were calibrated, which `w8a8_static` needs.
    """

    calibration: Calibration | None = None
    copied_bits: tuple[int, ...] = ()
    activations: bool = False


NOTHING_BESIDE = BesideModel()
BFLOAT16_SINCE = (8, 0)  # CUDA compute capability


def request_for(
    deployment: LLMDeployment,
    cluster: Cluster,
    config: dict[str, Any],
    model_uri: str | None = None,
    *,
    for_serving: bool = True,
    beside: BesideModel = NOTHING_BESIDE,
) -> PlanRequest:
    """What `spec` asks of the planner on this cluster. `model_uri`: where the slots find the model, if not as in `spec`.

    `for_serving` False: only shapes are studied, of a model that the runtime may not be able to run. `beside`: what
    earlier commands left beside the model's weights.
    Raises the planner's InputError and UnsupportedModelError.
    """
    spec = deployment.spec
    model = Model.from_config(config, for_serving=for_serving)
    workload = Workload(
        prompt_tokens=spec.workload.prompt_tokens,
        output_tokens=spec.workload.output_tokens,
        concurrency=spec.workload.concurrency,
        output_deviation=spec.workload.output_tokens_deviation,
        prompt_deviation=spec.workload.prompt_tokens_deviation,
    )
    devices = corrected(deployment, cluster)
    method = _method(deployment, model, prequantized=bool(beside.copied_bits))
    model = msgspec.structs.replace(model, head_format=_head_format(deployment, model, devices))
    sensitivity = _sensitivity(beside.calibration, model)
    most, guess = spec.objective.max_perplexity_increase, spec.runtime.speculation
    request = PlanRequest(
        deployment=deployment.name,
        model_uri=model_uri or spec.model.uri,
        model=model,
        cluster=devices,
        workload=workload,
        max_model_len=spec.model.max_model_len or model.max_positions or workload.sequence_tokens,
        allowed_bits=_allowed(deployment, method, beside.copied_bits),
        kv_bits=spec.precision.kv_cache_bits,
        method=method,
        activation_bits=tuple(spec.precision.activation_bits),
        static_activations=beside.activations,
        theta=spec.objective.quality_weight,
        min_stages=spec.placement.min_stages,
        max_stages=spec.placement.max_stages,
        max_replicas=spec.placement.max_replicas,
        compute_type=spec.runtime.compute_type or compute_type_for(devices),
        time_limit_seconds=spec.planning.time_limit_seconds,
        sensitivity=sensitivity,
        penalty_bound=None if most is None else penalty_bound(sensitivity or prior(model, ()), most),
        solver=spec.planning.solver,
        chunk_tokens=spec.planning.chunk_tokens,
        prefix_caching=spec.runtime.prefix_caching,
        boundary_log_bytes=_boundary_log_bytes(deployment),
        speculation=Speculation(guess.mode, guess.tokens, guess.draft_bits),
        objective=_objective(deployment),
        tensor_parallel=_wished_degrees(deployment),
    )
    if not for_serving:
        return request
    if spec.placement.tensor_parallel is None:
        return replace(request, tensor_parallel=_helpful_degrees(request, config))
    _check_degrees(deployment, config, devices, method)
    return request


def with_draft_model(request: PlanRequest, config: dict[str, Any], uri: str) -> PlanRequest:
    """With the small model or the head that drafts: its config.json, and where slots find it.

    Raises the planner's InputError and UnsupportedModelError.
    """
    mode = request.speculation.mode
    is_head = mode == "eagle" or (mode == "auto" and is_draft_head(config))
    try:
        small, fused = _head_for(request.model, config) if is_head else (_small_model(config), ())
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"draft model {uri}: {error}") from error
    wish = msgspec.structs.replace(request.speculation, draft_uri=uri, fused=fused)
    # It reads what ranks have parts of.
    degrees = (1,) if is_head and 1 in request.tensor_parallel else request.tensor_parallel
    return replace(request, draft_model=small, speculation=wish, tensor_parallel=degrees)


def _small_model(config: dict[str, Any]) -> Model:
    if is_draft_head(config):
        raise UnsupportedModelError("that is a head of EAGLE-3: take the mode eagle or auto, or a small model")
    return Model.from_config(config)


def _head_for(model: Model, config: dict[str, Any]) -> tuple[Model, tuple[int, ...]]:
    """With the layers whose outputs it reads."""
    head = DraftHead.from_config(config)
    head.check_target(model.hidden_size, model.num_layers)
    if abs(head.vocab_size - model.vocab_size) > MOST_PADDED_ROWS:
        raise UnsupportedModelError(
            f"it has {head.vocab_size} tokens, the model that it drafts for {model.vocab_size}: a head belongs to one model; take that model's"
        )
    return head_model(head), head.read_layers(model.num_layers)


def _method(deployment: LLMDeployment, model: Model, *, prequantized: bool) -> Method:
    asked, drafts = deployment.spec.precision.method, deployment.spec.runtime.speculation.mode == "selfPrecision"
    if asked != "auto":
        return asked
    divided = _wished_degrees(deployment) != (1,) and not model.has_experts  # which have no any-precision form
    return "anyPrecision" if prequantized or drafts or divided else "roundToNearest"


def _head_format(deployment: LLMDeployment, model: Model, cluster: Cluster) -> FormatName:
    """8 bits cost a head next to nothing in quality, and a small model of few bits reads its head for a third of its time."""
    precision = deployment.spec.precision
    on_cpu = all(device.type == CPU for node in cluster.nodes for device in node.devices)
    rounded = precision.head_bits == 8 if precision.head_bits else on_cpu and 16 not in precision.allowed
    return "int8" if rounded and not model.quantization else "dense"


def _allowed(deployment: LLMDeployment, method: Method, copied_bits: tuple[int, ...]) -> tuple[int, ...]:
    """Of any precision only widths that the copy has. Raises WorkloadError where none is left."""
    allowed = tuple(deployment.spec.precision.allowed)
    if method != "anyPrecision" or not copied_bits:
        return allowed
    left = tuple(bits for bits in allowed if bits in (*copied_bits, 16))
    if not left:
        raise WorkloadError(
            f"precision.allowed {list(allowed)}: the model's any-precision copy has {copied_bits[0]} to {copied_bits[-1]} bits; allow some of "
            f"these, or run `strata quantize --bits {max(allowed)}` again"
        )
    return left


def _objective(deployment: LLMDeployment) -> Objective:
    spec = deployment.spec
    slo, load = spec.objective.slo, spec.workload
    deadline = None if slo is None else (slo.ttft_ms + slo.tpot_ms * (load.output_tokens - 1)) / 1e3
    return Objective(spec.objective.goal, deadline, load.requests_per_second)


def _wished_degrees(deployment: LLMDeployment) -> tuple[int, ...]:
    return tuple(sorted(deployment.spec.placement.tensor_parallel or (1,)))


MOST_HELPFUL = 8  # processors of a stage: more are planned where they are asked for


def _helpful_degrees(request: PlanRequest, config: dict[str, Any]) -> tuple[int, ...]:
    """Of a deployment that names none: all that the processors here make, for a model and formats that the runtime can run so. The search
    takes groups where they are better by the request's own metric. GPUs form groups where they are asked to: no machine of ours has had several.
    """
    formats = {name for names in request.formats.values() for name in names}
    if request.solver in ONE_PIPELINE or _gpus(request.cluster) or not formats <= set(DIVIDED_FORMATS):
        return (1,)
    try:
        _check_shared(config, request.method, request.allowed_bits)
    except UnsupportedModelError:
        return (1,)
    counts = {sum(device.count for device in node.devices) for node in request.cluster.nodes}
    some = {1, 2, 4, 8} | counts
    return tuple(sorted(degree for degree in some if degree <= min(max(counts), MOST_HELPFUL)))


def _gpus(cluster: Cluster) -> list[str]:
    return sorted({device.type for node in cluster.nodes for device in node.devices} - {CPU})


def _check_shared(config: dict[str, Any], method: Method, allowed: Sequence[int]) -> None:
    """Raises UnsupportedModelError for a model, or for weights of few bits, that several devices cannot share."""
    check_divided(config)
    rounded = sorted({3, 4}.intersection(allowed))
    if method == "roundToNearest" and rounded and not config.get(CONFIG_FIELD):
        check_groups(config, rounded[0])


def _check_degrees(deployment: LLMDeployment, config: dict[str, Any], cluster: Cluster, method: Method) -> None:
    """Raises WorkloadError for stages of several devices that the runtime cannot run, UnsupportedModelError for a model that they cannot share."""
    degrees = _wished_degrees(deployment)
    if degrees == (1,):
        return
    for node in cluster.nodes:
        types = sorted({device.type for device in node.devices})
        if len(types) > 1 and _gpus(cluster):
            raise WorkloadError(
                f"placement.tensorParallel {list(degrees)}: node {node.name} has {' and '.join(types)}, and devices of a stage are of one type; exclude the "
                "node, use [1], or study the plan with `strata plan --shapes-only`"
            )
    _check_shared(config, method, deployment.spec.precision.allowed)


def _sensitivity(calibration: Calibration | None, model: Model) -> Sensitivity | None:
    if calibration is None:
        return None
    check_shapes(calibration, model)
    return Sensitivity.from_statistics(calibration)


def takeover_of(deployment: LLMDeployment) -> Takeover:
    """What `spec.replanning.takeover` lets a repair cost."""
    wish = deployment.spec.replanning.takeover
    return Takeover(wish.min_bits, wish.max_perplexity_increase, wish.exact)


def shadow_bytes_of(deployment: LLMDeployment) -> int:
    """Host memory that each slot may keep shadows in; 0: none are wanted."""
    wish = deployment.spec.replanning.takeover.shadow
    return 0 if wish is None else int(parse_quantity(wish.max_memory))


def _boundary_log_bytes(deployment: LLMDeployment) -> int:
    wish = deployment.spec.runtime.boundary_log
    return 0 if wish is None else int(parse_quantity(wish.max_memory))


def order_terms_of(deployment: LLMDeployment) -> OrderTerms | None:
    """When they are carried out; None where there are to be none."""
    replanning = deployment.spec.replanning
    wish = replanning.takeover.standing_orders
    return None if wish is None else OrderTerms(wish.silence_seconds, replanning.grace_period_seconds)


@dataclass(frozen=True, slots=True)
class Readied:
    """`notes`: against which losses there is less than was asked for."""

    plan: Plan
    notes: tuple[str, ...] = ()


def readied(deployment: LLMDeployment, request: PlanRequest, plan: Plan) -> Readied:
    """The plan with what is kept ready for losses, as `spec.replanning.takeover` wants it: what slots keep of others, and standing orders."""
    wishes = takeover_of(deployment)
    shadowed = with_shadows(request, plan, wishes, shadow_bytes_of(deployment))
    ordered = with_orders(request, shadowed.plan, wishes, wanted=deployment.spec.replanning.takeover.wants_orders)
    return Readied(ordered.plan, tuple(note for note in (shadowed.note, ordered.note) if note))


def readied_outcome(deployment: LLMDeployment, request: PlanRequest, outcome: PlanOutcome) -> PlanOutcome:
    """The same of a plan with what is said about it."""
    found = readied(deployment, request, outcome.plan)
    return replace(outcome, plan=found.plan, notes=(*outcome.notes, *found.notes))


def corrected(deployment: LLMDeployment, cluster: Cluster) -> Cluster:
    """Without the excluded nodes, with the user's corrections of memory and links. Raises ClusterError if none is left."""
    excluded = set(deployment.spec.placement.exclude)
    nodes = tuple(node for node in cluster.nodes if node.name not in excluded)
    if not nodes:
        raise ClusterError(
            f"none of the {len(cluster.nodes)} nodes may be used: placement.exclude names {', '.join(sorted(excluded))}"
            if excluded
            else "the cluster has no nodes; describe at least one with its devices"
        )
    overrides = deployment.spec.planning.overrides
    return cluster.restricted_to({node.name for node in nodes}).with_overrides(
        memory_margin_bytes=overrides.memory_margin_bytes,
        usable_memory_fraction=overrides.usable_memory_fraction,
        link_gbps=overrides.link_gbps,
    )


def with_margin(deployment: LLMDeployment, cluster: Cluster, share: float) -> tuple[LLMDeployment, Cluster]:
    """The question with this share of what plans may use of each device left free: what it was made from ran out of memory."""
    if not share:
        return deployment, cluster

    def less(device: Device) -> Device:
        rule = CPU_USABLE_FRACTION if device.type == CPU else CUDA_USABLE_FRACTION
        fraction = rule if device.usable_fraction is None else device.usable_fraction
        return msgspec.structs.replace(device, usable_fraction=fraction * (1 - share))

    nodes = tuple(msgspec.structs.replace(n, devices=tuple(map(less, n.devices))) for n in cluster.nodes)
    spec = deployment.spec
    if (own := spec.planning.overrides.usable_memory_fraction) is not None:
        overrides = spec.planning.overrides.model_copy(update={"usable_memory_fraction": own * (1 - share)})
        planning = spec.planning.model_copy(update={"overrides": overrides})
        deployment = deployment.model_copy(update={"spec": spec.model_copy(update={"planning": planning})})
    return deployment, msgspec.structs.replace(cluster, nodes=nodes)


def compute_type_for(cluster: Cluster) -> ComputeType:
    """bfloat16, or float16 where a device is older than that."""
    capabilities = [device.profile.compute_capability for device in cluster.accelerators()]
    older = any(text and tuple(map(int, text.split("."))) < BFLOAT16_SINCE for text in capabilities)
    return "float16" if older else "bfloat16"
