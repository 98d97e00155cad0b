"""Request bodies of the OpenAI interface: what is taken, what is refused by name.

Read by `bodies`. Three kinds of fields: those of the models below are consumed; `HARMLESS` ones change nothing about
an answer by their own definition and are accepted; `UNSUPPORTED` ones are accepted only with the value that means "not
used". Everything else is unknown. Nothing is silently ignored: a client that asks for something gets it or an error.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Raw

from strata_planner.contract.frames import MOST_BAD_WORDS, MOST_BIASES, MOST_LOGPROBS

HARMLESS = frozenset({
    "metadata", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "service_tier", "store", "user",
})  # fmt: skip

# What each of these may be; null always counts as not given.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "chat_template": (),
    "function_call": ("none",),
    "functions": ([],),
    "guided_json": (),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "suffix": ("",),
    "verbosity": (),
    "web_search_options": (),
}


@dataclass(frozen=True, eq=False)
class Others:
    """What bodies of an interface may have beside their fields: `harmless`, and `unsupported` with what each may be."""

    harmless: frozenset[str]
    unsupported: Mapping[str, tuple[Any, ...]]


OPENAI = Others(HARMLESS, UNSUPPORTED)

MOST_STOP_STRINGS = 16
MOST_PRIORITY = 2**31 - 1
MOST_STOP_TOKENS = 128
MOST_CHOICES = 128
MOST_TOKENS = 2**31 - 1  # of anything that is counted in tokens: the real bounds come from the plan and the vocabulary

StopString = Annotated[str, Meta(min_length=1, max_length=1024)]
_Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
_Count = Annotated[int, Meta(ge=1, le=MOST_TOKENS)]
TOOL_NAME = "[a-zA-Z0-9_.:-]{1,128}"
ToolName = Annotated[str, Meta(pattern=f"^{TOOL_NAME}$")]
TokenId = Annotated[int, Meta(ge=0, le=MOST_TOKENS)]


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`include_obfuscation` pads chunks against traffic analysis; there is no padding here."""

    include_usage: bool = False
    include_obfuscation: bool = False


class GenerationBody(msgspec.Struct, frozen=True, kw_only=True):
    """What completions and chat share. Those behind `seed` are vLLM's extensions, all but the stream's two and `response_format`; `deadline_seconds` is ours."""

    model: str
    max_tokens: _Count | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] = 1.0
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0
    top_k: Annotated[int, Meta(ge=-1, le=MOST_TOKENS)] = 0  # 0 and -1: all
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0
    n: Annotated[int, Meta(ge=1, le=MOST_CHOICES)] = 1
    presence_penalty: _Penalty = 0.0
    frequency_penalty: _Penalty = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0.0, le=100.0)] = 1.0
    logit_bias: Annotated[dict[TokenId, Annotated[float, Meta(ge=-100.0, le=100.0)]], Meta(max_length=MOST_BIASES)] = {}
    bad_words: Annotated[list[StopString], Meta(max_length=MOST_BAD_WORDS // 2)] = []
    min_tokens: Annotated[int, Meta(ge=0, le=MOST_TOKENS)] = 0
    stop: StopString | Annotated[list[StopString], Meta(max_length=MOST_STOP_STRINGS)] = []
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MOST_STOP_TOKENS)] = []
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    prompt_logprobs: Annotated[int, Meta(ge=0, le=MOST_LOGPROBS)] | None = None  # of the prompt's own tokens
    response_format: Raw | None = None
    structured_outputs: Raw | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    priority: Annotated[int, Meta(ge=0, le=MOST_PRIORITY)] = (
        0  # lower goes first: clients may let others pass, not push in
    )
    deadline_seconds: Annotated[float, Meta(gt=0.0, le=86_400.0)] | None = None  # until the whole answer is there
    cache_salt: Annotated[str, Meta(min_length=1, max_length=256)] | None = None  # prefixes are shared among equal ones

    @property
    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionBody(GenerationBody, frozen=True, kw_only=True):
    """POST /v1/completions. `prompt` is counted before it is decoded (`bodies.separate`)."""

    prompt: Raw
    add_special_tokens: bool = True  # those that the model's tokenizer puts before a text
    echo: bool = False
    logprobs: Annotated[int, Meta(ge=0, le=MOST_LOGPROBS)] | None = None


class ChatBody(GenerationBody, frozen=True, kw_only=True):
    """POST /v1/chat/completions. `max_completion_tokens` is the newer name of `max_tokens`."""

    messages: Raw
    max_completion_tokens: _Count | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Meta(ge=0, le=MOST_LOGPROBS)] = 0
    tools: Raw | None = None
    tool_choice: Raw | None = None
    parallel_tool_calls: bool = True
    reasoning_effort: Annotated[str, Meta(max_length=64)] | None = None
    chat_template_kwargs: dict[str, Any] = {}
    add_special_tokens: bool = False  # templates write their own
    add_generation_prompt: bool | None = None  # by default where no message is continued
    continue_final_message: bool = False
