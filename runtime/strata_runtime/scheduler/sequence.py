"""A sequence: one request as the leader runs it. Used by the scheduler; knows no pages and no batches."""

from dataclasses import dataclass, field

from strata_planner.contract.frames import FinishReason, SampledToken, Sampling, Submit


@dataclass(slots=True)
class Sequence:
    """The truth of a sequence is its tokens: prompt, what was delivered before, what was sampled since."""

    sequence: int
    request: str
    tokens: list[int]
    prompt_length: int
    max_tokens: int
    stop_tokens: frozenset[int]
    sampling: Sampling
    computed: int = 0  # positions whose KV exists or is on its way through the stages
    opened: bool = False  # the stages know its sampling parameters
    alone: bool = False  # until its first token no other sequence is in its steps
    finish: FinishReason | None = field(default=None)

    @classmethod
    def of(cls, submit: Submit, sequence: int) -> "Sequence":
        return cls(
            sequence=sequence,
            request=submit.request,
            tokens=[*submit.prompt, *submit.delivered],
            prompt_length=len(submit.prompt),
            max_tokens=submit.max_tokens,
            stop_tokens=frozenset(submit.stop_tokens),
            sampling=submit.sampling,
            alone=submit.alone,
        )

    @property
    def longest(self) -> int:
        """Positions the sequence may come to hold."""
        return self.prompt_length + self.max_tokens

    @property
    def answered(self) -> int:
        """Tokens of the answer so far, delivered ones included."""
        return len(self.tokens) - self.prompt_length

    def take(self, sampled: SampledToken) -> int:
        """Append a sampled token and see whether it ends the sequence; the token's index in the answer."""
        index = self.answered
        self.tokens.append(sampled.token)
        self.alone = False
        if sampled.token in self.stop_tokens:
            self.finish = "stop"
        elif self.answered >= self.max_tokens:
            self.finish = "length"
        return index
