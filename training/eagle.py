"""Train an EAGLE-3 head for a Llama that `train` has made, on the same text, and write it in the published layout.

A command: ``python -m training.eagle --model examples/models/strata-tiny --output FOLDER``. The head learns to draft what the model itself says of the
corpus, in its unrolled training-time test (EAGLE-3, arXiv 2503.01840, section 3.2), so that it meets its own states as it will when it drafts.
"""

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoTokenizer, LlamaForCausalLM

from training.batches import Batches
from training.corpus import read_corpus
from training.eagle_head import EagleHead, agreement, fused_inputs, loss_of
from training.muon import Muon
from training.train import rate

DRAFT_VOCABULARY = 2048
STEPS = 4  # drafts of a chain
CONTEXT_TOKENS, BATCH_TOKENS = 256, 4096
MUON_RATE, ADAM_RATE = 0.01, 0.001
LINE_EVERY_SECONDS = 15.0


class Model:
    """The model that verifies, as it is."""

    def __init__(self, folder: Path) -> None:
        self.whole = (
            LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval().requires_grad_(requires_grad=False)
        )
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.inputs = fused_inputs(self.whole.config.num_hidden_layers)

    @torch.no_grad()
    def says(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """rows: [batch, tokens] -> embeddings [batch, tokens, hidden], what enters the fused layers [batch, tokens, 3 * hidden], logits."""
        output = self.whole(input_ids=rows, output_hidden_states=True, use_cache=False)
        states = torch.cat([output.hidden_states[layer] for layer in self.inputs], dim=-1)
        return output.hidden_states[0], states, output.logits


def usual_tokens(rows: Iterator[Tensor], vocabulary: int, count: int, batches: int = 100) -> Tensor:
    """The tokens that stand in the text most often, ascending."""
    counts = torch.zeros(vocabulary, dtype=torch.int64)
    for _ in range(batches):
        counts += torch.bincount(next(rows).flatten(), minlength=vocabulary)
    return counts.topk(count).indices.sort().values


def train(head: EagleHead, model: Model, rows: Iterator[Tensor], minutes: float) -> None:
    """Spend the budget."""
    matrices = [each for each in (*head.midlayer.parameters(), *head.fc.parameters()) if each.ndim == 2]
    ids = {id(each) for each in matrices}
    others = [each for each in head.parameters() if id(each) not in ids]
    optimizers = [
        Muon(matrices, lr=MUON_RATE, momentum=0.95, weight_decay=0.0),
        torch.optim.AdamW(others, lr=ADAM_RATE, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    rates = [each.param_groups[0]["lr"] for each in optimizers]
    began = line_at = time.monotonic()
    losses: list[float] = []
    count = 0
    while (share := (time.monotonic() - began) / (60 * minutes)) < 1:
        for optimizer, base in zip(optimizers, rates, strict=True):
            optimizer.param_groups[0]["lr"] = base * rate(share)
        losses.append(_step(head, model, next(rows)))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        count += 1
        if time.monotonic() - line_at > LINE_EVERY_SECONDS:
            print(
                f"{share:6.1%}  {count * BATCH_TOKENS / 1e6:6.2f}M tokens  loss {sum(losses) / len(losses):.3f}",
                flush=True,
            )
            line_at, losses = time.monotonic(), []


def _step(head: EagleHead, model: Model, rows: Tensor) -> float:
    embedded, states, said = model.says(rows[:, :-1])
    with torch.autocast("cpu", torch.bfloat16):
        logits = head.unroll(embedded, states, STEPS)
    loss = loss_of(logits, said, head.targets)
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
    return loss.item()


def go_on_from(head: EagleHead, folder: Path) -> None:
    """With the weights of a head that was exported, of the same tokens."""
    stored = load_file(folder / "model.safetensors")
    head.load_state_dict({name: each.float() for name, each in stored.items() if name not in {"d2t", "t2d"}})


def export(head: EagleHead, model: Model, folder: Path) -> None:
    """bfloat16 in the published layout: `d2t` holds how far each drafted token is from its own number, `t2d` which tokens are drafted."""
    folder.mkdir(parents=True, exist_ok=True)
    config, name = model.whole.config, "eagle_aux_hidden_state_layer_ids"
    drafted = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill_(0, head.targets, value=True)
    tensors = {key: value.to(torch.bfloat16).contiguous() for key, value in head.state_dict().items()}
    tensors |= {"d2t": head.targets - torch.arange(len(head.targets)), "t2d": drafted}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    kept = "hidden_size intermediate_size num_attention_heads num_key_value_heads head_dim max_position_embeddings vocab_size"
    fields = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        **{field: getattr(config, field) for field in kept.split()},
        "num_hidden_layers": 1,
        "draft_vocab_size": len(head.targets),
        "hidden_act": config.hidden_act,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_parameters["rope_theta"],
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        name: list(model.inputs),  # by what enters them, for vLLM; below by what leaves them, for SGLang
        "eagle_config": {name: [layer - 1 for layer in model.inputs], "use_aux_hidden_state": True},
    }
    (folder / "config.json").write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m training.eagle", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="folder of the model that the head drafts for")
    parser.add_argument("--output", type=Path, required=True, help="folder for the finished head")
    parser.add_argument("--start", type=Path, help="folder of a head to go on from")
    parser.add_argument("--minutes", type=float, default=15.0, help="budget of time")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments)


def main() -> None:
    arguments = parse()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    model = Model(arguments.model)
    corpus = read_corpus()

    def rows(seed: int) -> Iterator[Tensor]:
        return Batches(corpus, model.tokenizer, seed).rows(CONTEXT_TOKENS, BATCH_TOKENS, last=True)

    targets = usual_tokens(rows(arguments.seed), model.whole.config.vocab_size, DRAFT_VOCABULARY)
    head = EagleHead(model.whole.config, targets)
    head.start_from(model.whole)
    if arguments.start:
        go_on_from(head, arguments.start)
    print(f"{sum(each.numel() for each in head.parameters())} parameters, {len(targets)} tokens drafted")
    train(head, model, rows(arguments.seed + 1 + bool(arguments.start)), arguments.minutes)
    embedded, states, said = model.says(next(rows(arguments.seed + 9))[:, :-1])
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        shares = agreement(head.unroll(embedded, states, STEPS), said, targets)
    print(
        "drafts that are what the model says:",
        ", ".join(f"the first {place} {share:.0%}" for place, share in enumerate(shares, 1)),
    )
    export(head, model, arguments.output)


if __name__ == "__main__":
    main()
