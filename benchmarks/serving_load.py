"""What is asked in `benchmarks.serving` and `benchmarks.serving_peers`: a random model, prompts of it, and passages for strata-tiny."""

import random
from functools import cache
from pathlib import Path

import torch

from benchmarks import perplexity, pipeline
from strata_runtime.model.random_model import make_random_model

POSITIONS = 40_000
POOL_TOKENS = 32 << 10
CHATS, CHAT_TOKENS, CHAT_LENGTH = 64, 100, 8192
SHARING, PREFIX = 16, 2000
SMALL, LARGE = 10, 32_000
STREAMS, BESIDE = 2, 4000
HELD = (1, 16)
SCHEMA = """{"type": "array", "minItems": 500, "items": {"type": "object", "required": ["name", "age", "kind"], "properties": {
    "name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}, "kind": {"enum": ["red", "green"]}}}}"""  # longer than any answer
TINY = perplexity.MODEL.resolve()
_VOCABULARY = 30_000


def make_model(folder: Path) -> Path:
    shapes = {**pipeline.SHAPES, "num_hidden_layers": 4, "max_position_embeddings": POSITIONS}
    return make_random_model(folder / "model", "llama", dtype=torch.bfloat16, **shapes)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return [(7919 * seed + 31 * place) % _VOCABULARY for place in range(length)]


def drawn_prompt(length: int, seed: int) -> list[int]:
    """Of which no piece of some length comes in a prompt of another seed, at no place."""
    drawn = random.Random(seed)
    return [drawn.randrange(10, _VOCABULARY) for _ in range(length)]


def answer_tokens(streams: int) -> int:
    return 256 if streams == 1 else 96


def passage(seed: int, *, drawn: bool) -> list[int]:
    """Of held-out text; where the answer is to repeat it, with its beginning once more."""
    ids = _held_out()[200 * seed : 200 * seed + 96]
    return ids if drawn else [*ids, *ids[:24]]


@cache
def _held_out() -> list[int]:
    return [token for window in perplexity.texts(TINY) for token in window]
