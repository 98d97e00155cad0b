"""The head that is trained is the one that drafts: its unrolled test gives what a published head drafts over the whole text."""

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from strata_runtime.loading.draft_head import HeadFolder
from tests.runtime.slot.eagle_heads import PlainHead
from training.eagle import Model, export
from training.eagle_head import EagleHead, agreement, fused_inputs, loss_of

VOCABULARY, STEPS = 96, 4


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Model:
    """In float32, without a tokenizer."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
    )
    whole = LlamaForCausalLM(config).eval()
    whole.save_pretrained(tmp_path / "model")
    made = Model.__new__(Model)
    made.whole, made.inputs = whole, fused_inputs(6)
    return made


def a_head(model: Model) -> EagleHead:
    targets = torch.randperm(VOCABULARY)[:40].sort().values
    head = EagleHead(model.whole.config, targets)
    with torch.no_grad():
        for each in head.parameters():  # rounded already: what is exported is what is computed here
            drawn = (
                1 + 0.1 * torch.randn(each.shape) if each.ndim == 1 else torch.randn(each.shape) * each.shape[1] ** -0.5
            )
            each.copy_(drawn.to(torch.bfloat16))
    return head


def test_an_exported_head_drafts_what_it_was_trained_to(model: Model, tmp_path: Path) -> None:
    head = a_head(model)
    export(head, model, tmp_path / "head")
    folder = HeadFolder(tmp_path / "head")
    assert folder.shape.fused_layers(6) == tuple(layer - 1 for layer in model.inputs)
    assert torch.equal(folder.targets(VOCABULARY), head.targets)
    plain = PlainHead(tmp_path / "model", tmp_path / "head", model.inputs)
    text = torch.randint(0, VOCABULARY, (15,)).tolist()
    drafted = plain.chain(text, STEPS)
    rows = torch.tensor([[*text, *drafted]])
    embedded, states, _ = model.says(rows)
    found = [head.targets[each[0, len(text) - 2].argmax()].item() for each in head.unroll(embedded, states, STEPS)]
    assert found == drafted


@pytest.mark.slow  # its pieces are tested above
def test_a_few_steps_go_down_the_loss_and_up_with_agreement(model: Model) -> None:
    head = a_head(model)
    head.start_from(model.whole)
    rows = torch.randint(0, VOCABULARY, (4, 24))
    embedded, states, said = model.says(rows)
    optimizer = torch.optim.AdamW(head.parameters(), lr=0.01)
    losses, shares = [], []
    for _ in range(40):
        logits = head.unroll(embedded, states, STEPS)
        loss = loss_of(logits, said, head.targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        shares.append(agreement(logits, said, head.targets))
    assert losses[-1] < losses[0]
    assert shares[-1][0] > shares[0][0]
    assert all(first >= second for first, second in zip(shares[-1], shares[-1][1:], strict=False))
