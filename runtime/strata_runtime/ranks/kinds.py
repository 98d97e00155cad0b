"""Which collectives the ranks of a stage talk by: over shared memory on processors, by torch.distributed on GPUs and where the native library is not there."""

from typing import Literal

import torch

from strata_runtime.ranks import shared_memory
from strata_runtime.ranks.collectives import Collectives
from strata_runtime.ranks.process_group import ProcessGroup, make_meeting
from strata_runtime.ranks.shared_memory import SharedMemory, make_segment

CollectivesName = Literal["shared", "distributed"]


def kind_for(device: torch.device) -> CollectivesName:
    return "shared" if device.type == "cpu" and shared_memory.runs() else "distributed"


def make_file(kind: CollectivesName, ranks: int) -> int:
    """The descriptor that all ranks are given: a file in memory."""
    return make_segment(ranks) if kind == "shared" else make_meeting()


def make_collectives(kind: CollectivesName, file: int, rank: int, ranks: int, device: torch.device) -> Collectives:
    """One rank's end. `file` may be closed afterwards; raises RankLostError no earlier than in `join`."""
    return SharedMemory(file, rank, ranks) if kind == "shared" else ProcessGroup(file, rank, ranks, device)
