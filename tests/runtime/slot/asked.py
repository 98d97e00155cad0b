"""Requests that drafts are tried with: drawn and greedy, some of them with penalties or held to a form."""

from pathlib import Path

from strata_planner.contract.frames import Grammar, LogitRules, Sampling, Submit

STRATA_TINY = Path(__file__).parents[3] / "examples" / "models" / "strata-tiny"


def penalized(count: int = 6, answer: int = 40, *, repeats: int = 2) -> list[Submit]:
    """Greedy, drawn and with penalties, with prompts that have a beginning in common, which says something so many times."""
    penalties = LogitRules(frequency_penalty=0.6, repetition_penalty=1.2)
    return [
        Submit(
            f"r{number}",
            [*range(9, 15)] * repeats + [number],
            [],
            answer,
            [],
            Sampling(0.9 * (number % 2), top_k=3, seed=number, rules=penalties if number > 3 else None),
        )
        for number in range(count)
    ]


def held_and_free() -> list[Submit]:
    """Answers in a form in the midst of others that compile and end, for a model that knows its language."""
    form = Grammar("regex", "(yes|no|perhaps)( and (yes|no|perhaps)){6}", (3,))
    return [
        Submit(
            f"r{number}",
            [number, *range(50, 60)],
            [],
            24,
            [3],
            Sampling(0.8 * (number % 2), seed=number, rules=LogitRules(grammar=form) if number < 3 else None),
        )
        for number in range(5)
    ]
