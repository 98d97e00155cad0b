"""Held-out perplexity of a model folder, as it is and with its layers rounded to fewer bits.

A command: ``python -m training.perplexity examples/models/strata-tiny --bits 16 8 4 3``. It measures through transformers alone and
knows nothing of the project's runtime, so that its figures can be compared with those of the pipeline.

The rounding is the plainest there is: round to nearest, asymmetric, one scale and one zero per group of weights along the input. Only the
linear layers of the decoder are rounded; embedding, norms and head stay as they are.
"""

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer

from training.export import HELDOUT_SEPARATOR


@dataclass(frozen=True)
class Quality:
    """How well a model predicts a text."""

    perplexity: float  # per token
    bits_per_byte: float  # comparable between vocabularies
    tokens: int


def round_to_nearest(weight: torch.Tensor, bits: int, group_size: int) -> torch.Tensor:
    """``weight [outputs, inputs]`` with each group of ``group_size`` inputs moved to ``2**bits`` evenly spaced levels from its minimum (at most 0) to
    its maximum (at least 0).

    Raises ValueError where ``group_size`` does not divide the inputs.
    """
    outputs, inputs = weight.shape
    if inputs % group_size:
        raise ValueError(
            f"group size {group_size} does not divide {inputs} inputs: choose a divisor such as {math.gcd(group_size, inputs)}"
        )
    groups = weight.float().view(outputs, inputs // group_size, group_size)
    low, high = groups.amin(-1, keepdim=True).clamp(max=0), groups.amax(-1, keepdim=True).clamp(min=0)
    scale = ((high - low) / (2**bits - 1)).clamp(min=1e-8)
    zero = (-low / scale).round()
    levels = ((groups / scale).round() + zero).clamp(0, 2**bits - 1)
    rounded: torch.Tensor = ((levels - zero) * scale).view(outputs, inputs)
    return rounded.to(weight.dtype)


@torch.no_grad()
def quantize_layers(model: nn.Module, bits: int, group_size: int) -> None:
    """Round every linear layer of ``model`` but its output head, in place."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and not name.endswith("lm_head"):
            module.weight.copy_(round_to_nearest(module.weight, bits, group_size))


@torch.no_grad()
def measure(model: nn.Module, rows: Iterator[torch.Tensor], text_bytes: int) -> Quality:
    """Mean over every predicted token of ``rows`` (vectors of token ids, each predicted from its own beginning)."""
    total, tokens = 0.0, 0
    for row in rows:
        logits = model(input_ids=row[None, :-1]).logits[0].float()
        total += functional.cross_entropy(logits, row[1:], reduction="sum").item()
        tokens += len(row) - 1
    return Quality(math.exp(total / tokens), total / math.log(2) / text_bytes, tokens)


def windows(ids: list[list[int]], separator: int, context: int) -> Iterator[torch.Tensor]:
    """Each document cut into pieces of ``context``, every piece behind a separator, so that each token is predicted once."""
    for document in ids:
        for first in range(0, len(document), context):
            yield torch.tensor([separator, *document[first : first + context]])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m training.perplexity", description=__doc__)
    parser.add_argument("folder", type=Path, help="a model folder with heldout.txt")
    parser.add_argument("--text", type=Path, help="another text to measure on")
    parser.add_argument("--bits", type=int, nargs="+", default=[16], help="16 leaves the weights as they are")
    parser.add_argument("--group-size", type=int, default=128)
    parser.add_argument("--context", type=int, default=512, help="tokens of a piece")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    tokenizer = AutoTokenizer.from_pretrained(arguments.folder)
    text = (arguments.text or arguments.folder / "heldout.txt").read_text(encoding="utf-8")
    ids = tokenizer(text.split(HELDOUT_SEPARATOR), add_special_tokens=False, verbose=False)["input_ids"]
    print("bits  perplexity  bits/byte  tokens")
    for bits in arguments.bits:
        model = AutoModelForCausalLM.from_pretrained(arguments.folder, dtype=torch.float32)
        if bits < 16:
            quantize_layers(model, bits, arguments.group_size)
        quality = measure(model, windows(ids, tokenizer.bos_token_id, arguments.context), len(text.encode()))
        print(f"{bits:4}  {quality.perplexity:10.3f}  {quality.bits_per_byte:9.4f}  {quality.tokens}", flush=True)


if __name__ == "__main__":
    main()
