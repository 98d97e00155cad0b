"""The two phases that a candidate's seconds fall into, in two accounts: of a batch that is prefilled, then decoded (LLM-PQ), and of a pipeline
that is never empty, where steps decode and some carry prompts too.

Chosen by `candidates` for a request. Each says what to ask the costs for; none knows a device.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from strata_planner.contract.formats import ComputeType
from strata_planner.costs.communication import (
    hidden_states_busy_seconds,
    hidden_states_seconds,
    sampled_tokens_seconds,
)
from strata_planner.costs.prompts import Prompts, prompts_of_a_step
from strata_planner.costs.source import Phase, decode_phase, prefill_phase
from strata_planner.question.cluster import LinkRate
from strata_planner.question.model import Model
from strata_planner.question.request import MAX_CHUNK_TOKENS
from strata_planner.question.workload import Workload

Seconds = tuple[float, float]  # of each phase

_FEW = 8  # one part in so many of a step's tokens of prompts is few


@dataclass(frozen=True)
class Pair:
    """Sequences in a micro-batch of each phase. `chunk`: the most tokens of prompts in one step; `count`: micro-batches under way at most, 0:
    one per stage.
    """

    prefill: int  # eta
    decode: int  # xi
    chunk: int = MAX_CHUNK_TOKENS
    count: int = 0


@dataclass(frozen=True)
class Sending:
    """From one stage to the next over `link`; `back`: from the last one to the first, which gets sampled tokens.

    `states`: of other layers, that a head at the first stage reads, beside each token's own hidden state; back they come alone.
    """

    model: Model
    link: LinkRate
    compute_type: ComputeType
    back: bool
    states: int = 0

    def seconds(self, tokens: int) -> float:
        return hidden_states_seconds(self.model, self.link, tokens * (1 + self.states), self.compute_type)

    def busy_seconds(self, tokens: int) -> float:
        """Of the link alone, its latency left out."""
        return hidden_states_busy_seconds(self.model, self.link, tokens * (1 + self.states), self.compute_type)

    def back_busy_seconds(self, tokens: int) -> float:
        """Of the states alone."""
        return hidden_states_busy_seconds(self.model, self.link, tokens * self.states, self.compute_type)

    def sampled_seconds(self, sequences: int, tokens: int) -> float:
        """Of the tokens sampled of so many sequences, with the states of all tokens of the step."""
        return sampled_tokens_seconds(self.link, sequences) + self.back_busy_seconds(tokens)


class Phases(Protocol):
    """`layer` gives a layer's seconds for a phase, `beside` those of a step beside its layers, with so many rows of logits."""

    def weights(self, pair: Pair) -> tuple[float, int, int]:
        """How often the slowest stage counts beside the sum, in each phase; how often the sum of decode counts."""

    def of_layers(self, layer: Callable[[Phase], float], pair: Pair) -> Seconds:
        """Seconds of the same layers in each phase."""

    def of_a_step(self, beside: Callable[[Phase, int], float], pair: Pair) -> Seconds:
        """Seconds of a step in each phase, its layers left out."""

    def of_a_hop(self, sending: Sending, pair: Pair) -> Seconds:
        """Seconds until the next stage has what a step made."""


@dataclass(frozen=True)
class BatchPhases:
    """Prefill and decode of LLM-PQ (arXiv 2403.01136, section 4.2)."""

    load: Workload

    def weights(self, pair: Pair) -> tuple[float, int, int]:
        rounds = self.load.output_tokens - 1
        prefills, decodes = (-(-self.load.concurrency // size) for size in (pair.prefill, pair.decode))
        return prefills - 1, (decodes - 1) * rounds, rounds

    def of_layers(self, layer: Callable[[Phase], float], pair: Pair) -> Seconds:
        return layer(prefill_phase(self.load, pair.prefill)), layer(decode_phase(self.load, pair.decode))

    def of_a_step(self, beside: Callable[[Phase, int], float], pair: Pair) -> Seconds:
        prefill, decode = prefill_phase(self.load, pair.prefill), decode_phase(self.load, pair.decode)
        return beside(prefill, pair.prefill), beside(decode, pair.decode)

    def of_a_hop(self, sending: Sending, pair: Pair) -> Seconds:
        if sending.back:
            prompts = sending.sampled_seconds(pair.prefill, pair.prefill * self.load.prompt_tokens)
            return prompts, sending.sampled_seconds(pair.decode, pair.decode)
        return sending.seconds(pair.prefill * self.load.prompt_tokens), sending.seconds(pair.decode)


@dataclass(frozen=True)
class SteadyPhases:
    """What prompts add to a step that decodes, and such a step."""

    load: Workload

    def prompts(self, pair: Pair) -> Prompts:
        """Of a step that carries any."""
        most = min(pair.chunk, pair.prefill * self.load.prompt_tokens)
        return prompts_of_a_step(self.load, most, pair.decode)

    def weights(self, pair: Pair) -> tuple[float, int, int]:
        batch, rounds = self.load.concurrency, self.load.output_tokens - 1
        return max(0.0, batch * self.prompts(pair).steps - 1), (-(-batch // pair.decode) - 1) * rounds, rounds

    def of_layers(self, layer: Callable[[Phase], float], pair: Pair) -> Seconds:
        """Linears are computed once for all rows of a step, attention apart for each sequence."""
        prompts = self.prompts(pair)
        chunk = Phase(1, prompts.tokens, prompts.past + prompts.tokens / 2)
        attention = prompts.sequences * max(0.0, layer(chunk) - layer(chunk._replace(context=0)))
        together, decoding = Phase(1, pair.decode + prompts.rows, 0), Phase(pair.decode, 1, 0)
        rows = max(0.0, layer(together) - layer(decoding))
        return rows + attention, layer(decode_phase(self.load, pair.decode))

    def begun(self, layer: Callable[[Phase], float], pair: Pair) -> float:
        """Seconds that prompts add to a layer however few they are: where the line through the whole and a small part of a step's tokens begins.
        Few tokens read nearly all experts, and a processor takes longer for each of few rows than of many.
        """
        rows = self.prompts(pair).rows
        few = -(-rows // _FEW)
        if few == rows:
            return 0.0
        alone = layer(Phase(pair.decode, 1, 0))
        some, whole = (layer(Phase(1, pair.decode + each, 0)) - alone for each in (few, rows))
        return min(max(0.0, (rows * some - few * whole) / (rows - few)), max(0.0, whole))

    def of_a_step(self, beside: Callable[[Phase, int], float], pair: Pair) -> Seconds:
        prompts = self.prompts(pair)
        count = pair.decode + prompts.sequences
        carrying = Phase(math.ceil(count), max(1, round((pair.decode + prompts.rows) / count)), 0)
        decode = beside(decode_phase(self.load, pair.decode), pair.decode)
        sampled = pair.decode + math.ceil(prompts.sequences / max(1.0, prompts.steps))
        return max(0.0, beside(carrying, sampled) - decode), decode

    def of_a_hop(self, sending: Sending, pair: Pair) -> Seconds:
        """What prompts add is the link's; tokens that are sampled of them are few."""
        rows = self.prompts(pair).rows
        if sending.back:
            return sending.back_busy_seconds(rows), sending.sampled_seconds(pair.decode, pair.decode)
        return sending.busy_seconds(rows), sending.seconds(pair.decode)
