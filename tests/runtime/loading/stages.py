"""Stages of a tiny model, loaded as a slot loads them, and run one after the other without an engine."""

from collections.abc import Sequence
from pathlib import Path

import torch

from strata_planner.contract.formats import ComputeType, FormatName
from strata_planner.contract.frames import Segment
from strata_planner.contract.roles import Role, roles_of
from strata_runtime.loading.load import LoadOptions, load_stage
from strata_runtime.loading.stage_model import StageModel
from strata_runtime.scheduler.blocks import OwnBlocks
from strata_runtime.slot.role_cache import cache_of
from tests.runtime.plans import even_plan

CPU = torch.device("cpu")


def roles(
    model: Path, count: int, *, compute_type: ComputeType = "float32", formats: Sequence[FormatName] | None = None
) -> list[Role]:
    """The model's layers shared out over `count` stages."""
    slots = [f"s{place}" for place in range(count)]
    plan = even_plan(model, slots, compute_type=compute_type, formats=formats)
    return [roles_of(plan)[slot][0] for slot in slots]


def load(role: Role, model: Path, *, keep: bool = False) -> StageModel:
    return load_stage(role, model, lambda _done, _total: None, CPU, LoadOptions(keep=keep))


class Stages:
    """All stages of a model with a cache each."""

    def __init__(self, model: Path, listed: Sequence[Role]) -> None:
        self.models = [load(role, model) for role in listed]
        self.caches = [cache_of(role, stage) for role, stage in zip(listed, self.models, strict=True)]
        self.blocks = OwnBlocks(listed[0].replica_page_budget, listed[0].page_tokens)

    def step(self, texts: dict[int, torch.Tensor], segments: Sequence[Segment]) -> torch.Tensor:
        """texts: sequence -> its token ids. Returns the logits [rows, vocab] that the segments ask for."""
        dealt = self.blocks.deal(segments)
        values = torch.cat([texts[s.sequence][s.start : s.start + s.length] for s in segments])
        for stage, cache in zip(self.models, self.caches, strict=True):
            values = stage.forward(values, cache.plan(dealt))
        return values
