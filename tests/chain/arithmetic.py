"""A model of four layers that computes digests: what a token becomes depends on every layer's keys of every token before it.

A cache that lost a page, kept one of another text, or a layer that is computed twice or by nobody changes the text. The text depends on layers
and not on who has them, nor on what runs beside it: it is the same after every loss.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import torch
from msgspec import structs

from strata_planner.contract.frames import FrameHeader, Free, Open, SampledToken, Sampling, StepResult, Submit, Survey
from strata_planner.contract.roles import Role
from strata_runtime.errors import StepError
from strata_runtime.stage.boundary import StepBoundary
from strata_runtime.stage.executor import Answered, Passed, Work
from strata_runtime.stage.holdings import Holdings
from strata_runtime.stage.inheritance import Inheritance, Refill, weights_by_layer

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


class Rows(dict[tuple[int, int], bytes]):
    """By block and place in it."""


@dataclass
class Held:
    """In place of the pages that a role leaves: by layer."""

    layers: dict[int, Rows]

    def shrink(self, layers: Collection[int], pages: int) -> None:
        self.layers = {
            number: Rows({place: row for place, row in rows.items() if place[0] < pages})
            for number, rows in self.layers.items()
            if number in layers
        }


@dataclass(eq=False)
class Cache:
    """What each layer keeps of a token."""

    numbers: range
    layers: dict[int, Rows] = field(default_factory=dict)

    def take(self, held: Any) -> frozenset[int]:
        self.layers = {number: held.layers.get(number, Rows()) for number in self.numbers}
        return frozenset(number for number in self.numbers if number in held.layers)

    def held(self) -> Held:
        return Held(dict(self.layers))


@dataclass(eq=False)
class Stage:
    """In place of the weights."""

    hidden_size: int = HIDDEN
    vocab_size: int = VOCABULARY
    speculation: object = None


class Hangs(BaseException):
    """In place of a step that never ends: no `except Exception` sees to it."""


class Executor:
    """Runs a role's layers on frames, as `StageExecutor` does."""

    def __init__(
        self, role: Role, model: Stage, cache: Cache, others: object = None, inherited: Inheritance | None = None
    ) -> None:
        self.role, self.model, self.others = role, model, others
        self.work = Work()
        self.vocabulary = VOCABULARY
        self.hidden = HIDDEN
        self.boundary = StepBoundary()
        self.fails = ""  # the next step does, for this reason
        self.hangs = False  # the next step does
        self._holdings = Holdings(role, weights_by_layer(role, {}), inherited)
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
                    self._holdings.open(operation)
                    self._sampling[operation.sequence] = operation.sampling
                case Free(sequence):
                    self._holdings.free(sequence, self._tables.pop(sequence, []))
                    self._sampling.pop(sequence, None)
        if not header.segments:
            return None
        if self.hangs:
            raise Hangs
        if self.fails:
            reason, self.fails = self.fails, ""
            raise RuntimeError(reason)
        self._holdings.run_with(header.weights)
        states = self._states(header, inputs)
        weights = self._holdings.weights
        if not self.role.head:
            rows = torch.tensor([list(state) for state in states], dtype=torch.float32).reshape(-1, HIDDEN)
            return Passed(structs.replace(header, weights=weights, seconds=0.01), rows)
        tokens = self._samples(header, states)
        return Answered(StepResult(header.replica, header.epoch, header.step, tokens, weights, 0.01))

    @property
    def moved(self) -> tuple[int, int]:
        return self.work.turns, self._next_step

    def inherit(self, inherited: Inheritance) -> None:
        self._holdings.inherit(inherited)

    def survey(self, survey: Survey) -> Survey:
        return self._holdings.survey(survey, begins_anywhere=True)

    def left(self, formed: int) -> Inheritance:
        return self._holdings.left(formed, self._tables.values(), 0)

    def _states(self, header: FrameHeader, inputs: torch.Tensor) -> list[bytes]:
        """What goes on to the next stage."""
        first, last = self.role.layers
        refill = Refill.of(header.refill, self.role) if header.refill else None
        layers = refill.layers if refill else range(first, last + 1)
        rows = iter(inputs.tolist())
        states = []
        for segment in header.segments:
            table = self._tables.setdefault(segment.sequence, [])
            table.extend(segment.blocks)
            for position in range(segment.start, segment.start + segment.length) if layers else ():
                row = next(rows)
                state = embed(row) if self.role.embedding else bytes(int(each) for each in row)
                for number in layers:
                    state = layer_of(number, state, self._kept(table, number, position - 1))
                    self._cache.layers[number][self._place(table, position)] = state
                states.append(state)
        self.work.refilled += len(states) * len(layers) if refill else 0
        self._holdings.computed(header, [self._tables[segment.sequence] for segment in header.segments])
        return states if refill is None or refill.sends else []

    def _kept(self, table: list[int], number: int, position: int) -> bytes:
        """Whoever reads what was never written computes garbage, as a real stage does."""
        if position < 0:
            return NOTHING
        return self._cache.layers[number].get(self._place(table, position), b"garbage!")

    def _place(self, table: list[int], position: int) -> tuple[int, int]:
        size = self.role.page_tokens
        return table[position // size], position % size

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
