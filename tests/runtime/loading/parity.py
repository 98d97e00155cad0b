"""The parity table of docs/architectures.md: `python -m tests.runtime.loading.parity` prints it as measured.

For every tiny model: one ragged batch (a prompt's second chunk, a decode step, a two-token step of three sequences) over
three stages in fp32, beside the unsliced model of transformers.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from strata_planner.contract.formats import FormatName
from strata_planner.contract.frames import Segment
from tests.runtime.architectures import ALL, make_tiny_model, unsliced
from tests.runtime.loading.stages import Stages, roles

LENGTHS = {1: 14, 2: 18, 3: 13}
FIRST = [Segment(1, 0, 7, 0), Segment(2, 0, 17, 0), Segment(3, 0, 11, 0)]
RAGGED = [Segment(1, 7, 7, 7), Segment(2, 17, 1, 1), Segment(3, 11, 2, 2)]


def make_texts() -> dict[int, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {s: torch.randint(3, 96, (length,), generator=generator) for s, length in LENGTHS.items()}


def logits(model: Path, formats: Sequence[FormatName] | None = None, stages: int = 2) -> torch.Tensor:
    """Of the ragged batch over `stages` stages in fp32."""
    texts = make_texts()
    loaded = Stages(model, roles(model, stages, formats=formats))
    loaded.step(texts, FIRST)
    return loaded.step(texts, RAGGED)


def parity(name: str, folder: Path) -> tuple[float, float]:
    """The largest absolute difference of a logit, and the largest logit."""
    model = make_tiny_model(folder, name)
    texts, computed = make_texts(), logits(model, stages=3)
    whole = unsliced(model, attn_implementation="eager")
    with torch.inference_mode():
        expected = torch.cat([whole(texts[s.sequence][None]).logits[0, s.start :] for s in RAGGED])
    return float((computed - expected).abs().max()), float(expected.abs().max())


def main() -> None:
    torch.set_num_threads(1)
    print("| model | largest difference | largest logit |\n|---|---|---|")  # noqa: T201, a command
    for name in sorted(ALL):
        with tempfile.TemporaryDirectory() as folder:
            difference, largest = parity(name, Path(folder))
        print(f"| {name} | {difference:.1e} | {largest:.1f} |", flush=True)  # noqa: T201, a command


if __name__ == "__main__":
    main()
