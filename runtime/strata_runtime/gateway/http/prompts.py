"""From a request body to generation requests: token ids, sampling, stop rules, and the limits they must keep.

Called by `app` for both interfaces; pure apart from the clock and random identifiers. Knows no leaders.
"""

import hashlib
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass

from strata_planner.contract.frames import Sampling
from strata_runtime.gateway.errors import InvalidRequestError
from strata_runtime.gateway.http.parameters import ChatBody, CompletionBody, GenerationBody
from strata_runtime.gateway.routing.journal import GenerationRequest
from strata_runtime.gateway.text.tokenizer import Tokenizer

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's
_SEED_BITS = 63


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt; `echo` is text that the answer repeats first."""

    tokens: tuple[int, ...]
    echo: str = ""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A checked request: `requests[i]` is choice i, made from prompt i // n."""

    id: str
    created: int  # seconds since 1970
    body: GenerationBody
    prompts: tuple[Prompt, ...]
    requests: tuple[GenerationRequest, ...]

    @property
    def prompt_tokens(self) -> int:
        return sum(len(prompt.tokens) for prompt in self.prompts)

    def echo(self, choice: int) -> str:
        return self.prompts[choice // self.body.n].echo


def prepare_completion(body: CompletionBody, tokenizer: Tokenizer, limit: int) -> Prepared:
    """`limit`: most tokens of prompt and answer together. Raises InvalidRequestError."""
    prompts = tuple(_prompt(one, tokenizer, echo=body.echo) for one in _separate(body.prompt))
    top = -1 if body.logprobs is None else body.logprobs
    budgets = [_budget(prompt, body.max_tokens or DEFAULT_COMPLETION_TOKENS, "max_tokens", limit) for prompt in prompts]
    return _prepare("cmpl", body, prompts, budgets, _Rules(tokenizer, body, top))


def prepare_chat(body: ChatBody, tokenizer: Tokenizer, limit: int) -> Prepared:
    """The same for a conversation, which may use all tokens that are left when it names no maximum."""
    prompt = Prompt(tuple(tokenizer.encode_chat([message.for_template() for message in body.messages])))
    name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    wanted = body.max_completion_tokens or body.max_tokens
    budget = _budget(prompt, wanted, name, limit)
    top = body.top_logprobs if body.logprobs else -1
    return _prepare("chatcmpl", body, (prompt,), [budget], _Rules(tokenizer, body, top))


class _Rules:
    """Sampling and stop tokens of a body."""

    def __init__(self, tokenizer: Tokenizer, body: GenerationBody, logprobs: int) -> None:
        ends = () if body.ignore_eos else tokenizer.stop_tokens
        self.stop_tokens = tuple(dict.fromkeys((*ends, *body.stop_token_ids)))
        self._body = body
        self._logprobs = logprobs
        self._seed = secrets.randbits(_SEED_BITS) if body.seed is None else body.seed % (1 << _SEED_BITS)

    def sampling(self, choice: int) -> Sampling:
        body = self._body
        return Sampling(
            temperature=body.temperature,
            top_p=body.top_p,
            top_k=max(body.top_k, 0),
            seed=_seed_of(self._seed, choice),
            logprobs=self._logprobs,
        )


def _prepare(
    prefix: str, body: GenerationBody, prompts: tuple[Prompt, ...], budgets: Sequence[int], rules: _Rules
) -> Prepared:
    name = f"{prefix}-{secrets.token_hex(12)}"
    requests = tuple(
        GenerationRequest(
            id=f"{name}-{index}",
            prompt=prompts[index // body.n].tokens,
            max_tokens=budgets[index // body.n],
            stop_tokens=rules.stop_tokens,
            sampling=rules.sampling(index),
        )
        for index in range(len(prompts) * body.n)
    )
    return Prepared(name, int(time.time()), body, prompts, requests)


def _separate(prompt: str | list[str] | list[int] | list[list[int]]) -> list[str | list[int]]:
    """The prompts of a request: a string, strings, one list of token ids or several."""
    if isinstance(prompt, str):
        return [prompt]
    tokens = [part for part in prompt if isinstance(part, int)]
    if tokens:
        return [tokens]
    prompts = [part for part in prompt if not isinstance(part, int)]
    if not prompts:
        raise InvalidRequestError("prompt=[] has no prompt: send a string or token ids", param="prompt")
    return prompts


def _prompt(prompt: str | list[int], tokenizer: Tokenizer, *, echo: bool) -> Prompt:
    if isinstance(prompt, str):
        return Prompt(tuple(tokenizer.encode(prompt)), prompt if echo else "")
    beyond = next((token for token in prompt if token >= tokenizer.vocabulary_size), None)
    if beyond is not None:
        raise InvalidRequestError(
            f"prompt has token {beyond}: this model's vocabulary ends at {tokenizer.vocabulary_size - 1}; "
            "use its own tokenizer",
            param="prompt",
        )
    return Prompt(tuple(prompt), tokenizer.decode(prompt) if echo else "")


def _budget(prompt: Prompt, wanted: int | None, name: str, limit: int) -> int:
    """Tokens that the answer may have. `wanted` None: all that are left."""
    length = len(prompt.tokens)
    if length == 0:
        raise InvalidRequestError("the prompt has no token: send at least one character", param="prompt")
    if length >= limit:
        raise InvalidRequestError(
            f"the prompt has {length} tokens, this deployment takes at most {limit} for prompt and answer: shorten it",
            param="prompt" if name == "max_tokens" else "messages",
            code="context_length_exceeded",
        )
    if wanted is not None and length + wanted > limit:
        raise InvalidRequestError(
            f"the prompt has {length} tokens and {name}={wanted}, together {length + wanted}; this deployment takes at "
            f"most {limit}: shorten the prompt, or send {name}={limit - length} or less",
            param=name,
            code="context_length_exceeded",
        )
    return limit - length if wanted is None else wanted


def _seed_of(seed: int, choice: int) -> int:
    """Choice 0 draws with the seed itself; others must not repeat it."""
    if choice == 0:
        return seed
    digest = hashlib.sha256(f"{seed}/{choice}".encode()).digest()
    return int.from_bytes(digest[:8], "big") % (1 << _SEED_BITS)
