"""What `auto` computes for nothing is bounded, whatever the text, the streams and what rows cost: the engine over tokens that a test chooses."""

from dataclasses import dataclass
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata_planner.contract.frames import SampledToken, Sampling, Segment, StepResult, Submit
from strata_planner.contract.plan import MicroBatch, Speculation
from strata_runtime.scheduler.engine import Engine
from strata_runtime.scheduler.scheduler import Limits
from tests.laws import share

WORDS = 8
FIRST, ROWS, HITS = (
    8,
    0.01,
    4,
)  # rows in vain: at first, for each row of a sequence's own, for each guess that was right


@dataclass
class Rows:
    """Of all steps: sequences' own, verified guesses that were right or wrong, and first guesses that were right without a verification."""

    own: int = 0
    right: int = 0
    wrong: int = 0
    lucky: int = 0


@dataclass
class Load:
    """Streams over texts of few words. `right`: share of guesses that come true. `seconds` of a step, and of each of its rows."""

    streams: int
    right: float
    seconds: tuple[float, float]
    draw: Random

    def run(self, steps: int) -> Rows:
        engine = Engine(
            Limits(
                under_way=1,
                micro_batch=MicroBatch(prefill=max(self.streams, 4), decode=self.streams, max_step_tokens=2048),
                page_tokens=16,
                page_budget=64 * self.streams,
                max_model_len=1024,
                speculation=Speculation("auto", 4),
            )
        )
        rows = Rows()
        for number in range(steps):
            while engine.running + engine.waiting < self.streams:
                name = str(self.draw.random())
                prompt = [self.draw.randrange(WORDS) for _ in range(30)]
                engine.submit(Submit(name, prompt, [], 60, [], Sampling(), salt=self.draw.choice(["", name])))
            step = engine.next_step()
            assert step is not None
            tokens = [token for segment in step.segments for token in self._answered(engine, segment, rows)]
            once, each = self.seconds
            seconds = once + each * len(step.token_ids)
            engine.take(StepResult(0, 1, number, tokens, "weights", seconds))
        return rows

    def _answered(self, engine: Engine, segment: Segment, rows: Rows) -> list[SampledToken]:
        guesses = engine._by_number[segment.sequence].guesses
        guessed = [] if guesses is None else guesses.next
        taken, drawn = segment.sample - 1, list[int]()
        for place in range(segment.sample):
            word = self.draw.randrange(WORDS)
            if place < len(guessed):
                is_right = self.draw.random() < self.right
                word = guessed[place] if is_right else (guessed[place] + 1 + self.draw.randrange(WORDS - 1)) % WORDS
            drawn.append(word)
        if segment.sample:
            right = next((place for place in range(taken) if drawn[place] != guessed[place]), taken)
            rows.own += 1
            rows.right += right
            rows.wrong += taken - right
            rows.lucky += not taken and bool(guessed) and drawn[0] == guessed[0]
        return [
            SampledToken(segment.sequence, position, token, 0.0, [])
            for position, token in zip(segment.sampled, drawn, strict=True)
        ]


@settings(max_examples=share(60), deadline=None)
@given(
    streams=st.sampled_from([1, 4, 16, 64]),
    right=st.sampled_from([0.0, 0.0, 0.02, 0.3, 0.9]),
    row_seconds=st.sampled_from([1e-6, 1e-4, 1e-3]),
    seed=st.integers(0, 999),
)
def test_guesses_that_were_right_pay_for_wrong_ones(streams: int, right: float, row_seconds: float, seed: int) -> None:
    """So text that drafts badly costs one row in a hundred: where no guess is ever right, nothing else does."""
    rows = Load(streams, right, (0.005, row_seconds), Random(seed)).run(120)
    assert rows.wrong <= FIRST + ROWS * rows.own + HITS * (rows.right + rows.lucky)


@pytest.mark.parametrize("streams", [1, 4])
def test_good_guesses_are_verified_from_the_first_on(streams: int) -> None:
    rows = Load(streams, 0.95, (0.005, 1e-5), Random(1)).run(150)
    assert rows.right > 0.5 * rows.own
