"""Perplexity of our model at 16, 8, 4 and 3 bits, computed by the pipeline's own stages and kernels.

`python -m benchmarks.perplexity [--json FILE]`. The peer of each row is the 16-bit figure: the ratio is what the precision
costs. The same text and windows as `python -m training.perplexity`, which measures through transformers alone.
"""

import math
from pathlib import Path

import torch
from transformers import AutoTokenizer

from benchmarks.rows import Row, run
from strata_runtime.slot.chain import StageChain
from tests.runtime.plans import even_plan
from training.export import HELDOUT_SEPARATOR
from training.perplexity import windows

MODEL = Path("examples/models/strata-tiny")
SLOTS = ("first", "second", "third")
BITS = (16, 8, 4, 3)
CONTEXT = 512


def texts(model: Path) -> list[list[int]]:
    """Token ids of the held-out text, cut into windows that each start with the separator token."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    documents = (model / "heldout.txt").read_text(encoding="utf-8").split(HELDOUT_SEPARATOR)
    ids = tokenizer(documents, add_special_tokens=False, verbose=False)["input_ids"]
    return [window.tolist() for window in windows(ids, tokenizer.bos_token_id, CONTEXT)]


def perplexity(model: Path, bits: int, rows: list[list[int]]) -> float:
    """Over three stages with every layer at `bits`, fp32 computation."""
    pages = -(-(CONTEXT + 1) // 16)
    chain = StageChain.load(even_plan(model, SLOTS, bits=bits, pages=pages, max_model_len=CONTEXT + 1), model)
    total = sum(float(chain.score(row).double().sum()) for row in rows)
    return math.exp(-total / sum(len(row) - 1 for row in rows))


def measure() -> list[Row]:
    torch.set_num_threads(1)
    rows = texts(MODEL)
    whole = perplexity(MODEL, 16, rows)
    return [
        Row(
            name=f"perplexity_{bits}",
            value=(value := whole if bits == 16 else perplexity(MODEL, bits, rows)),
            unit="per token",
            peer="the same stages at 16 bits",
            peer_value=whole,
            ratio=value / whole,
        )
        for bits in BITS
    ]


if __name__ == "__main__":
    run("perplexity", measure)
