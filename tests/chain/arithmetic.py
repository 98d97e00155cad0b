"""A model of four layers that computes digests: what a token becomes depends on every layer's keys of every token before it.

Keys lie in the real cache (`PagedKvCache`), in the blocks that the engine gave, beside a digest of the weights that computed them: a block that was kept of another
text or of other weights, that came in part or was never computed, changes the text or is told (`Host.broken`). The text depends on layers and not on who has
them, on their bits, nor on what runs beside it: it is the same after every loss.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np
import torch
from msgspec import structs

from strata_planner.contract.formats import BITS_OF_FORMAT
from strata_planner.contract.frames import FrameHeader, Free, Open, SampledToken, Sampling, StepResult, Submit, Survey
from strata_planner.contract.plan import NO_SPECULATION, Speculation
from strata_planner.contract.roles import Role
from strata_runtime.errors import StepError
from strata_runtime.loading.layer_store import HeldLayer
from strata_runtime.model.kv import PagedKvCache
from strata_runtime.model.kv.pool import LayerPool
from strata_runtime.stage.boundary import StepBoundary
from strata_runtime.stage.contents import Content
from strata_runtime.stage.executor import Answered, Passed, Work
from strata_runtime.stage.holdings import Holdings
from strata_runtime.stage.inheritance import Inheritance, Refill, weights_by_layer
from tests.chain.virtual_network import here

LAYERS = 4
DIGEST = 8  # bytes
HIDDEN = 2 * DIGEST  # floats, one byte in each: a token's state, and the weights that it has come through
VOCABULARY = 97
STOP = 7
UNWEIGHED = b"\0" * DIGEST


def embed(token: int) -> bytes:
    return token.to_bytes(DIGEST, "little")


def layer_of(number: int, state: bytes, before: bytes) -> bytes:
    """`before`: what the layer keeps of all tokens before."""
    return blake2b(bytes([number]) + state + before, digest_size=DIGEST).digest()


def weighed(through: bytes, number: int, bits: int) -> bytes:
    """The weights up to a layer, behind those of all layers before."""
    return blake2b(through + bytes([number, bits]), digest_size=DIGEST).digest()


def drawn(state: bytes, sampling: Sampling, position: int) -> int:
    seed = f"{sampling.seed} {position} {sampling.temperature}".encode()
    return blake2b(state + seed, digest_size=4).digest()[0] % VOCABULARY


def text_of(prompt: Sequence[int], most: int, sampling: Sampling) -> list[int]:
    """The answer where nothing goes wrong."""
    kept = [b""] * LAYERS
    tokens, answer = list(prompt), []
    for position, token in enumerate(tokens):
        state = embed(token)
        for number in range(LAYERS):
            state = layer_of(number, state, kept[number])
            kept[number] += state
        if position >= len(prompt) - 1:
            answer.append(drawn(state, sampling, position))
            if len(answer) == most or answer[-1] == STOP:
                return answer
            tokens.append(answer[-1])
    raise AssertionError("a prompt is never empty")


@dataclass(eq=False)
class Stage:
    """In place of the weights: as many bytes. `held`: its layers, by number."""

    held: dict[int, HeldLayer] = field(default_factory=dict)
    hidden_size: int = HIDDEN
    vocab_size: int = VOCABULARY
    speculation: Speculation = NO_SPECULATION
    keeps_state: bool = False
    states: None = None
    num_kv_heads: int = 1
    head_dim: int = DIGEST
    latent: bool = False
    rank: int = 0
    dtype: torch.dtype = torch.uint8
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def num_layers(self) -> int:
        return len(self.held)

    def parts(self) -> tuple[HeldLayer, ...]:
        return tuple(self.held.values())

    def watch(self, layers: Sequence[int]) -> None: ...


class Hangs(BaseException):
    """In place of a step that never ends: no `except Exception` sees to it."""


class Executor:
    """Runs a role's layers on frames, as `StageExecutor` does."""

    def __init__(
        self, role: Role, model: Stage, cache: PagedKvCache, others: object = None, inherited: Inheritance | None = None
    ) -> None:
        self.role, self.model, self.others = role, model, others
        self.work = Work()
        self.from_log = 0  # tokens
        self.vocabulary = VOCABULARY
        self.hidden = HIDDEN
        self.boundary = StepBoundary()
        self.fails = ""  # the next step does, for this reason
        self.hangs = False  # the next step does
        log_pages = None if cache.log is None else cache.log.pages
        self._holdings = Holdings(role, weights_by_layer(role, {}), inherited, log_pages)
        self._cache = cache
        self._next_step = 0
        self._sampling: dict[int, Sampling] = {}
        self._rows = {number: pool.storage[0].numpy()[:, 0] for number, pool in cache.pools.items()}  # [2, places, 8]

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
                    self._holdings.free(sequence, self._cache.free(sequence))
                    self._sampling.pop(sequence, None)
        if not header.segments:
            return None
        if self.hangs:
            raise Hangs
        if self.fails:
            reason, self.fails = self.fails, ""
            raise RuntimeError(reason)
        self._check_weights()
        self._holdings.run_with(header.weights)
        states = self._states(header, inputs)
        weights = self._holdings.weights
        if not self.role.head:
            rows = torch.tensor([list(state) for state in states], dtype=torch.float32).reshape(-1, HIDDEN)
            return Passed(structs.replace(header, weights=weights, seconds=0.01), rows)
        tokens = self._samples(header, states)
        return Answered(StepResult(header.replica, header.epoch, header.step, tokens, weights, 0.01))

    def _check_weights(self) -> None:
        """Nobody has moved them under its hands."""
        has = tuple(each.format for _, each in sorted(self.model.held.items()))
        if has != self.role.format:
            here.get().broken.append(f"{here.get().name} computes with {has} where its role says {self.role.format}")

    @property
    def moved(self) -> tuple[int, int]:
        return self.work.turns, self._next_step

    @property
    def pools(self) -> Mapping[int, LayerPool]:
        return self._cache.pools

    @property
    def blocks(self) -> Mapping[int, Content]:
        return self._holdings.blocks

    def holds(self, formed: int) -> Inheritance:
        return self._holdings.holds(formed)

    def inherit(self, inherited: Inheritance) -> None:
        self._holdings.inherit(inherited)

    def survey(self, survey: Survey) -> Survey:
        return self._holdings.survey(survey, begins_anywhere=True)

    def left(self, formed: int) -> Inheritance:
        return self._holdings.left(formed, self._cache.tables)

    def _states(self, header: FrameHeader, inputs: torch.Tensor) -> list[bytes]:
        """What goes on to the next stage."""
        first, last = self.role.layers
        refill = Refill.of(header.refill, self.role) if header.refill else None
        layers = refill.layers if refill else range(first, last + 1)
        batch = self._cache.plan(header.segments)
        is_logged = refill is not None and refill.reads_log
        if is_logged:
            assert self._cache.kept_rows is not None, "it begins with what it has not kept"
            inputs = self._cache.kept_rows.read(batch.places)
        rows = iter(inputs.tolist())
        states = []
        for segment, span in zip(header.segments, batch.spans, strict=True):
            size = self.role.page_tokens
            places = [page * size + place for page in span.pages for place in range(size)]
            for position in range(segment.start, segment.start + segment.length) if layers or is_logged else ():
                row = next(rows)
                begins = self.role.embedding and not is_logged
                came = embed(row) + UNWEIGHED if begins else bytes(map(int, row))
                states.append(self._through(layers, came, places[: position + 1]))
        self.work.refilled += len(states) * len(layers) if refill else 0
        self.from_log += len(states) if is_logged else 0
        if self._cache.log is not None and (refill is None or refill.writes_log):
            self._cache.log.write(batch.places, torch.tensor([list(state) for state in states], dtype=torch.uint8))
        self._holdings.computed(header, [span.pages for span in batch.spans])
        return states if refill is None or refill.sends else []

    def _through(self, layers: range, came: bytes, places: list[int]) -> bytes:
        """One token, whose keys are to lie at the last of these places. Whoever reads what was never written computes garbage, as a real stage does."""
        state, through = came[:DIGEST], came[DIGEST:]
        for number in layers:
            keys, weights = self._rows[number]
            through = weighed(through, number, BITS_OF_FORMAT[self.model.held[number].format])
            if (weights[places[:-1]] != np.frombuffer(through, np.uint8)).any():
                here.get().broken.append(
                    f"{here.get().name}: layer {number} reads what other weights have computed, or nobody has"
                )
            state = layer_of(number, state, keys[places[:-1]].tobytes())
            keys[places[-1]], weights[places[-1]] = np.frombuffer(state, np.uint8), np.frombuffer(through, np.uint8)
        return state + through

    def _samples(self, header: FrameHeader, states: list[bytes]) -> list[SampledToken]:
        begin, tokens = 0, []
        for segment in header.segments:
            for position in segment.sampled:
                state = states[begin + position - segment.start]
                token = drawn(state[:DIGEST], self._sampling[segment.sequence], position)
                tokens.append(SampledToken(segment.sequence, position, token, 0.0, []))
            begin += segment.length
        return tokens


def wanted(submit: Submit) -> list[int]:
    return text_of(submit.prompt, submit.max_tokens, submit.sampling)
