"""The stages of one replica in this process: frames pass the wire's encoding, logits come out instead of tokens.

For parity tests and for measuring perplexity with the very pieces that serve; nothing that serves uses it.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

import torch

from strata_planner.contract.frames import FrameHeader, Free, KvOperation, Open, Sampling, Segment, data_decoder, encode
from strata_planner.contract.plan import Plan
from strata_planner.contract.roles import Role, roles_of
from strata_runtime.loading.load import load_stage
from strata_runtime.scheduler.blocks import OwnBlocks
from strata_runtime.slot.role_cache import cache_of
from strata_runtime.stage.executor import StageExecutor
from strata_runtime.stage.tensors import from_bytes, to_bytes

_GREEDY = Sampling(temperature=0)


class StageChain:
    """Stage executors of replica 0, first to last, on the CPU."""

    def __init__(self, executors: Sequence[StageExecutor]) -> None:
        self._executors = executors
        role = executors[0].role
        self._blocks = OwnBlocks(role.replica_page_budget, role.page_tokens)
        self._step = 0

    @classmethod
    def load(cls, plan: Plan, model_path: Path) -> Self:
        roles = sorted((role for listed in roles_of(plan).values() for role in listed), key=lambda role: role.stage)
        return cls([_executor(role, model_path) for role in roles])

    def logits(self, tokens: Mapping[int, Sequence[int]], segments: Sequence[Segment]) -> torch.Tensor:
        """One step: `tokens` are the sequences' whole texts. Logits [rows, vocab] float32 of the rows to be sampled."""
        opened = [Open(segment.sequence, _GREEDY) for segment in segments if segment.start == 0]
        ids = [token for s in segments for token in tokens[s.sequence][s.start : s.start + s.length]]
        return self._run(self._blocks.deal(segments), list(opened), torch.tensor(ids))

    def score(self, tokens: Sequence[int]) -> torch.Tensor:
        """Log probabilities [len(tokens) - 1] of a text's tokens after the first, computed as one prefill."""
        logits = self.logits({0: tokens}, [Segment(0, 0, len(tokens), len(tokens))])
        self._run([], [Free(0)], torch.empty(0, dtype=torch.int64))
        self._blocks.free(0)
        wanted = torch.tensor(tokens[1:])[:, None]
        return logits[:-1].log_softmax(dim=-1).gather(1, wanted)[:, 0]

    def _run(self, segments: list[Segment], operations: list[KvOperation], inputs: torch.Tensor) -> torch.Tensor:
        flow = inputs
        compute_type = self._executors[0].role.compute_type
        for place, executor in enumerate(self._executors):
            hidden = flow.shape[1] if flow.ndim > 1 else 0
            header = data_decoder.decode(
                encode(FrameHeader(0, 1, self._step, "", segments, operations, compute_type, hidden))
            )
            assert isinstance(header, FrameHeader)
            if place and flow.numel():
                flow = from_bytes(bytearray(to_bytes(flow)), compute_type, hidden)
            output = executor.compute(header, flow)
            flow = flow if output is None else output
        self._step += 1
        return flow


def _executor(role: Role, model_path: Path) -> StageExecutor:
    model = load_stage(role, model_path, lambda *_: None, torch.device("cpu"))
    return StageExecutor(role, model, cache_of(role, model))
