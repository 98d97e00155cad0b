from itertools import pairwise

import pytest
import torch

from training.muon import Muon, orthogonalize


@pytest.mark.parametrize("shape", [(64, 64), (32, 96), (96, 32)], ids=["square", "wide", "tall"])
def test_singular_values_are_pushed_towards_one(shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    u, _, v = torch.linalg.svd(torch.randn(3, *shape, generator=generator), full_matrices=False)
    matrices = u * torch.linspace(1.0, 0.1, min(shape)) @ v
    values = torch.linalg.svdvals(orthogonalize(matrices).float())
    assert values.min() > 0.4
    assert values.max() < 1.4


def test_a_step_goes_down_the_loss_and_shapes_do_not_mix() -> None:
    torch.manual_seed(0)
    parameters = [
        torch.nn.Parameter(torch.randn(8, 8)),
        torch.nn.Parameter(torch.randn(16, 8)),
        torch.nn.Parameter(torch.randn(8, 8)),
    ]
    optimizer = Muon(parameters, lr=0.05, momentum=0.9, weight_decay=0.0)
    losses = []
    for _ in range(20):
        loss = sum(((p - 1) ** 2).sum() for p in parameters)
        assert isinstance(loss, torch.Tensor)
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all(later < earlier for earlier, later in pairwise(losses))
