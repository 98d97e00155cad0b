"""How model families mark their thoughts, as data.

Used by `answer_parser` to split an answer, and by the chat interface to tell whether the prompt has opened a thought.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """An answer is `begin` thoughts `end`, then content.

    Formats that name the kind of each message have a `header` before further messages of the answer, and a
    `content_begin` before content.
    """

    name: str
    begin: str
    end: str
    special_tokens: bool  # whether these texts are special tokens, so that decoding must keep those
    marks: tuple[str, ...]  # what a chat template of this family has
    header: str = ""
    content_begin: str = ""

    @property
    def begins(self) -> tuple[str, ...]:
        """What may begin a thought."""
        return (self.begin, self.header + self.begin) if self.header else (self.begin,)

    @property
    def content_begins(self) -> tuple[str, ...]:
        """What may stand before content and is no part of it."""
        return (self.content_begin, self.header + self.content_begin) if self.content_begin else ()

    def opened_by(self, prompt: str) -> bool:
        """Whether the rendered prompt ends within a thought, so that the answer begins there."""
        return prompt.rstrip().endswith(self.begin)


REASONING_FORMATS = (
    # gpt-oss, https://cookbook.openai.com/articles/openai-harmony: only the analysis and the final channel
    ReasoningFormat(
        name="harmony",
        begin="<|channel|>analysis<|message|>",
        end="<|end|>",
        special_tokens=True,
        marks=("<|channel|>analysis", "<|channel|>final"),
        header="<|start|>assistant",
        content_begin="<|channel|>final<|message|>",
    ),
    ReasoningFormat(name="magistral", begin="[THINK]", end="[/THINK]", special_tokens=True, marks=("[THINK]",)),
    # DeepSeek-R1 and V3.1, Qwen3, QwQ: added tokens that are not special; templates cut the thoughts of earlier answers
    ReasoningFormat(name="think", begin="<think>", end="</think>", special_tokens=False, marks=("</think>",)),
)
_BY_NAME = {known.name: known for known in REASONING_FORMATS}
REASONING_NAMES = tuple(_BY_NAME)


def reasoning_format(name: str) -> ReasoningFormat:
    """The format of this name, one of `REASONING_NAMES`. Raises KeyError."""
    return _BY_NAME[name]


def detect(chat_template: str) -> ReasoningFormat | None:
    """The format whose texts a chat template has; None where the model does not seem to think aloud."""
    return next((known for known in REASONING_FORMATS if all(mark in chat_template for mark in known.marks)), None)
