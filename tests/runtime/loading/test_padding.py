"""Rows are padded to few sizes, and what is padded changes no row."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from strata_runtime.model import padding
from strata_runtime.model.padding import padded


@given(st.integers(0, 3000), st.integers(1, 3))
def test_padding_keeps_the_rows_and_adds_zeros(count: int, width: int) -> None:
    rows = torch.ones(count, width)
    longer = padded(rows)
    assert torch.equal(longer[:count], rows)
    assert not longer[count:].any()
    assert longer.shape[0] <= max(1.5 * count, 1) or count > 96


def test_few_sizes_occur() -> None:
    assert len({padded(torch.empty(count)).shape[0] for count in range(1, 2049)}) <= 36


@pytest.mark.parametrize("multiplies", [True, False])
def test_nothing_is_padded_where_nothing_is_kept(*, multiplies: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where oneDNN multiplies no bfloat16, nobody keeps a kernel for a number of rows."""
    monkeypatch.setattr(padding, "onednn_multiplies", lambda: multiplies)
    rows, ids = torch.ones(17, 2, dtype=torch.bfloat16), torch.ones(17, dtype=torch.int64)
    assert padded(rows).shape[0] == (24 if multiplies else 17)
    assert padded(ids, torch.bfloat16).shape[0] == (24 if multiplies else 17)
    assert padded(ids, torch.float32).shape[0] == 24
