"""OpenAI's answers: one shape for completions, one for chat, whole and in chunks.

Used by `answers`. Pure: pieces of text in, JSON values out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from strata_runtime.gateway.http.prompts import Prepared
from strata_runtime.gateway.text.choice import Piece, ScoredToken
from strata_runtime.gateway.text.tokenizer import Tokenizer

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Envelope:
    """What every chunk of an answer repeats."""

    prepared: Prepared
    model: str
    fingerprint: str

    def wrap(self, kind: str, choices: list[Json], usage: Json | None) -> Json:
        return {
            "id": self.prepared.id,
            "object": kind,
            "created": self.prepared.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "choices": choices,
            "usage": usage,
        }


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> Json:
    """`cached_tokens`: of the prompts, those whose keys and values were there already."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


class Shape(Protocol):
    """One of the two interfaces. A choice's pieces come in order; choices of one answer are interleaved."""

    kind: str
    chunk_kind: str

    def opening(self, index: int) -> Json | None:
        """What a stream says of a choice before its first piece."""
        ...

    def delta(self, index: int, piece: Piece) -> Json:
        """A piece of a choice in a stream."""
        ...

    def logprobs(self, index: int, tokens: Sequence[ScoredToken]) -> Json | None:
        """The log probabilities of a choice's next tokens: lists by name, and None where there is nothing to tell."""
        ...

    def whole(self, index: int, text: str, logprobs: Json | None, finish_reason: str | None) -> Json:
        """A choice that is complete."""
        ...


class CompletionShape:
    """`choices[].text`, with log probabilities as parallel lists (the older shape)."""

    kind = "text_completion"
    chunk_kind = "text_completion"

    def __init__(self, prepared: Prepared, tokenizer: Tokenizer, *, logprobs: bool) -> None:
        self._prepared = prepared
        self._tokenizer = tokenizer
        self._logprobs = logprobs
        self._offsets = [0] * len(prepared.requests)  # characters of each choice's tokens so far

    def opening(self, index: int) -> Json | None:
        echo = self._prepared.echo(index)
        return self._choice(index, echo, self.logprobs(index, ()), None) if echo else None

    def delta(self, index: int, piece: Piece) -> Json:
        return self._choice(index, piece.text, self.logprobs(index, piece.tokens), piece.finish_reason)

    def whole(self, index: int, text: str, logprobs: Json | None, finish_reason: str | None) -> Json:
        return self._choice(index, self._prepared.echo(index) + text, logprobs, finish_reason)

    def _choice(self, index: int, text: str, logprobs: Json | None, finish_reason: str | None) -> Json:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}

    def logprobs(self, index: int, tokens: Sequence[ScoredToken]) -> Json | None:
        if not self._logprobs:
            return None
        texts = [self._text(scored.token) for scored in tokens]
        offsets = []
        for text in texts:
            offsets.append(self._offsets[index])
            self._offsets[index] += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [scored.logprob for scored in tokens],
            "top_logprobs": [self._top(scored) for scored in tokens],
            "text_offset": offsets,
        }

    def _top(self, scored: ScoredToken) -> Mapping[str, float]:
        """Of tokens with the same text the more likely one; the chosen token is always there."""
        ranked = {self._text(scored.token): scored.logprob}
        for token, logprob in scored.top:
            ranked.setdefault(self._text(token), logprob)
        return ranked

    def _text(self, token: int) -> str:
        return self._tokenizer.token_bytes(token).decode("utf-8", "replace")


class ChatShape:
    """`choices[].message` and `choices[].delta`, with one log probability object per token."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(self, tokenizer: Tokenizer, *, logprobs: bool) -> None:
        self._tokenizer = tokenizer
        self._logprobs = logprobs

    def opening(self, index: int) -> Json | None:
        delta = {"role": "assistant", "content": "", "refusal": None}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def delta(self, index: int, piece: Piece) -> Json:
        delta = {"content": piece.text} if piece.text or piece.tokens else {}
        return {
            "index": index,
            "delta": delta,
            "logprobs": self.logprobs(index, piece.tokens),
            "finish_reason": piece.finish_reason,
        }

    def whole(self, index: int, text: str, logprobs: Json | None, finish_reason: str | None) -> Json:
        return {
            "index": index,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }

    def logprobs(self, index: int, tokens: Sequence[ScoredToken]) -> Json | None:  # noqa: ARG002 (the same at any place)
        if not self._logprobs:
            return None
        content = [
            {
                **self._scored(scored.token, scored.logprob),
                "top_logprobs": [self._scored(token, logprob) for token, logprob in scored.top],
            }
            for scored in tokens
        ]
        return {"content": content, "refusal": None}

    def _scored(self, token: int, logprob: float) -> Json:
        data = self._tokenizer.token_bytes(token)
        return {"token": data.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(data)}
