"""What the model made of a prompt's own tokens, as vLLM tells it (`prompt_logprobs`). Used by `shapes`; pure."""

from strata_planner.contract.frames import PromptScore
from strata_runtime.gateway.http.dialect import Json
from strata_runtime.gateway.http.prompts import Prepared
from strata_runtime.gateway.text.choice import Piece
from strata_runtime.gateway.text.tokenizer import Tokenizer


class PromptScores:
    """Of the choices of one answer, where they are wanted."""

    def __init__(self, prepared: Prepared, tokenizer: Tokenizer) -> None:
        self._is_wanted = prepared.body.prompt_logprobs is not None
        self._tokenizer = tokenizer
        self._told: dict[int, list[Json | None]] = {}

    def heard(self, index: int, piece: Piece) -> None:
        """They come with a choice's first piece; of a prompt of one token there are none."""
        if self._is_wanted:
            self._told.setdefault(index, [None, *map(self._of, piece.prompt)])

    def told(self, index: int) -> list[Json | None] | None:
        """An object for each token by its id, None for the first, which follows nothing."""
        return self._told.get(index)

    def _of(self, score: PromptScore) -> Json:
        likely = {token: (logprob, rank) for rank, (token, logprob) in enumerate(score.top, 1)}
        likely.setdefault(score.token, (score.logprob, score.rank))
        return {
            str(token): {"logprob": logprob, "rank": rank, "decoded_token": self._tokenizer.token_text(token)}
            for token, (logprob, rank) in likely.items()
        }
