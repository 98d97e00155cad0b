"""One stage that several ranks share, as threads of a test."""

from pathlib import Path

import torch

from strata_planner.contract.roles import Role
from strata_runtime.loading.load import LoadOptions, load_stage
from strata_runtime.loading.stage_model import StageModel
from strata_runtime.ranks.collectives import Collectives
from strata_runtime.ranks.process_group import ProcessGroup
from strata_runtime.scheduler.blocks import OwnBlocks
from strata_runtime.slot.role_cache import cache_of
from tests.runtime.loading.parity import FIRST, RAGGED, make_texts
from tests.runtime.loading.stages import CPU
from tests.runtime.ranks.together import distributed, together


def part(role: Role, model: Path, collectives: Collectives, device: torch.device = CPU) -> StageModel:
    return load_stage(role, model, lambda *_: None, device, LoadOptions(collectives=collectives))


def shared(model: Path, ranks: int, role: Role) -> list[torch.Tensor]:
    """The logits of the ragged batch, from each rank."""

    def body(collectives: Collectives) -> torch.Tensor:
        stage = part(role, model, collectives)
        return run(stage, role)

    return together(ranks, body)


def shared_by_torch(model: Path, ranks: int, role: Role, device: str = "cpu") -> list[torch.Tensor]:
    """The same where the ranks talk by torch.distributed; `device` "cuda": each on a GPU of its own."""

    def body(group: ProcessGroup) -> torch.Tensor:
        place = CPU if device == "cpu" else torch.device(device, group.rank)
        computed = run(part(role, model, group, place), role)
        group.finish()
        return computed.cpu()

    return distributed(ranks, body, device=device)


def run(stage: StageModel, role: Role) -> torch.Tensor:
    cache, blocks, texts = cache_of(role, stage), OwnBlocks(role.replica_page_budget, role.page_tokens), make_texts()
    for segments in (FIRST, RAGGED):
        inputs = torch.cat([texts[s.sequence][s.start : s.start + s.length] for s in segments])
        computed = stage.forward(inputs.to(stage.device), cache.plan(blocks.deal(segments)))
    return computed
