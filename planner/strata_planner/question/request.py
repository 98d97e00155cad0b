"""What is asked of the planner: a model on a cluster under a load, with the wishes of `spec`. Checked before any search.

Made by `strata plan`, `strata up` and the operator; read by every part of the search.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

from strata_planner.contract.devices import is_processor
from strata_planner.contract.divided import DIVIDED_FORMATS
from strata_planner.contract.formats import (
    BITS_OF_FORMAT,
    COMPUTE_TYPE_BYTES,
    FORMAT_NAMES,
    FORMATS_OF_METHOD,
    WITHOUT_EXPERTS,
    ComputeType,
    FormatName,
    Method,
)
from strata_planner.contract.kv import KV_BITS
from strata_planner.contract.plan import NO_SPECULATION, Speculation
from strata_planner.costs.draft_model import draft_page_bytes
from strata_planner.costs.memory import PAGE_TOKENS, boundary_log_page_bytes
from strata_planner.costs.source import LatencySource
from strata_planner.errors import InfeasibleError, ModelError, WorkloadError
from strata_planner.question.cluster import Cluster, DeviceGroup
from strata_planner.question.draft_head import EAGLE
from strata_planner.question.model import Model
from strata_planner.question.workload import Workload
from strata_planner.sensitivity import Sensitivity, prior

Solver = Literal["auto", "pipeline", "exact", "transfer", "layout"]
REFERENCES = {"exact", "transfer"}  # LLM-PQ's own methods
ONE_PIPELINE = {"pipeline", *REFERENCES}
GoalName = Literal["throughput", "latency", "slo", "cost"]
QUANTIZED_ALREADY = "none: the checkpoint is quantized already"
MOST_PADDED_ROWS = 1024  # by which the tables of two models of one tokenizer differ
MAX_CHUNK_TOKENS = 2048  # longer prefills are cut into steps of this many tokens


@dataclass(frozen=True)
class Objective:
    """What the plan is to be good at. `slo`: most requests answered within `deadline_seconds` (of a whole request) while
    `requests_per_second` arrive.
    """

    goal: GoalName = "throughput"
    deadline_seconds: float | None = None
    requests_per_second: float | None = None

    def check(self) -> None:
        """Raises WorkloadError."""
        if self.goal not in get_args(GoalName):
            raise WorkloadError(f"goal '{self.goal}': choose from {', '.join(get_args(GoalName))}")
        if self.goal == "slo" and not (self.deadline_seconds and self.requests_per_second):
            raise WorkloadError(
                "the goal slo needs a deadline and a rate of requests: give objective.slo and workload.requestsPerSecond"
            )


@dataclass(frozen=True)
class PlanRequest:
    """`theta`: what a unit of the quality penalty is worth in seconds of the batch's latency (LLM-PQ).

    `penalty_bound`: the most that the layers' omega may sum to; None: no bound. `max_stages` None: as many as there are
    devices; `max_replicas` None: as many as are good for the objective. `sensitivity` None: the prior. `latency_sources`: in order of trust, before the roofline.
    `solver`: "auto" takes the best by `objective` of all that follow. "layout": replicas and tensor-parallel groups of the degrees
    `tensor_parallel`. One pipeline of single devices, the least by LLM-PQ's objective: "pipeline" proves it, "exact" does so by
    the ILP of LLM-PQ, "transfer" is its heuristic. `method`: how weights become fewer bits. `activation_bits`: 8 among them lets products round activations too, where a format for it exists and a device is faster by it.
    `static_activations`: the ranges of this model's activations were calibrated. `chunk_tokens`: of prompts in one step, at most; None: as many as
    are best. `draft_model`: the shapes of what lies at `speculation.draft_uri`; of a head `speculation.fused` says what it reads.
    """

    deployment: str
    model_uri: str
    model: Model
    cluster: Cluster
    workload: Workload
    max_model_len: int
    allowed_bits: tuple[int, ...] = (3, 4, 8, 16)
    kv_bits: int = 16
    theta: float = 1.0
    min_stages: int = 1
    max_stages: int | None = None
    max_replicas: int | None = None
    compute_type: ComputeType = "bfloat16"
    time_limit_seconds: float = 30.0
    sensitivity: Sensitivity | None = None
    latency_sources: tuple[LatencySource, ...] = ()
    penalty_bound: float | None = None
    solver: Solver = "auto"
    objective: Objective = Objective()
    tensor_parallel: tuple[int, ...] = (1,)
    method: Method = "roundToNearest"
    activation_bits: tuple[int, ...] = (16,)
    static_activations: bool = False
    chunk_tokens: int | None = None
    prefix_caching: bool = True
    boundary_log_bytes: int = 0  # that each stage may keep what it hands on in; 0: it is not kept
    speculation: Speculation = NO_SPECULATION
    draft_model: Model | None = None

    @cached_property
    def formats(self) -> dict[int, tuple[FormatName, ...]]:
        """Allowed bits -> the formats that may store them, the preferred of equals first. Where stages may be groups, those that groups share."""
        if self.model.quantization:
            return self._stored_formats
        known = FORMATS_OF_METHOD[self.method]
        without = WITHOUT_EXPERTS if self.model.has_experts else frozenset()
        allowed = {bits: self._with_activations(known[bits]) for bits in sorted(set(self.allowed_bits))}
        shared = set(FORMAT_NAMES if self.tensor_parallel == (1,) else DIVIDED_FORMATS) - without
        able = {bits: tuple(name for name in names if name in shared) for bits, names in allowed.items()}
        return {bits: names for bits, names in able.items() if names}

    def _with_activations(self, names: tuple[FormatName, ...]) -> tuple[FormatName, ...]:
        """Of the formats of some bits those whose activations are allowed."""
        if 8 not in self.activation_bits:
            return names[:1]
        static: tuple[FormatName, ...] = ("w8a8_static",) if self.static_activations and "w8a8" in names else ()
        return (*names[:1], *static, *names[1:])

    @property
    def _stored_formats(self) -> dict[int, tuple[FormatName, ...]]:
        """Of a checkpoint that is quantized already: what it holds, whatever is allowed, and 16 bits."""
        stored = self.model.stored_formats
        formats = {BITS_OF_FORMAT[name]: (name,) for name in stored if name}
        if 16 in self.allowed_bits or None in stored:
            formats[16] = ("dense",)
        return dict(sorted(formats.items()))

    @cached_property
    def bits(self) -> tuple[int, ...]:
        """The bit-widths that layers of this plan may have, fewest first."""
        return tuple(self.formats)

    def layer_bits(self, layer: int) -> tuple[int, ...]:
        """Those of `bits` that this layer has a format for: of a quantized checkpoint its own and 16."""
        if not self.model.quantization:
            return self.bits
        stored = self.model.stored_formats[layer]
        return tuple(bits for bits in self.bits if bits == 16 or (stored and bits == BITS_OF_FORMAT[stored]))

    @cached_property
    def omega(self) -> Sensitivity:
        if self.model.quantization:  # what it cost in quality was paid when the checkpoint was made
            return Sensitivity(QUANTIZED_ALREADY, ({str(bits): 0.0 for bits in self.bits},) * self.model.num_layers)
        return self.sensitivity.completed(self.bits) if self.sensitivity else prior(self.model, self.bits)

    @cached_property
    def served_prefix_caching(self) -> bool:
        """What is wished, where the model can: state of sequences is of one position, and no block of a prefix has it."""
        return self.prefix_caching and not self.model.keeps_state

    @cached_property
    def served_speculation(self) -> Speculation:
        """Likewise: nobody can go back in such state behind a guess that was wrong."""
        return NO_SPECULATION if self.model.keeps_state else self.speculation

    @property
    def kv_pages(self) -> int:
        """Pages that every stage must hold: the whole batch at its full length, and one sequence of `max_model_len`."""
        tokens = min(self.max_model_len, self.workload.held_tokens)
        return max(self.workload.concurrency * _pages(tokens), _pages(self.max_model_len))

    @cached_property
    def draft_page_bytes(self) -> int:
        """Of a page of the small model that drafts."""
        small = self.draft_model
        return 0 if small is None else draft_page_bytes(small, self.kv_bits, self.compute_type)

    @property
    def boundary_log_pages(self) -> int:
        """Pages that each stage may keep what it hands on of; 0 also where a replica that is formed anew can keep no blocks at all."""
        keeps = self.served_prefix_caching and not self.served_speculation.has_head
        return self.boundary_log_bytes // self._log_page_bytes if keeps else 0

    def log_bytes(self, group: DeviceGroup, pages: int) -> int:
        """What a stage keeps of what it hands on, beside so many pages, in the memory that its devices are planned in: on processors alone it is host memory.
        Of the last one, too: it may be that of a stage that became the last.
        """
        keeps = group.degree == 1 and is_processor(group.leader.type)
        return min(pages, self.boundary_log_pages) * self._log_page_bytes if keeps else 0

    @property
    def _log_page_bytes(self) -> int:
        return boundary_log_page_bytes(self.model.hidden_size, self.compute_type)

    @property
    def largest_kv_pages(self) -> int:
        """More than this is never of use: every sequence of the batch at `max_model_len`."""
        return max(self.kv_pages, self.workload.concurrency * _pages(self.max_model_len))

    def check(self) -> None:
        """Raises InputError for wishes that no cluster could fulfil."""
        self._check_lengths()
        self._check_bits()
        self._check_stages()
        if self.max_replicas is not None and self.max_replicas < 1:
            raise WorkloadError(f"maxReplicas {self.max_replicas}: at least 1 is needed")
        if not 0 <= self.theta < float("inf"):
            raise WorkloadError(f"qualityWeight {self.theta}: a number of at least 0 is needed")
        if self.penalty_bound is not None and not 0 <= self.penalty_bound < float("inf"):
            raise WorkloadError(f"penalty bound {self.penalty_bound}: a number of at least 0 is needed")
        if self.solver not in get_args(Solver):
            raise WorkloadError(f"solver '{self.solver}': choose from {', '.join(get_args(Solver))}")
        if self.time_limit_seconds <= 0:
            raise WorkloadError(f"timeLimitSeconds {self.time_limit_seconds}: more than 0 is needed")
        if self.chunk_tokens is not None and self.chunk_tokens < 1:
            raise WorkloadError(f"chunkTokens {self.chunk_tokens}: at least 1 is needed")
        self._check_objective()
        self._check_draft_model()
        if self.sensitivity:
            self.omega.check(self.model, self.bits)

    def _check_stages(self) -> None:
        most = self.max_stages
        if self.min_stages < 1 or (most is not None and most < self.min_stages):
            raise WorkloadError(
                f"minStages {self.min_stages} and maxStages {most}: 1 <= minStages <= maxStages is needed"
            )
        if self.min_stages > self.model.num_layers:
            raise InfeasibleError(
                [f"minStages {self.min_stages}: the model has {self.model.num_layers} layers, at least one per stage"]
            )

    def _check_objective(self) -> None:
        self.objective.check()
        if self.model.keeps_state and self.speculation.mode not in {"none", "auto"}:
            raise WorkloadError(
                f"speculation {self.speculation.mode}: sequences of '{self.model.architecture}' keep state that cannot go back behind "
                "a guess that was wrong; take the mode none, or auto, which guesses nothing here"
            )
        if not self.tensor_parallel or any(degree < 1 for degree in self.tensor_parallel):
            raise WorkloadError(f"tensorParallel {list(self.tensor_parallel)}: numbers of devices, each 1 or more")
        wished = self.objective.goal != "throughput" or self.tensor_parallel != (1,)
        if self.solver in ONE_PIPELINE and wished:
            raise WorkloadError(
                f"solver '{self.solver}' plans one pipeline of single devices for throughput: leave goal "
                f"'{self.objective.goal}' and tensorParallel {list(self.tensor_parallel)} to the solvers auto and layout"
            )

    def _check_draft_model(self) -> None:
        small, wish = self.draft_model, self.speculation
        if (small is None) != (not wish.draft_uri) or (small is None and wish.mode in {"draft", "eagle"}):
            raise ModelError(
                f"speculation mode {wish.mode} with the draft model '{wish.draft_uri}': drafts are planned with a model's uri and its shapes; give both"
            )
        is_head = small is not None and small.architecture == EAGLE
        if small is not None and wish.mode in {"draft", "eagle"} and is_head != (wish.mode == "eagle"):
            raise ModelError(
                f"draft model {wish.draft_uri}: the mode {wish.mode} takes {'a head of EAGLE-3' if wish.mode == 'eagle' else 'a small model'}, "
                f"and that is '{small.architecture}'; give the other, or take the other mode"
            )
        if is_head != bool(wish.fused):
            raise ModelError(
                f"draft model '{wish.draft_uri}' reads the outputs of the layers {list(wish.fused)}: a head reads some, and nothing else does; "
                "name those of its config.json"
            )
        if small is not None and not is_head and abs(small.vocab_size - self.model.vocab_size) > MOST_PADDED_ROWS:
            raise ModelError(
                f"draft model {self.speculation.draft_uri}: it has {small.vocab_size} tokens, the model that it drafts for "
                f"{self.model.vocab_size}: a draft model has the same tokenizer (tables may differ by {MOST_PADDED_ROWS} padded rows); take one of its family"
            )

    def _check_lengths(self) -> None:
        limit = self.model.max_positions
        if self.max_model_len < 1:
            raise ModelError(f"maxModelLen {self.max_model_len}: at least 1 is needed")
        if limit and self.max_model_len > limit:
            raise ModelError(
                f"maxModelLen {self.max_model_len}: the model has {limit} positions; ask for at most {limit}"
            )
        if self.workload.prompt_tokens >= self.max_model_len:
            raise WorkloadError(
                f"workload promptTokens {self.workload.prompt_tokens} leaves no room for an answer within maxModelLen "
                f"{self.max_model_len}: plan for shorter prompts or raise maxModelLen"
            )

    def _check_bits(self) -> None:
        if self.method not in FORMATS_OF_METHOD:
            raise WorkloadError(f"method '{self.method}': choose from {', '.join(FORMATS_OF_METHOD)}")
        if not set(self.activation_bits) <= {8, 16} or 16 not in self.activation_bits:
            raise WorkloadError(f"activationBits {list(self.activation_bits)}: choose [16] or [8, 16]")
        known = FORMATS_OF_METHOD[self.method]
        if not self.allowed_bits or not set(self.allowed_bits) <= set(known):
            raise WorkloadError(
                f"allowed bits {list(self.allowed_bits)}: the method {self.method} has formats for {sorted(known)}; choose from these"
                + (
                    ""
                    if self.method == "anyPrecision"
                    else ", or take the method anyPrecision for every width from 3 to 8"
                )
            )
        if not self.bits:
            raise ModelError(
                f"allowed bits {list(self.allowed_bits)}: the fused experts of '{self.model.architecture}' have no any-precision form; "
                "take the method roundToNearest, or allow 16"
            )
        if self.kv_bits not in KV_BITS:
            raise WorkloadError(f"kvCacheBits {self.kv_bits}: the cache stores 16 or 8 bits; use one of these")
        if self.compute_type not in COMPUTE_TYPE_BYTES:
            raise WorkloadError(f"computeType {self.compute_type}: choose from {', '.join(COMPUTE_TYPE_BYTES)}")


def _pages(tokens: int) -> int:
    return -(-tokens // PAGE_TOKENS)
