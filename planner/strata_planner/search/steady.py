"""A pipeline that is never empty: requests a second, time to the first token and between tokens, with so many requests in flight.

Called by `prediction` for a plan and by `layouts.ways` for estimates, both with arrays [stages, loads]. Whoever has an answer is
followed by the next request (a closed loop), so that steps which only decode alternate with steps that carry a chunk of a prompt too. A
stage's seconds per request are therefore those of its prompt beside decoding and its share of the decoding steps.

Steps do not overtake each other. Behind a long one every stage waits: a round in which any of the steps is long takes as long as if all of
its stages met the long one in turn (the critical cycle of a flow shop, Baccelli et al., Synchronization and Linearity, 1992). That is
why prompts in small chunks, spread over all steps, cost a long pipeline much less than whole ones now and then. Where steps that are alike
vary, as on processors, neighbours wait for each other too: both go on with the later of the two. Little's law says how many of the
requests in flight are decoding.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from strata_planner.contract.plan import steps_under_way
from strata_planner.contract.steps import FEWEST_TOKENS, KEEPS_UP, STREAMS_PART
from strata_planner.search.exact.phases import Pair

Floats = npt.NDArray[np.float64]

_ROUNDS = 4  # of the fixed point; the share of requests that are decoding moves by less than a percent after the third


@dataclass(frozen=True)
class Load:
    """Arrays [loads]. `in_flight`: requests; `micro_batches`: that decoding ones are cut into; `under_way`: steps, at most; `prompt_steps`: steps
    that carry one prompt, less than 1 where several share one, and streams do not keep them short. `output_tokens` of each request,
    `prompt_tokens` that come before them; `prompt_variation` of these, the variance over the square of the mean. `has_experts`: of which few
    tokens read nearly all, so that steps take no small parts of prompts.
    """

    in_flight: Floats
    micro_batches: Floats
    under_way: Floats
    prompt_steps: Floats
    output_tokens: int
    prompt_tokens: int
    prompt_variation: float = 0.0
    has_experts: bool = False

    def at(self, chosen: npt.NDArray[np.intp]) -> "Load":
        """Of these loads alone."""
        arrays = (self.in_flight, self.micro_batches, self.under_way, self.prompt_steps)
        in_flight, count, under, steps = (each[chosen] for each in arrays)
        return replace(self, in_flight=in_flight, micro_batches=count, under_way=under, prompt_steps=steps)


@dataclass(frozen=True)
class StageSteps:
    """Seconds. Arrays [stages, loads]: `decode` of a step that only decodes, `prompts` what a chunk of prompts adds to it, `send` and
    `send_prompts` how long they keep the link to the next stage busy. `latency`, [stages, loads] or [stages, 1]: until what was sent is there. `varies`, likewise:
    a stage's `DeviceProfile.step_variation`. `begun`: what any prompt adds to a step, however few of its tokens, of the seconds that a chunk adds.
    """

    decode: Floats
    prompts: Floats
    send: Floats
    send_prompts: Floats
    latency: Floats
    varies: Floats
    begun: Floats

    def towards(self, other: "StageSteps", share: Floats) -> "StageSteps":
        """That part of the way [loads] to the seconds of the other's layers; hops are the same."""
        mine, theirs = (self.decode, self.prompts, self.begun), (other.decode, other.prompts, other.begun)
        decode, prompts, begun = (a + share * (b - a) for a, b in zip(mine, theirs, strict=True))
        return replace(self, decode=decode, prompts=prompts, begun=begun)


class Steady(NamedTuple):
    """Arrays [loads]: requests a second, seconds from arrival to the first token, seconds from one token to the next."""

    requests_per_second: Floats
    first_token: Floats
    next_token: Floats


def micro_batches_of(in_flight: int, stages: int, pair: Pair) -> float:
    """Of so many decoding requests: one for each stage where that goes, a little fewer where they do not come out even. Groups that were cut
    evenly fall apart again as requests end.
    """
    wished = min(steps_under_way(pair.count, stages), in_flight)
    return (wished + min(wished, -(-in_flight // pair.decode))) / 2


def long_rounds(load: Load, decoding: Floats, prompt_steps: Floats) -> tuple[Floats, Floats]:
    """Of a stage's steps the share that carry prompts; of rounds the share in which any step does. `decoding`: requests that are; `prompt_steps`:
    that carry one prompt.

    Chunks of one prompt are in steps one after the other, prompts come when others end.
    """
    others = decoding * (load.in_flight - 1) / load.in_flight / load.output_tokens  # prompts a round
    carrying = np.minimum(1.0, others * prompt_steps / load.micro_batches)
    begun = others * np.minimum(1.0, prompt_steps) / load.micro_batches
    return carrying, 1 - (1 - carrying) * np.exp(-(load.micro_batches - 1) * begun)


def least_share(stages: StageSteps, *, has_experts: bool) -> Floats:
    """[loads] The share of a chunk with which each of its tokens takes twice as long as in the whole chunk, of stages as slow as the slowest; 0 where no
    smaller one does. Of models with experts alone, whose layers are read nearly whole for any few tokens: what others take is known of an
    eighth of a chunk, and is less of a smaller part.
    """
    if not has_experts:
        return np.zeros(stages.begun.shape[1])
    begun, added = stages.begun.max(axis=0), np.maximum(stages.prompts.max(axis=0), 1e-12)
    share: Floats = begun / (added + begun)
    return share


def kept_short(load: Load, decoding: Floats, alone: Floats, added: Floats, begun: Floats, least: Floats) -> Floats:
    """The share of a chunk that steps take of prompts, so that streams keep their pace (contract.steps, `Pace`). `alone`: seconds of the slowest stage in
    a step that only decodes; `added`: what a whole chunk adds to it, `begun`: any chunk. `least`: the share below which none goes. The pace knows tokens to
    be as dear as they were in the chunks that it saw, small ones.

    A prompt counts itself and those that wait beside it. All steps under way take at least some more than the workload brings. What nothing
    decodes beside is not kept short; the mean is one of steps that a prompt takes, so that of shares it is the harmonic one.
    """
    others = decoding * (load.in_flight - 1) / load.in_flight
    waiting = load.in_flight - others
    pace = STREAMS_PART * waiting * alone / np.maximum(added + begun, 1e-12)
    pace = np.maximum(pace, np.maximum(least, FEWEST_TOKENS * load.prompt_steps / load.prompt_tokens))
    brought = KEEPS_UP * others / load.under_way / load.output_tokens * load.prompt_steps
    beside = np.minimum(1.0, np.maximum(pace, brought))
    kept: Floats = 1 / (1 + np.minimum(1.0, others) * (1 / beside - 1))
    return kept


def steady(stages: StageSteps, load: Load) -> Steady:
    """Infinite seconds stay infinite."""
    decode, carry = np.maximum(stages.decode, stages.send), stages.prompts + stages.decode
    alone, whole = stages.decode.max(axis=0), carry.max(axis=0)
    carry = np.maximum(carry, stages.send + stages.send_prompts)
    slowest = slowest_of(decode, stages.varies, load.micro_batches)
    slowest_whole = np.maximum(slowest_of(carry, stages.varies, load.micro_batches), 1e-12)
    hops = (stages.send + stages.latency).sum(axis=0)
    through = stages.decode.sum(axis=0) + hops
    begun, prompts = stages.begun.sum(axis=0), (stages.prompts + stages.send_prompts).sum(axis=0)
    beginning = slowest_of(np.maximum(decode, stages.decode + stages.begun), stages.varies, load.micro_batches)
    least, any_chunk = least_share(stages, has_experts=load.has_experts), stages.begun.max(axis=0)
    count = load.micro_batches
    quiet = np.maximum(through, count * slowest)
    decoding = load.in_flight
    rate = first = each = np.zeros_like(load.in_flight)
    for _ in range(_ROUNDS):
        taken = kept_short(load, decoding, alone, whole - alone, any_chunk, least)
        steps = load.prompt_steps / taken
        slowest_long = beginning + taken * (slowest_whole - beginning)
        through_long = through + begun + taken * (prompts - begun)
        pace = np.maximum(slowest_long, through_long / load.under_way)  # from one long step to the next
        carrying, long = long_rounds(load, decoding, steps)
        within = np.where(long > 0, carrying / np.maximum(long, 1e-12), 0.0)  # of a long round's steps
        work = count * (slowest + within * (slowest_long - slowest))
        beside = (count - 1) * slowest + slowest_long
        each = (1 - long) * quiet + long * np.maximum(np.maximum(through_long, work), beside)
        first = through_long + np.maximum(steps - 1, 0.0) * pace
        first = first + np.minimum(1.0, load.in_flight - 1) * each / count / 2
        first = first + _queue(load, steps, carrying) * pace
        answering = (load.output_tokens - 1) * each
        rate = np.minimum(load.in_flight / (first + answering), 1 / (steps * pace))
        first = np.maximum(first, load.in_flight / np.maximum(rate, 1e-300) - answering)
        decoding = np.minimum(load.in_flight, rate * answering)
    return Steady(rate, first, each)


def slowest_of(seconds: Floats, varies: Floats, steps: Floats) -> Floats:
    """The mean time [loads] between two ends of steps of the slowest stage, of `seconds` [stages, loads]; `steps` [loads]: that go round.

    With as many steps as stages, neighbours begin theirs together and wait for the later of the two, taken as normal and independent (C. E.
    Clark, The greatest of a finite set of random variables, 1961); a normal's spread is the square root of pi times its Gini coefficient. One
    step more lies ready before a stage that is done early, and hardly anything is waited for.
    """
    slowest: Floats = seconds.max(axis=0)
    if len(seconds) == 1 or not varies.any():
        return slowest
    variance = np.pi * (varies * seconds) ** 2
    other = np.roll(seconds, 1, axis=0)
    apart = np.sqrt(np.maximum(variance + np.roll(variance, 1, axis=0), 1e-300))
    by = (seconds - other) / apart
    share = _normal(by)
    later = seconds * share + other * (1 - share) + apart * np.exp(-(by**2) / 2) / np.sqrt(2 * np.pi)
    waiting: Floats = np.maximum(later.max(axis=0) - slowest, 0.0)
    return slowest + waiting * np.clip(len(seconds) + 1 - steps, 0.0, 1.0)


def _normal(x: Floats) -> Floats:
    """Its distribution function, to 1e-7 (Abramowitz and Stegun, 26.2.17)."""
    t = 1 / (1 + 0.2316419 * np.abs(x))
    tail = np.exp(-(x**2) / 2) / np.sqrt(2 * np.pi) * t
    tail *= 0.319381530 + t * (-0.356563782 + t * (1.781477937 + t * (-1.821255978 + t * 1.330274429)))
    above: Floats = np.where(x < 0, tail, 1 - tail)
    return above


def _queue(load: Load, prompt_steps: Floats, carrying: Floats) -> Floats:
    """Steps that a prompt waits for those before it: a queue of as many prompts as there are requests, served as long as they are (Pollaczek and
    Khinchine's formula).
    """
    most = (load.in_flight - 1) / 2
    steps: Floats = prompt_steps * np.minimum(
        most, (1 + load.prompt_variation) * carrying / (2 * np.maximum(1 - carrying, 1e-9))
    )
    return steps
