"""The parts of an assistant's answer as they are streamed: content, reasoning, pieces of tool calls.

`answer_parser` makes them with `PartsBuilder`; the chat interface turns them into chunks, others into blocks.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Content:
    """Text for who asked."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text of a thought."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """What is new of one call. `id` and `name` come once, with its first delta; `arguments` are pieces of JSON text."""

    index: int
    id: str | None
    name: str | None
    arguments: str


Segment: TypeAlias = Content | Reasoning | ToolCallDelta


@dataclass(frozen=True, slots=True)
class Parts:
    """What a piece of text adds to an answer, in its order. What one call gains is not interrupted by anything else."""

    segments: tuple[Segment, ...] = ()

    @property
    def content(self) -> str:
        return "".join(segment.text for segment in self.segments if isinstance(segment, Content))

    @property
    def reasoning(self) -> str:
        return "".join(segment.text for segment in self.segments if isinstance(segment, Reasoning))

    @property
    def calls(self) -> tuple[ToolCallDelta, ...]:
        return tuple(segment for segment in self.segments if isinstance(segment, ToolCallDelta))


class _Growing:
    """A segment that may get more text until it is taken."""

    def __init__(self, make: Callable[[str], Segment], kind: object) -> None:
        self._make = make
        self.kind = kind
        self.texts: list[str] = []

    def segment(self) -> Segment:
        return self._make("".join(self.texts))


class PartsBuilder:
    """Collects the parts of one push, and decides on white space around them.

    White space where content begins, and behind a call, waits for what follows: before text it is content, before a
    call it is dropped. Newlines between reasoning and content are dropped.
    """

    def __init__(self, new_id: Callable[[], str], most_calls: int | None = None) -> None:
        """`most_calls`: further ones are read and dropped."""
        self._new_id = new_id
        self._most_calls = math.inf if most_calls is None else most_calls
        self._growing: list[_Growing] = []
        self._spaces: list[str] | None = []  # that wait; None within content
        self._behind_reasoning = False
        self.call_count = 0

    def add_content(self, text: str) -> None:
        if self._spaces is None:
            self._add(Content, Content, text)
            return
        self._spaces.append(text)
        if text and not text.isspace():
            waited = "".join(self._spaces)
            self._add(Content, Content, waited.lstrip("\r\n") if self._behind_reasoning else waited)
            self._spaces, self._behind_reasoning = None, False

    def add_reasoning(self, text: str) -> None:
        self._add(Reasoning, Reasoning, text)

    def end_reasoning(self) -> None:
        self._spaces, self._behind_reasoning = [], True

    def begin_call(self, name: str) -> None:
        self._spaces, self._behind_reasoning = [], False
        index, call_id = self.call_count, self._new_id()
        self.call_count += 1
        if index < self._most_calls:
            self._growing.append(_Growing(lambda arguments: ToolCallDelta(index, call_id, name, arguments), index))

    def add_arguments(self, text: str) -> None:
        """Of the call that was begun last."""
        index = self.call_count - 1
        if index >= self._most_calls:
            return
        self._add(lambda arguments: ToolCallDelta(index, None, None, arguments), index, text)

    def end(self) -> None:
        """The answer is over: white space that still waits is content where there is nothing else."""
        if self._spaces and not self.call_count and not self._behind_reasoning:
            self._add(Content, Content, "".join(self._spaces))
        self._spaces = None

    def take(self) -> Parts:
        parts = Parts(tuple(growing.segment() for growing in self._growing))
        self._growing = []
        return parts

    def _add(self, make: Callable[[str], Segment], kind: object, text: str) -> None:
        """To the last segment where it is of this kind: a type, or the number of a call."""
        if not text:
            return
        if not self._growing or self._growing[-1].kind != kind:
            self._growing.append(_Growing(make, kind))
        self._growing[-1].texts.append(text)
