"""Train the project's own small Llama on the standard library of the Python that runs this, and write a Hugging Face folder.

A command: ``python -m training.train --tokens 10e6 --output FOLDER``. The learning rate falls linearly to zero at the end of whichever
budget is used up first (``--tokens`` or ``--minutes``). A run that was cut off goes on from ``--checkpoint`` when started again.
"""

import argparse
import platform
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn import functional
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from training.batches import Batches
from training.corpus import Corpus, read_corpus
from training.export import export
from training.muon import Muon
from training.tokenizer import train_tokenizer

VOCABULARY = 4096
CONTEXT_TOKENS = 1024
SHORT_CONTEXT_TOKENS = 256  # attention over short rows is cheap: most of the training runs there
SHORT_SHARE = 0.65  # of the budget; the rest teaches positions up to the whole context, and the familiar docstrings
BATCH_TOKENS = 4096
WARMUP_SHARE, DECAY_FROM = 0.02, 0.3
MUON_RATE, ADAM_RATE = 0.02, 0.003
LINE_EVERY_SECONDS, SAVE_EVERY_SECONDS = 15.0, 300.0


@dataclass
class Progress:
    """What has been spent; saved with the weights."""

    short_steps: int = 0
    long_steps: int = 0
    seconds: float = 0.0

    @property
    def tokens(self) -> int:
        return (self.short_steps + self.long_steps) * BATCH_TOKENS

    def share(self, token_budget: float, seconds_budget: float) -> float:
        """The spent share of the budget that ends first."""
        return max(self.tokens / token_budget, self.seconds / seconds_budget)


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Causal attention over ``[batch, heads, tokens, 32]``, in the signature that transformers calls.

    On a CPU, plain products take half the time of the fused kernel at this head size and short rows.
    """
    del module, attention_mask
    groups = query.size(1) // key.size(1)
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    tokens = query.size(2)
    if query.is_cuda or tokens > SHORT_CONTEXT_TOKENS:
        out = functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
    else:
        mask = torch.full((tokens, tokens), float("-inf"), dtype=query.dtype).triu_(1)
        out = torch.softmax(torch.matmul(query * scaling, key.mT) + mask, -1, dtype=query.dtype) @ value
    return out.transpose(1, 2).contiguous(), None


def new_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """12 layers of width 256, 8 query heads over 4 key-value heads; every width a multiple of 128, a common quantization group."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=640,
        num_hidden_layers=12,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=CONTEXT_TOKENS,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        use_cache=False,
    )
    AttentionInterface.register("training_attention", attention)
    model = LlamaForCausalLM(config)
    model.set_attn_implementation("training_attention")
    return model


def optimizers(model: LlamaForCausalLM) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for embedding, head and norms."""
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    ids = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in ids]
    return [
        Muon(matrices, lr=MUON_RATE, momentum=0.95, weight_decay=0.05),
        torch.optim.AdamW(others, lr=ADAM_RATE, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def rate(share: float) -> float:
    """The learning rate's factor at ``share`` of the budget: a short warm-up, flat, then linear to zero."""
    return min(1.0, (share + 1e-3) / WARMUP_SHARE, max(0.0, 1 - share) / (1 - DECAY_FROM))


class Run:
    """A training run: model, optimizers, batches and what has been spent."""

    def __init__(self, arguments: argparse.Namespace, corpus: Corpus, tokenizer: PreTrainedTokenizerFast) -> None:
        self._arguments = arguments
        self._device = torch.device(arguments.device)
        self._batches = Batches(corpus, tokenizer, arguments.seed)
        self.progress = Progress()
        self.model = new_model(tokenizer).to(self._device)
        self._optimizers = optimizers(self.model)
        self._rates = [o.param_groups[0]["lr"] for o in self._optimizers]
        if arguments.checkpoint.exists():
            self._load()

    def train(self) -> None:
        """Spend the budget."""
        short = self._batches.rows(SHORT_CONTEXT_TOKENS, BATCH_TOKENS, skip=self.progress.short_steps)
        long = self._batches.rows(CONTEXT_TOKENS, BATCH_TOKENS, skip=self.progress.long_steps, last=True)
        began = time.monotonic() - self.progress.seconds
        line_at = save_at = time.monotonic()
        losses: list[float] = []
        while (share := self.progress.share(self._arguments.tokens, self._arguments.minutes * 60)) < 1:
            is_short = share < SHORT_SHARE
            losses.append(self._step(next(short if is_short else long), rate(share)))
            self.progress.short_steps += is_short
            self.progress.long_steps += not is_short
            self.progress.seconds = (now := time.monotonic()) - began
            if now - line_at > LINE_EVERY_SECONDS:
                print(self._line(share, losses), flush=True)
                line_at, losses = now, []
            if now - save_at > SAVE_EVERY_SECONDS:
                self._save()
                save_at = now
        self._save()

    def _step(self, rows: torch.Tensor, factor: float) -> float:
        rows = rows.to(self._device, non_blocking=True)
        for optimizer, base in zip(self._optimizers, self._rates, strict=True):
            optimizer.param_groups[0]["lr"] = base * factor
        with torch.autocast(self._device.type, torch.bfloat16):
            logits = self.model(input_ids=rows[:, :-1]).logits
        loss = functional.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return loss.item()

    def _line(self, share: float, losses: list[float]) -> str:
        speed = self.progress.tokens / self.progress.seconds
        loss = sum(losses) / len(losses)
        return f"{share:6.1%}  {self.progress.tokens / 1e6:6.2f}M tokens  {speed:6.0f} tokens/s  loss {loss:.3f}"

    def _save(self) -> None:
        path: Path = self._arguments.checkpoint
        state = {
            "model": self.model.state_dict(),
            "optimizers": [o.state_dict() for o in self._optimizers],
            "progress": vars(self.progress),
        }
        torch.save(state, path.with_suffix(".partial"))
        path.with_suffix(".partial").replace(path)  # a cut-off save leaves the last one whole

    def _load(self) -> None:
        state = torch.load(self._arguments.checkpoint, map_location=self._device)
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.progress = Progress(**state["progress"])
        print(f"going on after {self.progress.tokens} tokens of {self._arguments.checkpoint}")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m training.train", description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="folder for the finished model")
    parser.add_argument(
        "--checkpoint", type=Path, default=Path("checkpoint.pt"), help="file to go on from when cut off"
    )
    parser.add_argument("--tokens", type=float, default=10e6, help="budget of tokens")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="budget of time")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments)


def main() -> None:
    arguments = parse()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    corpus = read_corpus()
    tokenizer = train_tokenizer(corpus.epoch(arguments.seed, 1), VOCABULARY, CONTEXT_TOKENS)
    run = Run(arguments, corpus, tokenizer)
    size = sum(p.numel() for p in run.model.parameters())
    print(f"Python {platform.python_version()}: {len(corpus.library)} documents, {len(corpus.explained)} docstrings")
    print(f"{size} parameters")
    run.train()
    export(run.model, tokenizer, corpus, arguments.output)
    print(f"{run.progress.tokens} tokens in {run.progress.seconds:.0f} s; the model is in {arguments.output}")


if __name__ == "__main__":
    main()
