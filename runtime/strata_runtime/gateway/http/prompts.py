"""From a request body to generation requests: token ids, sampling, stop rules, and the limits they must keep.

Called by `app` for both interfaces, off its event loop; pure: what is chance in an answer is its `Birth`. Knows no leaders.
Everything is counted before it is built or tokenized.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
from msgspec import Raw

from strata_planner.contract.frames import LONGEST_BAD_WORD, LogitRules, Sampling
from strata_runtime.gateway.errors import InvalidRequestError
from strata_runtime.gateway.http.bodies import read_prompt, separate
from strata_runtime.gateway.http.conversation import Message, conversation, text_bytes
from strata_runtime.gateway.http.parameters import ChatBody, CompletionBody, GenerationBody
from strata_runtime.gateway.http.structured import Form, calls_form, form_of
from strata_runtime.gateway.http.tools import Tools, tools_of
from strata_runtime.gateway.keeping.birth import SEED_BITS, Birth
from strata_runtime.gateway.routing.journal import GenerationRequest
from strata_runtime.gateway.text.reasoning import ReasoningFormat
from strata_runtime.gateway.text.tokenizer import Tokenizer
from strata_runtime.gateway.text.tool_formats import TOOL_FORMAT_NAMES, ToolFormat, structural_tag

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's
MOST_SCORES = 2**20  # log probabilities of an answer that is not streamed: some 80 bytes each, all held until its end
MOST_PROMPT_SCORES = 2**19  # log probabilities of one prompt
PATIENCE_SECONDS = 600.0  # a request without a deadline lets those that came later with one pass for so long


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt; `echo` is text that the answer repeats first."""

    tokens: tuple[int, ...]
    echo: str = ""


@dataclass(frozen=True, slots=True)
class Parsing:
    """What is looked for in the text of an answer. `is_thinking`: it begins within a thought."""

    tool_format: ToolFormat | None = None
    schemas: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    reasoning: ReasoningFormat | None = None
    is_thinking: bool = False
    most_calls: int | None = None

    @property
    def special_tokens(self) -> bool:
        """Whether what is looked for may be one."""
        return any(each is not None and each.special_tokens for each in (self.tool_format, self.reasoning))


PLAIN = Parsing()


@dataclass(frozen=True, slots=True)
class Prepared:
    """A checked request: `requests[i]` is choice i, made from prompt i // n."""

    id: str
    created: int  # seconds since 1970
    body: GenerationBody  # without its prompt or messages
    prompts: tuple[Prompt, ...]
    requests: tuple[GenerationRequest, ...]
    form: Form | None = None
    parsing: Parsing = PLAIN

    @property
    def special_tokens(self) -> bool:
        """Whether they are part of the text."""
        return self.parsing.special_tokens or not self.body.skip_special_tokens

    @property
    def prompt_tokens(self) -> int:
        return sum(len(prompt.tokens) for prompt in self.prompts)

    def prompt(self, choice: int) -> Prompt:
        return self.prompts[choice // self.body.n]

    def echo(self, choice: int) -> str:
        return self.prompt(choice).echo


@dataclass(frozen=True, slots=True)
class Bounds:
    """What one request may have: tokens of prompt and answer together, and answers at once. `birth`: what is chance in its answer."""

    tokens: int
    answers: int
    birth: Birth = field(default_factory=Birth.new)


def prepare_completion(body: CompletionBody, tokenizer: Tokenizer, bounds: Bounds) -> Prepared:
    """Raises InvalidRequestError for what the bounds, the vocabulary or the model's embedding do not hold."""
    _check_vocabulary(body, tokenizer)
    separated = separate(body.prompt)
    _check_answers(len(separated), body, bounds)
    names = ["prompt"] if len(separated) == 1 else [f"prompt.{index}" for index in range(len(separated))]
    given = (read_prompt(raw, name, bounds.tokens) for raw, name in zip(separated, names, strict=True))
    prompts = tuple(_prompt(one, tokenizer, bounds, body) for one in given)
    top = -1 if body.logprobs is None else body.logprobs
    wanted = body.max_tokens or DEFAULT_COMPLETION_TOKENS
    budgets = [_budget(prompt, wanted, "max_tokens", bounds.tokens) for prompt in prompts]
    rules = _Rules(tokenizer, body, top, form_of(body.response_format, body.structured_outputs), bounds.birth)
    return _prepare("cmpl", body, prompts, budgets, rules)


def prepare_chat(body: ChatBody, tokenizer: Tokenizer, bounds: Bounds) -> Prepared:
    """The same for a conversation, which may use all tokens that are left when it names no maximum."""
    _check_vocabulary(body, tokenizer)
    _check_answers(1, body, bounds)
    messages = conversation(body.messages, bounds.tokens)
    _check_bytes(text_bytes(messages), tokenizer, bounds, "messages")
    tools = tools_of(body.tools, body.tool_choice)
    if tools and tokenizer.tool_format is None:
        raise InvalidRequestError(
            "this model's chat template teaches no form of tool calls that is known here "
            f"({', '.join(TOOL_FORMAT_NAMES)}): leave tools out, or send tool_choice='none'",
            param="tools",
        )
    rendered = _rendered(body, messages, tools, tokenizer)  # counted as it is: a template may leave old thoughts out
    _check_tokens(rendered, tokenizer, bounds, "messages")
    prompt = Prompt(tuple(tokenizer.encode(rendered, add_special_tokens=body.add_special_tokens)))
    _check_embedded(prompt.tokens, tokenizer, "messages")
    name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    wanted = body.max_completion_tokens or body.max_tokens
    budget = _budget(prompt, wanted, name, bounds.tokens, param="messages")
    top = body.top_logprobs if body.logprobs else -1
    parsing = _parsing(body, tools, rendered, tokenizer)
    rules = _Rules(tokenizer, body, top, _form_of_chat(body, tools, parsing), bounds.birth)
    return _prepare("chatcmpl", body, (prompt,), [budget], rules, parsing)


def _rendered(body: ChatBody, messages: Sequence[Message], tools: Tools, tokenizer: Tokenizer) -> str:
    variables = dict(body.chat_template_kwargs)
    if body.reasoning_effort is not None:
        if not tokenizer.reads("reasoning_effort"):
            raise InvalidRequestError(
                f"reasoning_effort={body.reasoning_effort[:80]!r} is not supported by this model, whose chat template does not "
                "read it: leave it out",
                param="reasoning_effort",
                code="unsupported_parameter",
            )
        variables["reasoning_effort"] = body.reasoning_effort
    begins = not body.continue_final_message if body.add_generation_prompt is None else body.add_generation_prompt
    return tokenizer.render_chat(
        messages,
        tools=tools.given,
        add_generation_prompt=begins,
        continue_final_message=body.continue_final_message,
        variables=variables,
    )


def _parsing(body: ChatBody, tools: Tools, rendered: str, tokenizer: Tokenizer) -> Parsing:
    reasoning = None if body.continue_final_message else tokenizer.reasoning_format
    written = tokenizer.tool_format if tools else None
    return Parsing(
        tool_format=written,
        schemas=tools.schemas,
        reasoning=reasoning,
        is_thinking=reasoning is not None and reasoning.opened_by(rendered),
        most_calls=None if body.parallel_tool_calls else 1,
    )


def _form_of_chat(body: ChatBody, tools: Tools, parsing: Parsing) -> Form | None:
    """What the answer must look like: as asked for, or calls, or either where calls may come."""
    asked = form_of(body.response_format, body.structured_outputs)
    written = parsing.tool_format
    if written is not None and (asked is not None or tools.choice == "required"):
        some: Literal["one", "some"] = "some" if body.parallel_tool_calls and not tools.is_named else "one"
        calls = structural_tag(written, tools.schemas, calls=some)["format"]
        asked = calls_form(calls, asked if tools.choice == "auto" else None)
    if asked is None or parsing.reasoning is None:
        return asked
    return asked.behind_thoughts(parsing.reasoning, is_thinking=parsing.is_thinking)


class _Rules:
    """Sampling and stop tokens of a body."""

    def __init__(
        self, tokenizer: Tokenizer, body: GenerationBody, logprobs: int, form: Form | None, birth: Birth
    ) -> None:
        ends = () if body.ignore_eos else tokenizer.stop_tokens
        self.stop_tokens = tuple(dict.fromkeys((*ends, *body.stop_token_ids)))
        self._body = body
        self.logprobs = logprobs
        self.prompt_logprobs = -1 if body.prompt_logprobs is None else body.prompt_logprobs
        if isinstance(body, CompletionBody) and body.echo:
            self.prompt_logprobs = max(self.prompt_logprobs, logprobs)
        self.birth = birth
        self._seed = birth.seed if body.seed is None else body.seed % (1 << SEED_BITS)
        self.form = form
        rules = LogitRules(
            presence_penalty=body.presence_penalty,
            frequency_penalty=body.frequency_penalty,
            repetition_penalty=body.repetition_penalty,
            bias=tuple(body.logit_bias.items()),
            bad_words=_bad_words(body.bad_words, tokenizer),
            min_tokens=body.min_tokens,
            ends=self.stop_tokens if body.min_tokens else (),
            grammar=None if form is None else form.grammar(ends),
        )
        self._rules = None if rules == LogitRules() else rules

    def sampling(self, choice: int) -> Sampling:
        body = self._body
        return Sampling(
            temperature=body.temperature,
            top_p=body.top_p,
            top_k=max(body.top_k, 0),
            seed=_seed_of(self._seed, choice),
            logprobs=self.logprobs,
            min_p=body.min_p,
            prompt_logprobs=self.prompt_logprobs,
            rules=self._rules,
        )


def _bad_words(words: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Each at the beginning of a text and behind a space, as vLLM has it: vocabularies write these differently."""
    found: dict[tuple[int, ...], None] = {}
    for place, word in enumerate(words):
        for text in (word.lstrip(), " " + word.lstrip()):
            tokens = tuple(tokenizer.encode(text, add_special_tokens=False))
            if not 1 <= len(tokens) <= LONGEST_BAD_WORD or max(tokens) >= tokenizer.rows:
                raise InvalidRequestError(
                    f"bad_words.{place} has {len(tokens)} tokens: send words of 1 to {LONGEST_BAD_WORD} tokens that this model has",
                    param=f"bad_words.{place}",
                )
            found[tokens] = None
    return tuple(found)


def _prepare(
    prefix: str,
    body: GenerationBody,
    prompts: tuple[Prompt, ...],
    budgets: Sequence[int],
    rules: _Rules,
    parsing: Parsing = PLAIN,
) -> Prepared:
    _check_scores(body, budgets, rules.logprobs)
    _check_prompt_scores(prompts, rules.prompt_logprobs)
    now = rules.birth.at
    name = f"{prefix}-{rules.birth.name}"
    requests = tuple(
        GenerationRequest(
            id=f"{name}-{index}",
            prompt=prompts[index // body.n].tokens,
            max_tokens=budgets[index // body.n],
            stop_tokens=rules.stop_tokens,
            sampling=rules.sampling(index),
            priority=body.priority,
            salt=body.cache_salt or "",
            deadline=now + (body.deadline_seconds or math.inf),
            patience=now + PATIENCE_SECONDS,
        )
        for index in range(len(prompts) * body.n)
    )
    return Prepared(name, int(now), _without_text(body), prompts, requests, rules.form, parsing)


def _without_text(body: GenerationBody) -> GenerationBody:
    """What came raw refers to all bytes of the body: they must not stay as long as the answer takes."""
    values = {name: getattr(body, name) for name in body.__struct_fields__}
    return msgspec.structs.replace(
        body, **{name: Raw(b"null") for name, value in values.items() if isinstance(value, Raw)}
    )


def _check_answers(prompts: int, body: GenerationBody, bounds: Bounds) -> None:
    if prompts * body.n > bounds.answers:
        raise InvalidRequestError(
            f"{prompts} prompts with n={body.n} make {prompts * body.n} answers, the most at once is {bounds.answers}: "
            "send fewer",
            param="n",
        )


def _check_scores(body: GenerationBody, budgets: Sequence[int], logprobs: int) -> None:
    """`logprobs` further tokens are told for each token; -1: no log probability at all."""
    tokens = sum(budgets) * body.n
    scores = tokens * (1 + logprobs)
    if scores > MOST_SCORES and not body.stream:
        raise InvalidRequestError(
            f"{tokens} tokens of all answers together, each with its own and {logprobs} further log probabilities, make "
            f"{scores}; the most of what is not streamed is {MOST_SCORES}: send stream=true, or less max_tokens, logprobs or n",
            param="logprobs",
        )


def _check_prompt_scores(prompts: Sequence[Prompt], logprobs: int) -> None:
    """All of a prompt's come in one message from a leader."""
    tokens = max(len(prompt.tokens) for prompt in prompts)
    if tokens * (1 + logprobs) > MOST_PROMPT_SCORES:
        raise InvalidRequestError(
            f"a prompt of {tokens} tokens, each with its own and {logprobs} further log probabilities, makes {tokens * (1 + logprobs)}; "
            f"{MOST_PROMPT_SCORES} are the most: ask for fewer, or send the prompt in parts",
            param="logprobs",
        )


def _check_vocabulary(body: GenerationBody, tokenizer: Tokenizer) -> None:
    if body.top_k > tokenizer.rows:
        raise InvalidRequestError(
            f"top_k={body.top_k} is more than the {tokenizer.rows} tokens of this model's vocabulary: send at most "
            f"{tokenizer.rows}, or 0 for all",
            param="top_k",
        )
    for name, tokens in (("stop_token_ids", body.stop_token_ids), ("logit_bias", body.logit_bias)):
        beyond = next((token for token in tokens if token >= tokenizer.rows), None)
        if beyond is not None:
            raise InvalidRequestError(
                f"{name} has {beyond}: this model's vocabulary ends at {tokenizer.rows - 1}; use its own tokenizer",
                param=name,
            )


def _prompt(prompt: str | list[int], tokenizer: Tokenizer, bounds: Bounds, body: CompletionBody) -> Prompt:
    if isinstance(prompt, str):
        _check_bytes(len(prompt.encode()), tokenizer, bounds, "prompt")
        _check_tokens(prompt, tokenizer, bounds, "prompt")
        tokens = tuple(tokenizer.encode(prompt, add_special_tokens=body.add_special_tokens))
        _check_embedded(tokens, tokenizer, "prompt")
        return Prompt(tokens, prompt if body.echo else "")
    _check_embedded(prompt, tokenizer, "prompt")
    return Prompt(tuple(prompt), tokenizer.decode(prompt) if body.echo else "")


def _check_bytes(length: int, tokenizer: Tokenizer, bounds: Bounds, param: str) -> None:
    """Text that cannot fit is refused before time and memory go into its tokens."""
    most = bounds.tokens * tokenizer.most_bytes_per_token
    if length > most:
        raise InvalidRequestError(
            f"{param} has {length} bytes of text, more than {bounds.tokens} tokens of at most "
            f"{tokenizer.most_bytes_per_token} bytes each: this deployment takes at most {bounds.tokens} for prompt and "
            "answer; shorten it",
            param=param,
            code="context_length_exceeded",
        )


def _check_tokens(text: str, tokenizer: Tokenizer, bounds: Bounds, param: str) -> None:
    """The same where the vocabulary has tokens so long that its bytes tell nothing."""
    if tokenizer.exceeds(text, bounds.tokens):
        raise InvalidRequestError(
            f"{param} has {len(text)} characters of text, more than {bounds.tokens} tokens: this deployment takes at most "
            f"{bounds.tokens} for prompt and answer; shorten it",
            param=param,
            code="context_length_exceeded",
        )


def _check_embedded(tokens: Sequence[int], tokenizer: Tokenizer, param: str) -> None:
    """A tokenizer may have tokens that the model's embedding has no row for: they would fail the step they are in."""
    highest = max(tokens, default=0)
    if highest >= tokenizer.rows:
        raise InvalidRequestError(
            f"{param} has token {highest}: this model's vocabulary ends at {tokenizer.rows - 1}; use its own tokenizer, "
            "and no text that stands for a token which the model does not have",
            param=param,
        )


def _budget(prompt: Prompt, wanted: int | None, name: str, limit: int, param: str = "prompt") -> int:
    """Tokens that the answer may have. `wanted` None: all that are left."""
    length = len(prompt.tokens)
    if length == 0:
        raise InvalidRequestError("the prompt has no token: send at least one character", param=param)
    if length >= limit:
        raise InvalidRequestError(
            f"the prompt has {length} tokens, this deployment takes at most {limit} for prompt and answer: shorten it",
            param=param,
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
    return int.from_bytes(digest[:8], "big") % (1 << SEED_BITS)
