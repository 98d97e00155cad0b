"""Request bodies of the OpenAI interface: what is taken, what is refused by name.

Read by `bodies`. Three kinds of fields: those of the models below are consumed; `HARMLESS` ones change nothing about
an answer by their own definition and are accepted; `UNSUPPORTED` ones are accepted only with the value that means "not
used". Everything else is unknown. Nothing is silently ignored: a client that asks for something gets it or an error.
"""

from typing import Annotated, Any

import msgspec
from msgspec import Meta, Raw

from strata_planner.contract.frames import MOST_LOGPROBS

HARMLESS = frozenset({
    "metadata", "parallel_tool_calls", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "service_tier",
    "store", "user",
})  # fmt: skip

# What each of these may be; null always counts as not given.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "bad_words": ([],),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "frequency_penalty": (0,),
    "function_call": ("none",),
    "functions": ([],),
    "guided_json": (),
    "logit_bias": ({},),
    "min_p": (0,),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "presence_penalty": (0,),
    "prompt_logprobs": (),
    "reasoning_effort": (),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "skip_special_tokens": (True,),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("none",),  # "auto" is a choice among tools: without them OpenAI refuses it, with them `tools` is
    "tools": ([],),
    "verbosity": (),
    "web_search_options": (),
}

MOST_STOP_STRINGS = 16
MOST_PRIORITY = 2**31 - 1
MOST_STOP_TOKENS = 128
MOST_CHOICES = 128
MOST_TOKENS = 2**31 - 1  # of anything that is counted in tokens: the real bounds come from the plan and the vocabulary

_StopString = Annotated[str, Meta(min_length=1, max_length=1024)]
_Count = Annotated[int, Meta(ge=1, le=MOST_TOKENS)]
TokenId = Annotated[int, Meta(ge=0, le=MOST_TOKENS)]


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`include_obfuscation` pads chunks against traffic analysis; there is no padding here."""

    include_usage: bool = False
    include_obfuscation: bool = False


class GenerationBody(msgspec.Struct, frozen=True, kw_only=True):
    """What completions and chat share. `top_k`, `ignore_eos`, `stop_token_ids`, `priority` and `cache_salt` are vLLM's extensions."""

    model: str
    max_tokens: _Count | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] = 1.0
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0
    top_k: Annotated[int, Meta(ge=-1, le=MOST_TOKENS)] = 0  # 0 and -1: all
    n: Annotated[int, Meta(ge=1, le=MOST_CHOICES)] = 1
    stop: _StopString | Annotated[list[_StopString], Meta(max_length=MOST_STOP_STRINGS)] = []
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MOST_STOP_TOKENS)] = []
    ignore_eos: bool = False
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    priority: Annotated[int, Meta(ge=0, le=MOST_PRIORITY)] = (
        0  # lower goes first: clients may let others pass, not push in
    )
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
    echo: bool = False
    logprobs: Annotated[int, Meta(ge=0, le=MOST_LOGPROBS)] | None = None


class ChatBody(GenerationBody, frozen=True, kw_only=True):
    """POST /v1/chat/completions. `max_completion_tokens` is the newer name of `max_tokens`."""

    messages: Raw
    max_completion_tokens: _Count | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Meta(ge=0, le=MOST_LOGPROBS)] = 0
