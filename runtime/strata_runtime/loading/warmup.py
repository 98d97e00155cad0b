"""Warming up: what torch and transformers set up at their first use, done at a slot's start.

So the idle process holds all that does not depend on its roles (some 8 MiB: a model's Python modules, oneDNN's and the
kernels' generated code and scratch), and the first step takes as long as the next. Called by the slot before its first role; never in a
process that forks others, which would inherit a used thread pool.
"""

import importlib
import threading

import torch

from strata_runtime.formats import MAKERS, make_linear
from strata_runtime.loading.blocked import BlockedLinear, can_block

_SIZE = 64  # of the square weights, a block of every format
_TOKENS = (4, 64)  # on either side of where kernels change


def warm_up() -> None:
    """One small product in every format, one attention, the modules that every architecture shares.

    In a thread that ends: libgomp keeps a team for every thread that has multiplied, and with more teams than cores its threads no longer wait for
    their next loop awake, so that each loop of a step would begin with a wake-up.
    """
    thread = threading.Thread(target=_multiply, name="warm up")
    thread.start()
    thread.join()


def _multiply() -> None:
    importlib.import_module("transformers.models.llama.modeling_llama")
    weight = torch.eye(_SIZE, dtype=torch.bfloat16)
    linears = [make_linear(weight, None, name, torch.bfloat16) for name in MAKERS]
    if can_block(torch.bfloat16, weight.device):
        linears.append(BlockedLinear(weight, None))
    with torch.inference_mode():
        for tokens in _TOKENS:
            inputs = torch.ones(tokens, _SIZE, dtype=torch.bfloat16)
            for linear in linears:
                linear(inputs)
            rows = inputs[None, None]
            torch.nn.functional.scaled_dot_product_attention(rows, rows, rows, is_causal=True)
