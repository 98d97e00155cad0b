"""Text to tokens and back, without generating anything: POST /tokenize and /detokenize, in vLLM's shapes.

Called by `app`, off its event loop. Pure; of a pipeline it knows how many tokens one would take, where there is one.
"""

from typing import Any

import msgspec
from msgspec import Raw

from strata_runtime.gateway.errors import InvalidRequestError
from strata_runtime.gateway.http.bodies import read_prompt, read_tokens
from strata_runtime.gateway.http.conversation import conversation
from strata_runtime.gateway.http.tools import tools_of
from strata_runtime.gateway.text.tokenizer import Tokenizer

# Tokens that a deployment with a shorter context, or with none yet, takes too: who counts them may have too many.
LEAST_BOUND = 2**15
NOTHING = Raw(b"null")


class TokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    """POST /tokenize: a `prompt`, or `messages` as the chat template has them."""

    model: str | None = None
    prompt: Raw = msgspec.field(default_factory=lambda: NOTHING)
    messages: Raw = msgspec.field(default_factory=lambda: NOTHING)
    add_special_tokens: bool | None = None  # true for a prompt; templates write their own
    add_generation_prompt: bool = True  # of a chat template: what the assistant's answer begins with
    continue_final_message: bool = False
    tools: Raw | None = None
    chat_template_kwargs: dict[str, Any] = {}
    return_token_strs: bool = False


class DetokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    """POST /detokenize."""

    model: str | None = None
    tokens: Raw


def bound_of(max_tokens: int) -> int:
    """Most tokens of one request, where prompt and answer may have `max_tokens`; 0: nobody knows yet."""
    return max(max_tokens, LEAST_BOUND)


def tokenize(body: TokenizeBody, tokenizer: Tokenizer, max_tokens: int) -> bytes:
    """The answer as JSON, also where a pipeline would not take so many. Raises InvalidRequestError beyond `bound_of`."""
    tokens = tokens_of(body, tokenizer, max_tokens)
    return msgspec.json.encode(
        {
            "count": len(tokens),
            "max_model_len": max_tokens or None,
            "tokens": tokens,
            "token_strs": tokenizer.pieces(tokens) if body.return_token_strs else None,
        }
    )


def tokens_of(body: TokenizeBody, tokenizer: Tokenizer, max_tokens: int) -> list[int]:
    """Of a prompt or messages."""
    if (body.prompt == NOTHING) == (body.messages == NOTHING):
        how = "missing: one of them is required" if body.prompt == NOTHING else "both there: send one of them"
        raise InvalidRequestError(f"prompt and messages are {how}", param="prompt")
    most = bound_of(max_tokens)
    text = _prompt(body, tokenizer, most) if body.messages == NOTHING else _chat(body, tokenizer, most)
    special = body.messages == NOTHING if body.add_special_tokens is None else body.add_special_tokens
    return tokenizer.encode(text, add_special_tokens=special)


def detokenize(body: DetokenizeBody, tokenizer: Tokenizer, max_tokens: int) -> bytes:
    """The answer as JSON: all text that the tokens stand for, special ones too. Raises InvalidRequestError."""
    tokens = read_tokens(body.tokens, "tokens", bound_of(max_tokens))
    end = max(tokenizer.rows, tokenizer.vocabulary_size)
    if max(tokens, default=0) >= end:
        raise InvalidRequestError(
            f"tokens has {max(tokens)}: this model's vocabulary ends at {end - 1}; use its own tokenizer",
            param="tokens",
        )
    return msgspec.json.encode({"prompt": tokenizer.decode(tokens, special_tokens=True)})


def _prompt(body: TokenizeBody, tokenizer: Tokenizer, most: int) -> str:
    if bytes(body.prompt)[:1] != b'"':
        raise InvalidRequestError("prompt is no text: send one string", param="prompt")
    text = read_prompt(body.prompt, "prompt", most)
    assert isinstance(text, str)
    _check_length(text, tokenizer, most, "prompt")
    return text


def _chat(body: TokenizeBody, tokenizer: Tokenizer, most: int) -> str:
    messages = conversation(body.messages, most)
    for message in messages:
        _check_length(message["content"], tokenizer, most, "messages")
    rendered = tokenizer.render_chat(
        messages,
        tools=tools_of(body.tools, None).given,
        add_generation_prompt=body.add_generation_prompt and not body.continue_final_message,
        continue_final_message=body.continue_final_message,
        variables=body.chat_template_kwargs,
    )
    _check_length(rendered, tokenizer, most, "messages")
    return rendered


def _check_length(text: str, tokenizer: Tokenizer, most: int, param: str) -> None:
    """Before time and memory go into tokens: while they are made, text takes hundreds of bytes a character."""
    if len(text.encode()) > most * tokenizer.most_bytes_per_token or tokenizer.exceeds(text, most):
        raise InvalidRequestError(
            f"{param} has {len(text)} characters of text, more than {most} tokens, the most at once: send it in parts",
            param=param,
            code="context_length_exceeded",
        )
