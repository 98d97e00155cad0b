"""The parts of an assistant's answer as they are streamed: content, reasoning, pieces of tool calls.

`answer_parser` makes them with `PartsBuilder`; the chat interface turns them into chunks.
"""

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """What is new of one call. `id` and `name` come once, with its first delta; `arguments` are pieces of JSON text."""

    index: int
    id: str | None
    name: str | None
    arguments: str


@dataclass(frozen=True, slots=True)
class Parts:
    """What a piece of text adds to an answer."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[ToolCallDelta, ...] = ()


@dataclass(slots=True)
class _NewOfCall:
    index: int
    id: str | None = None
    name: str | None = None
    arguments: list[str] = field(default_factory=list)

    def delta(self) -> ToolCallDelta:
        return ToolCallDelta(self.index, self.id, self.name, "".join(self.arguments))


class PartsBuilder:
    """Collects the parts of one push, and decides on white space around them.

    White space where content begins, and behind a call, waits for what follows: before text it is content, before a
    call it is dropped. Newlines between reasoning and content are dropped.
    """

    def __init__(self, new_id: Callable[[], str]) -> None:
        self._new_id = new_id
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[_NewOfCall] = []
        self._spaces: list[str] | None = []  # that wait; None within content
        self._behind_reasoning = False
        self.call_count = 0

    def add_content(self, text: str) -> None:
        if self._spaces is None:
            self._content.append(text)
            return
        self._spaces.append(text)
        if text and not text.isspace():
            waited = "".join(self._spaces)
            self._content.append(waited.lstrip("\r\n") if self._behind_reasoning else waited)
            self._spaces, self._behind_reasoning = None, False

    def add_reasoning(self, text: str) -> None:
        self._reasoning.append(text)

    def end_reasoning(self) -> None:
        self._spaces, self._behind_reasoning = [], True

    def begin_call(self, name: str) -> None:
        self._spaces, self._behind_reasoning = [], False
        self._calls.append(_NewOfCall(self.call_count, self._new_id(), name))
        self.call_count += 1

    def add_arguments(self, text: str) -> None:
        """Of the call that was begun last."""
        index = self.call_count - 1
        if not self._calls:
            self._calls.append(_NewOfCall(index))
        self._calls[-1].arguments.append(text)

    def end(self) -> None:
        """The answer is over: white space that still waits is content where there is nothing else."""
        if self._spaces and not self.call_count and not self._behind_reasoning:
            self._content += self._spaces
        self._spaces = None

    def take(self) -> Parts:
        calls = tuple(call.delta() for call in self._calls)
        parts = Parts("".join(self._content), "".join(self._reasoning), calls)
        self._content, self._reasoning, self._calls = [], [], []
        return parts
