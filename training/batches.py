"""Token batches in a fixed order: the same corpus, tokenizer and seed give the same batches.

Called by ``train``. Knows nothing of the model.
"""

from collections.abc import Iterator

import numpy as np
import torch
from transformers import PreTrainedTokenizerFast

from training.corpus import Corpus

QUESTIONS_EACH = 4
LAST_LIBRARY_SHARE = 0.12


def token_stream(tokenizer: PreTrainedTokenizerFast, documents: list[str]) -> np.ndarray:
    """All documents as one vector of token ids, each document behind one separator."""
    separator = tokenizer.bos_token_id
    rows = tokenizer(documents, add_special_tokens=False, verbose=False)["input_ids"]
    return np.concatenate([np.array([separator, *row], dtype=np.int64) for row in rows])


class Batches:
    """Rows of ``context + 1`` tokens, so that ``row[:-1]`` predicts ``row[1:]``; each row of an epoch is given once."""

    def __init__(self, corpus: Corpus, tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
        self._corpus, self._tokenizer, self._seed = corpus, tokenizer, seed

    def rows(self, context: int, batch_tokens: int, skip: int = 0, *, last: bool = False) -> Iterator[torch.Tensor]:
        """Endless batches ``[batch_tokens // context, context + 1]``, beginning after the first ``skip`` ones.

        ``last`` takes the mixture of the last phase.
        """
        per_batch = batch_tokens // context
        epoch = 0
        while True:
            documents = self._documents(self._seed + 1000 * context + epoch, last=last)
            stream = token_stream(self._tokenizer, documents)
            order = np.random.default_rng(self._seed + epoch).permutation((len(stream) - 1) // context)
            for first in range(0, len(order) - per_batch + 1, per_batch):
                if skip:
                    skip -= 1
                    continue
                starts = order[first : first + per_batch] * context
                yield torch.from_numpy(np.stack([stream[s : s + context + 1] for s in starts]))
            epoch += 1

    def _documents(self, seed: int, *, last: bool) -> list[str]:
        if last:
            return self._corpus.last_epoch(seed, LAST_LIBRARY_SHARE)
        return self._corpus.epoch(seed, QUESTIONS_EACH)
