"""A model of four layers that computes digests: what a token becomes depends on every layer's keys of every token before it.

A cache that lost a page, kept one of another text, or a layer that is computed twice or by nobody changes the text. The text depends on layers
and not on who has them, nor on what runs beside it: it is the same after every loss.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import torch
from msgspec import structs

from strata_planner.contract.frames import FrameHeader, Free, Open, SampledToken, Sampling, StepResult, Submit
from strata_planner.contract.roles import Role
from strata_runtime.errors import StepError
from strata_runtime.stage.boundary import StepBoundary
from strata_runtime.stage.executor import Answered, Passed, Work

LAYERS = 4
HIDDEN = 8  # floats, one byte in each
VOCABULARY = 97
STOP = 7
NOTHING = b"\0" * HIDDEN


def embed(token: int) -> bytes:
    return token.to_bytes(HIDDEN, "little")


def layer_of(number: int, state: bytes, before: bytes) -> bytes:
    """`before`: what the layer keeps of the token before."""
    return blake2b(bytes([number]) + state + before, digest_size=HIDDEN).digest()


def drawn(state: bytes, sampling: Sampling, position: int) -> int:
    seed = f"{sampling.seed} {position} {sampling.temperature}".encode()
    return blake2b(state + seed, digest_size=4).digest()[0] % VOCABULARY


def text_of(prompt: Sequence[int], most: int, sampling: Sampling) -> list[int]:
    """The answer where nothing goes wrong."""
    kept = [NOTHING] * LAYERS
    tokens, answer = list(prompt), []
    for position, token in enumerate(tokens):
        state = embed(token)
        for number in range(LAYERS):
            kept[number] = state = layer_of(number, state, kept[number])
        if position >= len(prompt) - 1:
            answer.append(drawn(state, sampling, position))
            if len(answer) == most or answer[-1] == STOP:
                return answer
            tokens.append(answer[-1])
    raise AssertionError("a prompt is never empty")


@dataclass(eq=False)
class Cache:
    """(layer, block, place in it) -> what is kept of a token."""

    kept: dict[tuple[int, int, int], bytes] = field(default_factory=dict)

    def reset(self) -> None:
        self.kept.clear()

    def take(self, _: object) -> None:
        """No pages of others: every epoch computes anew."""
        self.kept.clear()

    def held(self) -> "Cache":
        return self


@dataclass(eq=False)
class Stage:
    """In place of the weights."""

    hidden_size: int = HIDDEN
    vocab_size: int = VOCABULARY
    speculation: object = None


class Executor:
    """Runs a role's layers on frames, as `StageExecutor` does."""

    def __init__(self, role: Role, model: Stage, cache: Cache, others: object = None, *_: object) -> None:
        self.role, self.model, self.others = role, model, others
        self.work = Work()
        self.vocabulary = VOCABULARY
        self.boundary = StepBoundary()
        self.fails = ""  # the next step does, for this reason
        self._cache = cache
        self._next_step = 0
        self._tables: dict[int, list[int]] = {}
        self._sampling: dict[int, Sampling] = {}

    def run(
        self, header: FrameHeader, inputs: torch.Tensor, _: Sequence[torch.Tensor] = ()
    ) -> Passed | Answered | None:
        self.work.steps += 1
        if header.step != self._next_step:
            raise StepError(f"step {header.step} came where step {self._next_step} was due: a frame was lost")
        self._next_step += 1
        for operation in header.operations:
            match operation:
                case Open():
                    self._sampling[operation.sequence] = operation.sampling
                case Free(sequence):
                    self._tables.pop(sequence, None)
                    self._sampling.pop(sequence, None)
        if not header.segments:
            return None
        if self.fails:
            reason, self.fails = self.fails, ""
            raise RuntimeError(reason)
        states = self._states(header, inputs)
        if not self.role.head:
            rows = torch.tensor([list(state) for state in states], dtype=torch.float32)
            return Passed(structs.replace(header, weights="w", seconds=0.01), rows)
        return Answered(StepResult(header.replica, header.epoch, header.step, self._samples(header, states), "w", 0.01))

    def computed(self, _: int) -> None:
        """Of what it leaves to others: nothing."""

    def _states(self, header: FrameHeader, inputs: torch.Tensor) -> list[bytes]:
        rows = iter(inputs.tolist())
        first, last = self.role.layers
        states = []
        for segment in header.segments:
            table = self._tables.setdefault(segment.sequence, [])
            table.extend(segment.blocks)
            for position in range(segment.start, segment.start + segment.length):
                row = next(rows)
                state = embed(row) if self.role.embedding else bytes(int(each) for each in row)
                for number in range(first, last + 1):
                    state = layer_of(number, state, self._kept(table, number, position - 1))
                    self._cache.kept[self._place(table, number, position)] = state
                states.append(state)
        return states

    def _kept(self, table: list[int], number: int, position: int) -> bytes:
        """Whoever reads what was never written computes garbage, as a real stage does."""
        return NOTHING if position < 0 else self._cache.kept.get(self._place(table, number, position), b"garbage!")

    def _place(self, table: list[int], number: int, position: int) -> tuple[int, int, int]:
        size = self.role.page_tokens
        return number, table[position // size], position % size

    def _samples(self, header: FrameHeader, states: list[bytes]) -> list[SampledToken]:
        begin, tokens = 0, []
        for segment in header.segments:
            for position in segment.sampled:
                state = states[begin + position - segment.start]
                token = drawn(state, self._sampling[segment.sequence], position)
                tokens.append(SampledToken(segment.sequence, position, token, 0.0, []))
            begin += segment.length
        return tokens


def wanted(submit: Submit) -> list[int]:
    return text_of(submit.prompt, submit.max_tokens, submit.sampling)
