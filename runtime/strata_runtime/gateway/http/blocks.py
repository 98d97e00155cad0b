"""An answer as blocks that follow each other: thoughts, text and calls, in the order in which they were written.

Used by the interfaces whose answers are such lists. Pure; what blocks there are does not depend on the pieces of text.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from strata_runtime.gateway.http.prompts import Parsing
from strata_runtime.gateway.http.shapes import parser_of
from strata_runtime.gateway.text.answer_parts import Content, Reasoning, Segment, ToolCallDelta

Kind: TypeAlias = Literal["reasoning", "text", "call"]


@dataclass(slots=True)
class Block:
    """`id` and `name` are a call's, whose text is its arguments."""

    index: int
    kind: Kind
    id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.pieces)


@dataclass(frozen=True, slots=True)
class Begins:
    """A block, which has no text yet."""

    block: Block


@dataclass(frozen=True, slots=True)
class Grows:
    """By this text, which the block has already."""

    block: Block
    text: str


@dataclass(frozen=True, slots=True)
class Ends:
    """The last of a block."""

    block: Block


Step: TypeAlias = Begins | Grows | Ends


class Blocks:
    """Fed with the text of one choice, in order."""

    def __init__(self, parsing: Parsing, call_prefix: str, choice: str) -> None:
        self._parser = parser_of(parsing, call_prefix, choice)
        self.all: list[Block] = []

    @property
    def called(self) -> bool:
        return self._parser.called

    def push(self, text: str, *, ends: bool) -> Iterator[Step]:
        """`ends`: no text comes behind this one."""
        for segment in self._parser.push(text).segments:
            yield from self._add(segment)
        if ends:
            for segment in self._parser.flush().segments:
                yield from self._add(segment)
            if self.all:
                yield Ends(self.all[-1])

    def _add(self, segment: Segment) -> Iterator[Step]:
        match segment:
            case Content(text):
                yield from self._grow("text", text)
            case Reasoning(text):
                yield from self._grow("reasoning", text)
            case ToolCallDelta(_, call_id, name, arguments):
                if name is not None:
                    yield from self._begin("call", call_id or "", name)
                yield from self._grow("call", arguments)

    def _grow(self, kind: Kind, text: str) -> Iterator[Step]:
        if not text:
            return
        if not self.all or self.all[-1].kind != kind:
            yield from self._begin(kind)
        self.all[-1].pieces.append(text)
        yield Grows(self.all[-1], text)

    def _begin(self, kind: Kind, call_id: str = "", name: str = "") -> Iterator[Step]:
        if self.all:
            yield Ends(self.all[-1])
        self.all.append(Block(len(self.all), kind, call_id, name))
        yield Begins(self.all[-1])
