"""Seeded sensitivities for models whose weights are not at hand: `python -m benchmarks.seeded_omegas` writes them anew.

Read by the planner's benchmark. They stand in for calibrated tables and say so: no layer equals another, and as with LLM-PQ's
indicator (arXiv 2403.01136, Proposition 2) omega falls with the square of the quantization levels. Unit: the whole model at
4 bits is 1, so theta is what 4 bits are worth in seconds of the batch.
"""

import json
import math
import random
from pathlib import Path

import msgspec

from strata_planner.sensitivity import Sensitivity

FOLDER = Path(__file__).parent.parent / "examples" / "sensitivities"
LAYERS = {"opt-13b": 40, "opt-30b": 48, "opt-66b": 64, "bloom-176b": 70}
SEED = 2403
_SPREAD = 0.5  # standard deviation of the logarithm
_BITS = (3, 4, 8)


def seeded(layers: int, seed: int = SEED) -> Sensitivity:
    """Log-normal over the layers, growing by half from the first to the last."""
    draw = random.Random(f"{seed} {layers}")
    weights = [math.exp(draw.gauss(0, _SPREAD)) * (1 + layer / (2 * layers)) for layer in range(layers)]
    total = sum(weights)
    omega = tuple(
        {str(b): float(f"{weight / total * (15 / (2**b - 1)) ** 2:.5g}") for b in _BITS} for weight in weights
    )
    return Sensitivity(f"seeded ({seed}), not calibrated: lognormal over layers x 1/(2^bits - 1)^2", omega)


def file_of(model: str) -> Path:
    return FOLDER / f"{model}-seeded.json"


if __name__ == "__main__":
    for name, count in LAYERS.items():
        table = msgspec.to_builtins(seeded(count))
        rows = ",\n  ".join(json.dumps(row) for row in table["omega"])
        file_of(name).write_text(
            f'{{\n "source": {json.dumps(table["source"])},\n "omega": [\n  {rows}\n ]\n}}\n', encoding="utf-8"
        )
