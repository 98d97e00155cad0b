"""The model's tokenizer and its token conventions, as the gateway needs them.

Loaded once at start by `__main__`, used for prompts, chat templates, texts and log probabilities. Does not import torch
for models that ship a `tokenizer.json` (start-up takes half a second instead of two); others are converted by
transformers' AutoTokenizer, which does.
"""

import contextlib
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from strata_planner.contract.text_part import text_part
from strata_runtime.gateway.errors import InvalidRequestError, StartError
from strata_runtime.gateway.text.reasoning import detect as detect_reasoning_format
from strata_runtime.gateway.text.tool_formats import detect as detect_tool_format
from strata_runtime.structured.tokenizer import read_tokenizer

log = logging.getLogger(__name__)


def _byte_of_character() -> dict[str, int]:
    """The alphabet of byte-level BPE: printable bytes stand for themselves, the others follow from U+0100.

    Source: GPT-2 (Radford et al. 2019), `bytes_to_unicode` of its published code.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_OF_CHARACTER = _byte_of_character()
MOST_TOKEN_IDS = 1 << 31  # of any vocabulary
SLICE = 2**14  # characters that are tokenized at once to count them: some hundred bytes of memory each
CUT_TOKENS = 256  # more than a cut adds: it changes the tokens next to it only
RESERVED_VARIABLES = frozenset({  # what transformers, or a field of the request, says
    "add_generation_prompt", "chat_template", "continue_final_message", "conversation", "documents", "max_length", "messages", "padding",
    "conversations", "return_assistant_tokens_mask", "return_dict", "return_tensors", "self", "tokenize", "tokenizer_kwargs", "tools",
    "truncation",
    "additional_special_tokens", "bos_token", "cls_token", "eos_token", "mask_token", "pad_token", "sep_token", "unk_token",  # the model's
})  # fmt: skip
MOST_VARIABLES_BYTES = 1 << 14  # of all others: a template may write each as often as there are messages
SHRINKING = 4  # composing characters (NFC, NFKC) makes text a third as long at most; one for what templates strip


class Tokenizer:
    """A transformers tokenizer with the few operations that the gateway uses."""

    def __init__(
        self, tokenizer: Any, stop_tokens: Sequence[int], rows: int | None = None, folder: Path = Path()
    ) -> None:
        """`rows` of the model's embedding: ids from there on cannot be computed. None: as many as there are tokens."""
        self._tokenizer = tokenizer
        self.folder = folder  # that it was read from
        self._byte_level = _is_byte_level(tokenizer)
        self._special = frozenset(tokenizer.all_special_ids)
        self._bytes: dict[int, bytes] = {}  # of tokens that were asked for, so at most of the vocabulary
        self.stop_tokens = tuple(stop_tokens)
        self._template = _template_text(tokenizer.chat_template)
        self.tool_format = detect_tool_format(self._template)
        self.reasoning_format = detect_reasoning_format(self._template)
        self.vocabulary_size = len(tokenizer)
        self.rows = self.vocabulary_size if rows is None else rows
        self.most_bytes_per_token = SHRINKING * max(len(piece.encode()) for piece in tokenizer.get_vocab())

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """A plain prompt gets the special tokens that the model's own tokenizer adds; what `render_chat` made has its own."""
        return [int(token) for token in self._tokenizer.encode(text, add_special_tokens=add_special_tokens)]

    def decode(self, tokens: Sequence[int], *, special_tokens: bool = False) -> str:
        """Text without special tokens, or with them; incomplete characters show as U+FFFD."""
        text = self._tokenizer.decode(
            list(tokens), skip_special_tokens=not special_tokens, clean_up_tokenization_spaces=False
        )
        return str(text)

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        """Tokens as the vocabulary writes them: spaces as U+0120 or U+2581, parts of characters as others."""
        return [str(piece) for piece in self._tokenizer.convert_ids_to_tokens(list(tokens))]

    def exceeds(self, text: str, most_tokens: int) -> bool:
        """Whether a text surely has more tokens, at the memory of a slice: whole, it takes hundreds of bytes a character.

        False is no promise: text of one slice is not counted, and each cut may have added tokens that the whole has not.
        """
        if len(text) <= SLICE:
            return False
        most = most_tokens + CUT_TOKENS * (len(text) // SLICE)
        count = 0
        for start in range(0, len(text), SLICE):
            count += len(self.encode(text[start : start + SLICE], add_special_tokens=False))
            if count > most:
                return True
        return False

    def render_chat(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        tools: Sequence[dict[str, Any]] = (),
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """A conversation through the model's chat template, by default ready for the assistant's answer. Raises InvalidRequestError.

        `variables`: others that the template reads.
        """
        if not self._tokenizer.chat_template:
            raise InvalidRequestError(
                "this model has no chat template, so it cannot answer /v1/chat/completions: "
                "use /v1/completions, or serve a model whose folder has a chat_template",
                param="messages",
            )
        _check_variables(variables)
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    list(messages),
                    tools=list(tools) or None,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=continue_final_message,
                    tokenize=False,
                    **variables,
                )
            )
        except Exception as error:  # templates raise what they like about roles and their order
            raise InvalidRequestError(
                f"the model's chat template refuses these messages: {error}", param="messages"
            ) from error

    def reads(self, variable: str) -> bool:
        """Whether the chat template has a variable of this name."""
        return variable in self._template

    def warm_up(self) -> None:
        """Compile the chat template now: it takes a quarter of a second that the first chat would wait for."""
        with contextlib.suppress(InvalidRequestError):  # none, or one that wants other messages: said when it is used
            self.render_chat([{"role": "user", "content": "."}])

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token stands for, also where they are only a part of a character."""
        known = self._bytes.get(token)
        if known is not None:
            return known
        piece = self._tokenizer.convert_ids_to_tokens(token)
        if piece is None:  # ids that pad the model's vocabulary
            return b""
        return self._bytes.setdefault(token, self._bytes_of(token, str(piece)))

    def token_text(self, token: int) -> str:
        """The same as text; parts of characters show as U+FFFD."""
        return self.token_bytes(token).decode("utf-8", "replace")

    def _bytes_of(self, token: int, piece: str) -> bytes:
        if token in self._special:
            return piece.encode()
        if self._byte_level and all(character in BYTE_OF_CHARACTER for character in piece):
            return bytes(BYTE_OF_CHARACTER[character] for character in piece)
        if len(piece) == len("<0x00>") and piece.startswith("<0x") and piece.endswith(">"):  # byte fallback
            return bytes.fromhex(piece[3:5])
        return piece.replace("\u2581", " ").encode()  # SentencePiece writes spaces as U+2581


def _check_variables(variables: Mapping[str, Any]) -> None:
    if reserved := sorted(RESERVED_VARIABLES.intersection(variables)):
        raise InvalidRequestError(
            f"chat_template_kwargs has {reserved[0]!r}, which is not a request's to say: leave it out",
            param=f"chat_template_kwargs.{reserved[0]}",
        )
    if variables and (length := len(msgspec.json.encode(variables))) > MOST_VARIABLES_BYTES:
        raise InvalidRequestError(
            f"chat_template_kwargs has {length} bytes; {MOST_VARIABLES_BYTES} at most are taken here: send less",
            param="chat_template_kwargs",
        )


def _template_text(template: Any) -> str:
    """A model may have several, by name."""
    return "".join(map(str, template.values())) if isinstance(template, dict) else str(template or "")


def load_tokenizer(folder: Path) -> Tokenizer:
    """Read the tokenizer and the stop tokens of a model folder in Hugging Face layout. Raises StartError."""
    try:
        tokenizer = read_tokenizer(folder)
    except (OSError, ValueError, ImportError) as error:
        raise StartError(
            f"cannot load a tokenizer from {folder}: {' '.join(str(error).split())}; "
            "the model folder must hold tokenizer.json (or the files that AutoTokenizer reads)"
        ) from error
    loaded = Tokenizer(tokenizer, read_stop_tokens(folder, tokenizer.eos_token_id), read_embedding_rows(folder), folder)
    loaded.warm_up()
    return loaded


def read_stop_tokens(folder: Path, tokenizer_eos: int | None) -> tuple[int, ...]:
    """End-of-text ids: those of generation_config.json, else of config.json, else the tokenizer's own."""
    for name in ("generation_config.json", "config.json"):
        found = _read_json(folder / name).get("eos_token_id")
        if found is None:
            continue
        ids = found if isinstance(found, list) else [found]
        if not all(type(token) is int and 0 <= token < MOST_TOKEN_IDS for token in ids):
            raise StartError(f"{folder / name}: eos_token_id is {found!r}: write the id of a token, or a list of ids")
        return tuple(ids)
    if tokenizer_eos is None:
        log.warning("%s names no end-of-text token: answers end at max_tokens", folder)
        return ()
    return (int(tokenizer_eos),)


def read_embedding_rows(folder: Path) -> int | None:
    """How many ids the model can embed, by config.json; None where it does not say. May be fewer than the tokenizer has."""
    rows = text_part(_read_json(folder / "config.json")).get("vocab_size")
    return rows if isinstance(rows, int) and rows > 0 else None


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_bytes())
    except ValueError as error:
        raise StartError(f"{path} is not valid JSON ({error}): restore the model's file") from error
    return content if isinstance(content, dict) else {}


def _is_byte_level(tokenizer: Any) -> bool:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return backend is not None and "ByteLevel" in repr(backend.decoder)
