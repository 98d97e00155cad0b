"""OpenAI's completions and chat completions: an envelope around the choices that `shapes` makes.

Made by `app`, used by `answers`. Pure.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from strata_runtime.gateway.errors import ApiError
from strata_runtime.gateway.http.dialect import Json, Told, Usage, event
from strata_runtime.gateway.http.prompts import Prepared
from strata_runtime.gateway.http.shapes import Shape
from strata_runtime.gateway.text.choice import Piece

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Chunks:
    """A `Dialect`. Every chunk of an answer repeats what is here."""

    prepared: Prepared
    shape: Shape
    model: str
    fingerprint: str

    def heard(self, index: int, piece: Piece) -> Json | None:
        return self.shape.logprobs(index, piece)

    def whole(self, choices: Sequence[Told], usage: Usage) -> Json:
        shaped = [
            self.shape.whole(index, told.text, told.logprobs, told.finish_reason) for index, told in enumerate(choices)
        ]
        answer = self._wrap(self.shape.kind, shaped, usage)
        scores = self.shape.of_prompt()
        return answer if scores is None else {**answer, "prompt_logprobs": scores}

    def opening(self, usage: Usage) -> Iterator[bytes]:  # noqa: ARG002 (told at the end)
        for index in range(len(self.prepared.requests)):
            yield from self._chunk(self.shape.opening(index))

    def piece(self, index: int, piece: Piece) -> Iterator[bytes]:
        wants_tokens = self.prepared.requests[0].sampling.logprobs >= 0
        if piece.text or piece.finish_reason or (piece.tokens and wants_tokens):
            yield from self._chunk(self.shape.delta(index, piece))

    def ending(self, usage: Usage) -> Iterator[bytes]:
        if self.prepared.body.include_usage:
            yield event(self._wrap(self.shape.chunk_kind, [], usage))
        yield DONE

    def failure(self, error: ApiError) -> bytes:
        return event(error.body())

    def _chunk(self, choice: Json | None) -> Iterator[bytes]:
        if choice is not None:
            yield event(self._wrap(self.shape.chunk_kind, [choice], None))

    def _wrap(self, kind: str, choices: list[Json], usage: Usage | None) -> Json:
        return {
            "id": self.prepared.id,
            "object": kind,
            "created": self.prepared.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "choices": choices,
            "usage": None if usage is None else _told(usage),
        }


def _told(usage: Usage) -> Json:
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
    }
