"""What speculation should bring a plan: its steps, its steps that draft and its verifications, priced like the plan's own stages.

Called by `strata plan` and `strata up` with what was measured of the model, if anything. A verification of c sequences and k drafts each is

    a step of c sequences + what c (k + 1) rows take beyond c rows + what attention of k + 1 tokens takes beyond that of one, c times

Guesses that are looked up take no steps of their own. Of loads with prompts only the decoding gets quicker. `auto` is told with as many drafts
as pay most, up to those that are wished; by a small model where one is given, else by its own weights where they draft. Of texts nobody knows how much more there would be to look up, so
that the best number is sought among those that are wished.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from strata_planner.contract.acceptance import AcceptanceRecord
from strata_planner.contract.draft_weights import has_draft
from strata_planner.contract.forecast import AtAcceptance, Speculated, SpeculationForecast
from strata_planner.contract.formats import ANY_PRECISION, FormatName
from strata_planner.contract.plan import Plan, Replica, Speculation, Stage
from strata_planner.costs.latency import Latencies
from strata_planner.costs.speculation import MOST_TOKENS, Guessing, RoundSeconds, best_tokens, speed_up
from strata_planner.question.request import PlanRequest
from strata_planner.simulate.pricing import StagePricer
from strata_planner.simulate.replica import ReplicaModel
from strata_planner.simulate.stage import Batch, Chunk, StageSeconds

ASSUMED = (0.6, 0.8, 0.95)  # acceptances that are told where none was measured
_LOOKED_UP = frozenset({"ngram", "suffix"})
_PRICED = frozenset({*_LOOKED_UP, "selfPrecision", "draft", "eagle", "auto"})


def forecast(plan: Plan, request: PlanRequest, measured: AcceptanceRecord | None = None) -> SpeculationForecast | None:
    """Of `plan`, which was made for `request`. None without speculation, and where the devices have no figures for the weights that draft."""
    wish = plan.speculation
    if wish.mode not in _PRICED or not _are_known(plan, request):
        return None
    pricer = StagePricer(request.model, request.cluster, plan.compute_type, Latencies(request.latency_sources))
    keys = round(request.workload.seen_tokens)
    drafting = [_drafting(plan, replica, request, pricer) for replica in plan.replicas]
    replicas = [_Priced(plan, *each, pricer, keys) for each in zip(plan.replicas, drafting, strict=True)]
    guesses = _guessings(wish, measured, drafts=replicas[0].drafts)
    return SpeculationForecast(
        mode=wish.mode,
        tokens=wish.tokens,
        measured=measured is not None,
        source=_source(measured),
        guessed=guesses[0].guessed,
        cases=tuple(_case(each, plan, request, replicas) for each in guesses),
    )


def with_forecast(plan: Plan, request: PlanRequest, measured: AcceptanceRecord | None = None) -> Plan:
    """The plan with it in its prediction."""
    told = msgspec.structs.replace(plan.prediction, speculation=forecast(plan, request, measured))
    return msgspec.structs.replace(plan, prediction=told)


def _source(measured: AcceptanceRecord | None) -> str:
    if measured is None:
        return "assumed"
    return f"measured over {measured.counts.draft_tokens:,} drafted tokens on this machine, {measured.measured_on}"


def _guessings(wish: Speculation, measured: AcceptanceRecord | None, *, drafts: bool) -> list[Guessing]:
    """Weights can draft at any step; texts have something to look up in some of them, and not always as much as is wished."""
    if measured is None:
        return [Guessing(acceptance) for acceptance in ASSUMED]
    counts = measured.counts
    if drafts:
        return [Guessing(counts.acceptance)]
    return [Guessing(counts.acceptance, counts.guessed, min(1.0, counts.mean_drafts / wish.tokens))]


def _are_known(plan: Plan, request: PlanRequest) -> bool:
    """Whether every device has figures for the weights that its layers draft with."""
    groups = [(stage, request.cluster.group(stage.places, stage.shares)) for stage in plan.stages]
    return all(
        group is not None
        and set(_draft_formats(stage.format, plan.speculation)) <= set(group.profile.decode_efficiency)
        for stage, group in groups
    )


def _draft_formats(formats: Sequence[FormatName], wish: Speculation) -> tuple[FormatName, ...]:
    """What layers read for a step that drafts."""
    return tuple(ANY_PRECISION[wish.draft_bits] if has_draft(name, wish) else name for name in formats)


@dataclass(frozen=True)
class _Load:
    """Of one replica: `batches` micro-batches of `sequences` each, which see `keys` keys."""

    batches: int
    sequences: int
    keys: int

    def batch(self, rows: int | None = None) -> Batch:
        """A step that decodes, or so many rows without their attention."""
        count = self.sequences if rows is None else rows
        return Batch(count, count, count, self.sequences * self.keys if rows is None else 0)

    def verification(self, stage: StageSeconds, drafts: int) -> float:
        rows = stage(self.batch(self.sequences * (1 + drafts))) - stage(self.batch(self.sequences))
        attention = self._attention(stage, 1 + drafts) - self._attention(stage, 1)
        return stage(self.batch()) + max(0.0, rows) + self.sequences * max(0.0, attention)

    def _attention(self, stage: StageSeconds, tokens: int) -> float:
        """Of one sequence's next tokens to what it has cached."""
        cached, fresh = (stage(Batch(tokens, 0, 0, 0, (Chunk(tokens, past),))) for past in (self.keys, 0))
        return cached - fresh


def _drafting(plan: Plan, replica: Replica, request: PlanRequest, pricer: StagePricer) -> ReplicaModel | None:
    """What drafts, as a replica of its own: a small model or a head on the leader's devices, or the stages with fewer bits. None: guesses are looked up."""
    wish, small, leader = plan.speculation, request.draft_model, replica.stages[0]
    if wish.mode in _LOOKED_UP:
        return None
    if small is not None:
        layers = len(small.layers)
        whole = {"layers": (0, layers - 1), "format": ("dense",) * layers, "bits": (16,) * layers, "head": True}
        stages: tuple[Stage, ...] = (msgspec.structs.replace(leader, **whole),)
        of_small = StagePricer(small, request.cluster, plan.compute_type, Latencies(request.latency_sources))
        return ReplicaModel.priced(plan, msgspec.structs.replace(replica, stages=stages), of_small)
    stages = tuple(
        msgspec.structs.replace(stage, format=_draft_formats(stage.format, wish)) for stage in replica.stages
    )
    if stages == replica.stages:
        return None
    return ReplicaModel.priced(plan, msgspec.structs.replace(replica, stages=stages), pricer)


class _Priced:
    """A replica's seconds, and those of what drafts for it, if anything does."""

    def __init__(
        self, plan: Plan, replica: Replica, drafting: ReplicaModel | None, pricer: StagePricer, keys: int
    ) -> None:
        self.replica, self._keys = replica, keys
        self._model = ReplicaModel.priced(plan, replica, pricer)
        self._drafting = drafting

    @property
    def drafts(self) -> bool:
        """Whether tokens are drafted, and not looked up."""
        return self._drafting is not None

    def load(self, sequences: int) -> _Load:
        """So many in flight, in as many micro-batches as the plan has under way."""
        micro_batch = self.replica.micro_batch
        wished = min(micro_batch.under_way(len(self.replica.stages)), sequences)
        batches = max(wished, -(-sequences // micro_batch.decode))
        return _Load(batches, -(-sequences // batches), self._keys)

    def costs(self, load: _Load) -> RoundSeconds:
        rows = load.sequences
        most_rows = self.replica.micro_batch.most_sampled
        plain = self._cycle(self._model, load, rows, lambda stage: stage(load.batch()))
        drafting = self._drafting
        draft = self._cycle(drafting, load, rows, lambda stage: stage(load.batch())) if drafting is not None else 0.0
        verified: dict[int, float] = {0: plain}

        def verification(drafts: int) -> float:
            if drafts not in verified:
                seconds = self._cycle(
                    self._model, load, rows * (1 + drafts), lambda stage: load.verification(stage, drafts)
                )
                verified[drafts] = seconds
            return verified[drafts]

        return RoundSeconds(plain, draft, verification, max(0, most_rows - rows) // rows)

    @staticmethod
    def _cycle(model: ReplicaModel, load: _Load, tokens: int, seconds: Callable[[StageSeconds], float]) -> float:
        """From one step of a micro-batch to its next: through all stages, or as long as the slowest works for the others."""
        stages = [seconds(each.seconds) for each in model.stages]
        hops = [each.hop for each in model.stages] if len(stages) > 1 else []
        sending = [tokens * (hop.seconds_per_token + hop.seconds_per_row) for hop in hops]
        through = sum(stages) + sum(hop.latency_seconds for hop in hops) + sum(sending)
        slowest = max([*stages, *sending])
        return max(through, load.batches * slowest)


def _case(guessing: Guessing, plan: Plan, request: PlanRequest, replicas: Sequence[_Priced]) -> AtAcceptance:
    one = min((_alone(each, guessing, plan.speculation) for each in replicas), key=lambda told: told.step_seconds)
    return AtAcceptance(guessing.acceptance, one, _planned(guessing, plan, request, replicas))


def _alone(priced: _Priced, guessing: Guessing, wish: Speculation) -> Speculated:
    costs = priced.costs(priced.load(1))
    return _speculated(guessing, costs, wish, 1, lambda gained: gained / costs.step)


def _planned(guessing: Guessing, plan: Plan, request: PlanRequest, replicas: Sequence[_Priced]) -> Speculated:
    """All requests of the plan; seconds and room are those of its largest replica. Prompts take what they took."""
    predicted, further = plan.prediction, request.workload.output_tokens - 1
    largest = max((each.replica for each in replicas), key=lambda replica: replica.concurrency)
    priced = next(each for each in replicas if each.replica is largest)
    first, answering = predicted.ttft_ms, further * predicted.tpot_ms
    whole = first + answering

    def rate(gained: float) -> float:
        return predicted.tokens_per_second * (whole / (first + answering / gained) if whole else 1.0)

    count = sum(each.replica.concurrency for each in replicas)
    return _speculated(guessing, priced.costs(priced.load(largest.concurrency)), plan.speculation, count, rate)


def _speculated(
    guessing: Guessing, costs: RoundSeconds, wish: Speculation, sequences: int, rate: Callable[[float], float]
) -> Speculated:
    drafts = min(wish.tokens, costs.room)
    gained = speed_up(guessing, drafts, costs)
    if wish.mode == "auto":
        drafts, gained = best_tokens(guessing, costs, wish.tokens)
    count, most = best_tokens(guessing, costs, MOST_TOKENS if costs.draft else wish.tokens)
    return Speculated(
        sequences=sequences,
        drafts=drafts,
        step_seconds=costs.step,
        draft_seconds=costs.draft,
        verification_seconds=costs.verification(drafts),
        speed_up=gained,
        tokens_per_second=rate(gained),
        plain_tokens_per_second=rate(1.0),
        best_tokens=count,
        best_speed_up=most,
    )
