"""What of the prompts a step carries beside the sequences that decode. Asked by the search for every choice of micro-batches."""

from typing import NamedTuple

from strata_planner.question.workload import Workload

_PARTS_OF_OTHERS = 2  # the end of a prompt and the beginning of another, beside the whole ones of a step


class Prompts(NamedTuple):
    """`sequences` chunks of `tokens` each, which come after `past` tokens of their prompts on average. `steps`: that carry one prompt; less
    than 1 where several share one.
    """

    sequences: float
    tokens: int
    past: float
    steps: float

    @property
    def rows(self) -> int:
        """Tokens of all of them."""
        return round(self.sequences * self.tokens)


def most_prompts(workload: Workload, most_tokens: int) -> int:
    """Of which a step of so many tokens of prompts carries all or a part."""
    return min(most_tokens // workload.prompt_tokens + _PARTS_OF_OTHERS, workload.concurrency)


def prompts_of_a_step(workload: Workload, most_tokens: int, decoding: int) -> Prompts:
    """`most_tokens`: of prompts in one step. Of `decoding` sequences in a step each ends, and is followed by a prompt, once in so many steps
    as an answer has tokens; prompts that come together go together as far as they fit.
    """
    prompt = workload.prompt_tokens
    if most_tokens < prompt:
        steps = -(-prompt // most_tokens)
        tokens = -(-prompt // steps)
        return Prompts(1.0, tokens, (steps - 1) / 2 * tokens, float(steps))
    sequences = min(max(1.0, decoding / workload.output_tokens), most_tokens // prompt)
    return Prompts(sequences, prompt, 0.0, 1 / sequences)
