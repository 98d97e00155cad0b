"""OpenAI's answers: one shape for completions, one for chat, whole and in chunks.

Used by `chunks`. Pure: pieces of text in, JSON values out.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import Protocol

from strata_runtime.gateway.http.dialect import Json
from strata_runtime.gateway.http.prompt_scores import PromptScores
from strata_runtime.gateway.http.prompts import Parsing, Prepared
from strata_runtime.gateway.text.answer_parser import AnswerParser, Parts, ToolCallDelta
from strata_runtime.gateway.text.choice import Piece, ScoredToken
from strata_runtime.gateway.text.tokenizer import Tokenizer


class Shape(Protocol):
    """One of the two interfaces. A choice's pieces come in order; choices of one answer are interleaved."""

    kind: str
    chunk_kind: str

    def opening(self, index: int) -> Json | None:
        """What a stream says of a choice before its first piece."""
        ...

    def delta(self, index: int, piece: Piece) -> Json | None:
        """A piece of a choice in a stream; None where it tells nothing yet."""
        ...

    def logprobs(self, index: int, piece: Piece) -> Json | None:
        """The log probabilities of a choice's next tokens: lists by name, and None where there is nothing to tell."""
        ...

    def whole(self, index: int, text: str, logprobs: Json | None, finish_reason: str | None) -> Json:
        """A choice that is complete."""
        ...

    def of_prompt(self) -> list[Json | None] | None:
        """Log probabilities of the prompt's own tokens that are told beside the choices."""
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
        self._scores = PromptScores(prepared, tokenizer)

    def opening(self, index: int) -> Json | None:
        """What is echoed. Its log probabilities come with the first token behind it."""
        echo = self._prepared.echo(index)
        return self._choice(index, echo, self.logprobs(index, Piece("", (), None)), None) if echo else None

    def delta(self, index: int, piece: Piece) -> Json:
        return self._choice(index, piece.text, self.logprobs(index, piece), piece.finish_reason)

    def whole(self, index: int, text: str, logprobs: Json | None, finish_reason: str | None) -> Json:
        choice = self._choice(index, self._prepared.echo(index) + text, logprobs, finish_reason)
        scores = self._scores.told(index)
        return choice if scores is None else {**choice, "prompt_logprobs": scores}

    def _choice(self, index: int, text: str, logprobs: Json | None, finish_reason: str | None) -> Json:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}

    def logprobs(self, index: int, piece: Piece) -> Json | None:
        self._scores.heard(index, piece)
        if not self._logprobs:
            return None
        tokens = (*self._echoed(index, piece), *piece.tokens)
        texts = [self._tokenizer.token_text(scored.token) for scored in tokens]
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

    def of_prompt(self) -> list[Json | None] | None:
        return None  # its choices have them: they may be of several prompts

    def _echoed(self, index: int, piece: Piece) -> list[ScoredToken]:
        """The prompt's tokens, where it is repeated, with the first piece."""
        if not piece.prompt or not self._prepared.echo(index):
            return []
        first, *others = self._prepared.prompt(index).tokens
        scored = [
            ScoredToken(token, each.logprob, tuple(each.top)) for token, each in zip(others, piece.prompt, strict=True)
        ]
        return [ScoredToken(first, None, ()), *scored]

    def _top(self, scored: ScoredToken) -> Mapping[str, float] | None:
        """Of tokens with the same text the more likely one; the chosen token is always there."""
        if scored.logprob is None:
            return None
        ranked = {self._tokenizer.token_text(scored.token): scored.logprob}
        for token, logprob in scored.top:
            ranked.setdefault(self._tokenizer.token_text(token), logprob)
        return ranked


class ChatShape:
    """`choices[].message` and `choices[].delta`, with one log probability object per token."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(self, prepared: Prepared, tokenizer: Tokenizer, *, logprobs: bool) -> None:
        self._tokenizer = tokenizer
        self._logprobs = logprobs
        self._scores = PromptScores(prepared, tokenizer)
        self._parsers = [parser_of(prepared.parsing, "call", request.id) for request in prepared.requests]

    def opening(self, index: int) -> Json | None:
        delta = {"role": "assistant", "content": "", "refusal": None}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def delta(self, index: int, piece: Piece) -> Json | None:
        logprobs = self.logprobs(index, piece)
        delta: Json = {}
        for parts in self._parts(index, piece.text, ends=piece.finish_reason is not None):
            _join(delta, "content", parts.content)
            _join(delta, "reasoning_content", parts.reasoning)
            if calls := [_call_delta(each) for each in parts.calls]:
                delta["tool_calls"] = delta.get("tool_calls", []) + calls
        if not delta and piece.finish_reason is None and logprobs is None:
            return None
        return {
            "index": index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": self._reason(index, piece.finish_reason),
        }

    def whole(self, index: int, text: str, logprobs: Json | None, finish_reason: str | None) -> Json:
        message: Json = {"role": "assistant", "content": "", "refusal": None}
        calls: list[Json] = []
        for parts in self._parts(index, text, ends=True):
            message["content"] += parts.content
            _join(message, "reasoning_content", parts.reasoning)
            for each in parts.calls:
                _add_call(calls, each)
        if calls:
            message["tool_calls"] = calls
            message["content"] = message["content"] or None
        reason = self._reason(index, finish_reason)
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}

    def _parts(self, index: int, text: str, *, ends: bool) -> Iterator[Parts]:
        parser = self._parsers[index]
        yield parser.push(text)
        if ends:
            yield parser.flush()

    def _reason(self, index: int, reason: str | None) -> str | None:
        return "tool_calls" if reason == "stop" and self._parsers[index].called else reason

    def logprobs(self, index: int, piece: Piece) -> Json | None:
        self._scores.heard(index, piece)
        if not self._logprobs:
            return None
        return {"content": scored_tokens(piece.tokens, self._tokenizer), "refusal": None}

    def of_prompt(self) -> list[Json | None] | None:
        return self._scores.told(0)


def scored_tokens(tokens: Sequence[ScoredToken], tokenizer: Tokenizer) -> list[Json]:
    """One object for each token."""

    def told(token: int, logprob: float | None) -> Json:
        return {"token": tokenizer.token_text(token), "logprob": logprob, "bytes": list(tokenizer.token_bytes(token))}

    return [
        {**told(each.token, each.logprob), "top_logprobs": [told(token, logprob) for token, logprob in each.top]}
        for each in tokens
    ]


def parser_of(parsing: Parsing, call_prefix: str, choice: str) -> AnswerParser:
    """For one choice; `call_prefix` is what the names of its calls begin with, and they follow from the choice's own name."""
    numbers = count()
    return AnswerParser(
        parsing.tool_format,
        parsing.reasoning,
        starts_in_reasoning=parsing.is_thinking,
        new_id=lambda: f"{call_prefix}_{hashlib.sha256(f'{choice}/{next(numbers)}'.encode()).hexdigest()[:24]}",
        schemas=parsing.schemas,
        most_calls=parsing.most_calls,
    )


def _join(fields: Json, name: str, text: str) -> None:
    if text:
        fields[name] = fields.get(name, "") + text


def _call_delta(call: ToolCallDelta) -> Json:
    """`id`, `type` and `name` come with a call's first piece."""
    if call.name is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.id, "type": "function", "function": function}


def _add_call(calls: list[Json], more: ToolCallDelta) -> None:
    """To the calls of a whole answer."""
    if more.name is None:
        calls[more.index]["function"]["arguments"] += more.arguments
        return
    delta = _call_delta(more)
    del delta["index"]
    calls.append(delta)
