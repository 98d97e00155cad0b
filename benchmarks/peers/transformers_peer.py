"""transformers on one processor: its own forward passes with its own cache, one a token. Runs in our environment, which has it."""

from collections.abc import Mapping, Sequence

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from benchmarks.peers.served import Engine, Moments, Wish, main, timed_steps


def make(wish: Wish) -> Mapping[str, Engine]:
    """Without the bookkeeping of `generate`, which only takes time: the most likely token goes in again."""
    torch.set_num_threads(wish.threads)

    class Forward:
        def __init__(self, attention: str) -> None:
            self._model = AutoModelForCausalLM.from_pretrained(
                wish.model, dtype=torch.bfloat16, attn_implementation=attention
            )

        @torch.inference_mode()
        def run(self, prompts: Sequence[Sequence[int]], answer: int) -> Moments:
            cache = DynamicCache(config=self._model.config)
            tokens = torch.tensor(prompts)

            def step() -> None:
                nonlocal tokens
                logits = self._model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
                tokens = logits[:, -1:].argmax(-1)

            return timed_steps(step, step, answer)

    return {name: Forward(name) for name in ("sdpa", "eager")}


if __name__ == "__main__":
    main(make)
