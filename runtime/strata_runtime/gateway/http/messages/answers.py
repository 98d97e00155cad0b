"""Answers of the Messages interface: a message of blocks, whole or as named events. Used by `answers`; pure."""

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from msgspec import Raw
from pydantic_core import from_json

from strata_runtime.gateway.errors import ApiError
from strata_runtime.gateway.http.blocks import Begins, Block, Blocks, Ends, Grows, Step
from strata_runtime.gateway.http.dialect import Json, Told, Usage, event
from strata_runtime.gateway.http.messages.errors import error_body
from strata_runtime.gateway.http.prompts import Prepared
from strata_runtime.gateway.text.choice import Piece

MALFORMED = "INVALID_JSON"  # Anthropic's own name for arguments that are no JSON, in its guide to streamed tool calls


class MessageDialect:
    """A `Dialect`."""

    def __init__(self, prepared: Prepared, model: str, *, fills_context: bool) -> None:
        """`fills_context`: the answer ends where the model's context does, before it has as many tokens as asked for."""
        self._id = f"msg_{prepared.id.partition('-')[2]}"
        self._model = model
        self._blocks = Blocks(prepared.parsing, "toolu", prepared.id)
        self._length_reason = "model_context_window_exceeded" if fills_context else "max_tokens"
        self._end: Json = {}

    def heard(self, index: int, piece: Piece) -> Json | None:  # noqa: ARG002 (there is one)
        for _ in self._blocks.push(piece.text, ends=piece.finish_reason is not None):
            pass
        return None  # there are no log probabilities

    def whole(self, choices: Sequence[Told], usage: Usage) -> Json:
        (told,) = choices
        blocks = self._blocks.all
        end = self._ending(told.finish_reason, told.stop_string)
        content = [_whole(block, is_cut=block is blocks[-1] and told.finish_reason == "length") for block in blocks]
        return self._message(content, end, usage)

    def opening(self, usage: Usage) -> Iterator[bytes]:
        message = self._message([], {"stop_reason": None, "stop_sequence": None}, usage)
        yield _named({"type": "message_start", "message": message})

    def piece(self, index: int, piece: Piece) -> Iterator[bytes]:  # noqa: ARG002 (there is one)
        ends = piece.finish_reason is not None
        for step in self._blocks.push(piece.text, ends=ends):
            yield _named(_streamed(step))
        if ends:
            self._end = self._ending(piece.finish_reason, piece.stop_string)

    def ending(self, usage: Usage) -> Iterator[bytes]:
        yield _named({"type": "message_delta", "delta": self._end, "usage": _told(usage)})
        yield _named({"type": "message_stop"})

    def failure(self, error: ApiError) -> bytes:
        return _named(error_body(error.status, str(error)))

    def _message(self, content: list[Json], end: Json, usage: Usage) -> Json:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            **end,
            "usage": _told(usage),
        }

    def _ending(self, finish_reason: str | None, stop_string: str | None) -> Json:
        reason = "tool_use" if self._blocks.called else "end_turn"
        if stop_string is not None:
            reason = "stop_sequence"
        if finish_reason == "length":
            reason = self._length_reason
        return {"stop_reason": reason, "stop_sequence": stop_string}


def _whole(block: Block, *, is_cut: bool) -> Json:
    match block.kind:
        case "text":
            return {"type": "text", "text": block.text}
        case "reasoning":
            return {"type": "thinking", "thinking": block.text, "signature": ""}
        case "call":
            return {"type": "tool_use", "id": block.id, "name": block.name, "input": _input(block.text, is_cut=is_cut)}


def _input(arguments: str, *, is_cut: bool) -> Raw | Json:
    """An object. Of one that is cut off: as much as there is, as Anthropic's client makes it of a stream."""
    try:
        msgspec.json.decode(arguments or "{}", type=dict[str, Raw])
    except (msgspec.MsgspecError, ValueError, RecursionError):
        begun = _begun(arguments) if is_cut else None
        return {MALFORMED: arguments} if begun is None else begun
    return Raw(arguments.encode() or b"{}")


def _begun(arguments: str) -> Json | None:
    try:
        begun = from_json(arguments, allow_partial=True, allow_inf_nan=False)
    except ValueError:
        return None
    return begun if isinstance(begun, dict) else None


def _streamed(step: Step) -> Json:
    match step:
        case Begins(block):
            empty = Block(block.index, block.kind, block.id, block.name)
            return {"type": "content_block_start", "index": block.index, "content_block": _whole(empty, is_cut=False)}
        case Grows(block, text):
            return {"type": "content_block_delta", "index": block.index, "delta": _delta(block, text)}
        case Ends(block):
            return {"type": "content_block_stop", "index": block.index}


def _delta(block: Block, text: str) -> Json:
    match block.kind:
        case "text":
            return {"type": "text_delta", "text": text}
        case "reasoning":
            return {"type": "thinking_delta", "thinking": text}
        case "call":
            return {"type": "input_json_delta", "partial_json": text}


def _told(usage: Usage) -> dict[str, Any]:
    """Tokens that were cached are not among the `input_tokens`."""
    return {
        "input_tokens": usage.prompt - usage.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.completion,
    }


def _named(value: Json) -> bytes:
    return event(value, value["type"])
