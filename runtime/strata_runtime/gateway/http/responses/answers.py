"""Answers of the Responses interface: a response of items, whole or as typed events. Used by `answers`; pure."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec
from msgspec import Raw

from strata_runtime.gateway.errors import ApiError
from strata_runtime.gateway.http.blocks import Begins, Block, Blocks, Ends, Grows, Step
from strata_runtime.gateway.http.dialect import Json, Told, Usage, event
from strata_runtime.gateway.http.prompts import Prepared
from strata_runtime.gateway.http.shapes import scored_tokens
from strata_runtime.gateway.text.choice import Piece
from strata_runtime.gateway.text.tokenizer import Tokenizer

Status = Literal["in_progress", "completed", "incomplete", "failed"]
_PREFIXES = {"text": "msg", "reasoning": "rs", "call": "fc"}
_NOTHING = Raw(b"[]")


class ResponseDialect:
    """A `Dialect`. `said_again`: what an answer repeats of its request."""

    def __init__(self, prepared: Prepared, tokenizer: Tokenizer, model: str, said_again: Mapping[str, Any]) -> None:
        self._name = prepared.id.partition("-")[2]
        self._created = prepared.created
        self._tokenizer = tokenizer
        self._model = model
        self._said_again = said_again
        self._blocks = Blocks(prepared.parsing, "call", prepared.id)
        self._wants_logprobs = prepared.requests[0].sampling.logprobs >= 0
        self._waiting: list[Json] = []  # log probabilities of tokens whose text has not come yet
        self._logprobs = bytearray()  # JSON of all of them, without its end
        self._thought_tokens = 0
        self._is_cut = False
        self._number = 0  # of the next event

    def heard(self, index: int, piece: Piece) -> Json | None:  # noqa: ARG002 (there is one)
        self._steps(piece)
        return {"content": scored_tokens(piece.tokens, self._tokenizer)} if self._wants_logprobs else None

    def whole(self, choices: Sequence[Told], usage: Usage) -> Json:
        (told,) = choices
        logprobs = _NOTHING if told.logprobs is None else told.logprobs["content"] or _NOTHING
        return self._response(self._status, [self._item(block, logprobs) for block in self._blocks.all], usage)

    def opening(self, usage: Usage) -> Iterator[bytes]:  # noqa: ARG002 (told at the end)
        for kind in ("created", "in_progress"):
            yield self._event(kind, response=self._response("in_progress", [], None))

    def piece(self, index: int, piece: Piece) -> Iterator[bytes]:  # noqa: ARG002 (there is one)
        if self._wants_logprobs:
            self._waiting += scored_tokens(piece.tokens, self._tokenizer)
        for step in self._steps(piece):
            match step:
                case Begins(block):
                    yield from self._begun(block)
                case Grows(block, text):
                    yield self._grown(block, text)
                case Ends(block):
                    yield from self._ended(block)

    def ending(self, usage: Usage) -> Iterator[bytes]:
        yield self._event(self._status, response=self._response(self._status, self._items(), usage))

    def failure(self, error: ApiError) -> bytes:
        """What there is of the answer, and why there is no more."""
        self._is_cut = True
        response = self._response("failed", self._items(), None)
        response["error"] = {"code": "server_error", "message": str(error)}
        return self._event("failed", response=response)

    def _steps(self, piece: Piece) -> list[Step]:
        """What a piece adds. A token is a thought's if its text, or what waits for more, is."""
        self._is_cut = piece.finish_reason == "length"
        steps = list(self._blocks.push(piece.text, ends=piece.finish_reason is not None))
        if piece.tokens and self._blocks.all and self._blocks.all[-1].kind == "reasoning":
            self._thought_tokens += 1
        return steps

    @property
    def _status(self) -> Status:
        return "incomplete" if self._is_cut else "completed"

    def _response(self, status: Status, output: list[Json], usage: Usage | None) -> Json:
        return {
            "id": f"resp_{self._name}",
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self._model,
            "output": output,
            "usage": None if usage is None else self._told(usage),
            **self._said_again,
        }

    def _told(self, usage: Usage) -> Json:
        return {
            "input_tokens": usage.prompt,
            "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
            "output_tokens": usage.completion,
            "output_tokens_details": {"reasoning_tokens": self._thought_tokens},
            "total_tokens": usage.prompt + usage.completion,
        }

    def _items(self) -> list[Json]:
        return [self._item(block, self._all_logprobs()) for block in self._blocks.all]

    def _all_logprobs(self) -> Raw:
        return Raw(bytes(self._logprobs) + b"]") if self._logprobs else _NOTHING

    def _item(self, block: Block, logprobs: Any, status: Status | None = None) -> Json:
        """`status`: by default how the answer ended, for the last item."""
        ended: Status = "incomplete" if self._is_cut and block is self._blocks.all[-1] else "completed"
        fields = {"id": self._id(block), "status": status or ended}
        parts = [] if status == "in_progress" else [_part(block.kind, block.text, logprobs)]
        match block.kind:
            case "text":
                return {"type": "message", **fields, "role": "assistant", "content": parts}
            case "reasoning":
                return {"type": "reasoning", **fields, "summary": [], "content": parts}
            case "call":
                call = {"call_id": block.id, "name": block.name, "arguments": block.text}
                return {"type": "function_call", **fields, **call}

    def _id(self, block: Block) -> str:
        return f"{_PREFIXES[block.kind]}_{self._name}_{block.index}"

    def _begun(self, block: Block) -> Iterator[bytes]:
        item = self._item(Block(block.index, block.kind, block.id, block.name), _NOTHING, "in_progress")
        yield self._event("output_item.added", output_index=block.index, item=item)
        if block.kind != "call":
            yield self._of(block, "content_part.added", content_index=0, part=_part(block.kind, "", _NOTHING))

    def _grown(self, block: Block, text: str) -> bytes:
        match block.kind:
            case "text":
                return self._of(block, "output_text.delta", content_index=0, delta=text, logprobs=self._next_logprobs())
            case "reasoning":
                return self._of(block, "reasoning_text.delta", content_index=0, delta=text)
            case "call":
                return self._of(block, "function_call_arguments.delta", delta=text)

    def _ended(self, block: Block) -> Iterator[bytes]:
        self._next_logprobs()  # of tokens without text
        logprobs, text = self._all_logprobs(), block.text
        if block.kind == "call":
            yield self._of(block, "function_call_arguments.done", name=block.name, arguments=text)
        else:
            if block.kind == "text":
                yield self._of(block, "output_text.done", content_index=0, text=text, logprobs=logprobs)
            else:
                yield self._of(block, "reasoning_text.done", content_index=0, text=text)
            yield self._of(block, "content_part.done", content_index=0, part=_part(block.kind, text, logprobs))
        yield self._event("output_item.done", output_index=block.index, item=self._item(block, logprobs))

    def _next_logprobs(self) -> list[Json]:
        """Those that wait, which belong to the text that comes now."""
        waiting, self._waiting = self._waiting, []
        if waiting:
            self._logprobs += (b"," if self._logprobs else b"[") + msgspec.json.encode(waiting)[1:-1]
        return waiting

    def _of(self, block: Block, kind: str, **fields: Any) -> bytes:
        return self._event(kind, item_id=self._id(block), output_index=block.index, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        name, number = f"response.{kind}", self._number
        self._number += 1
        return event({"type": name, "sequence_number": number, **fields}, name)


def _part(kind: str, text: str, logprobs: Any) -> Json:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
