"""`strata sensitivity`: has the runtime calibrate a model in a process of its own, and shows what came out."""

import math
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from strata_operator.errors import InvalidInputError
from strata_operator.local.errors import LocalError
from strata_operator.local.run import leave_on_signals
from strata_operator.observe.model_files import local_folder, read_config
from strata_planner.contract.calibration import Calibration
from strata_planner.contract.processors import cores
from strata_planner.sensitivity import Sensitivity, predicted_perplexity_increase

CALIBRATE = (sys.executable, "-m", "strata_runtime.tools.calibration")
BITS = (8, 4, 3)


@dataclass(frozen=True, slots=True)
class SensitivityOptions:
    """The flags of `strata sensitivity`."""

    model: str
    text: Path | None
    output: Path | None
    tokens: int
    held_back_tokens: int
    device: str


def run(options: SensitivityOptions) -> None:
    """Raises what `commands.errors` knows; the runtime's own sentence, where it refuses, is on stderr already."""
    leave_on_signals()
    uri = _uri(options.model)
    config = read_config(uri)  # wrong input is said before torch is imported
    ended = subprocess.run(_command(options, uri), stdout=subprocess.PIPE, text=True, check=False)  # noqa: S603  our own module
    if ended.returncode == 2:
        raise InvalidInputError(options.model, ["not calibrated, for the reason above"])
    if ended.returncode:
        raise LocalError(f"calibrating {options.model} failed (exit {ended.returncode})")
    path = Path(ended.stdout.strip().splitlines()[-1])
    console = Console()
    console.print(shown(Sensitivity.from_statistics(Calibration.from_file(path, config))))
    console.print(f"kept in {path}", soft_wrap=True)


def shown(sensitivity: Sensitivity) -> Table:
    """Omega per layer and bits; below, what the whole model at these bits should cost in perplexity."""
    fit, layers = sensitivity.fit, len(sensitivity.omega)
    table = Table(title=sensitivity.source, title_justify="left", show_footer=True)
    table.add_column("layer", "points of perplexity" if fit else "sum", justify="right")
    for bits in BITS:
        whole = [bits] * layers
        foot = f"+{predicted_perplexity_increase(sensitivity, whole):.3g}" if fit else f"{sensitivity.total(whole):.4g}"
        table.add_column(f"{bits} bits", foot, justify="right")
    for layer in range(layers):
        table.add_row(str(layer), *(f"{sensitivity.of(layer, bits):.4g}" for bits in BITS))
    if fit:
        table.caption = (
            f"{fit.curve} curve through {fit.points} measured losses; each is predicted from the others within a factor of "
            f"{math.exp(fit.leave_one_out):.2f} on average"
        )
    return table


def _uri(model: str) -> str:
    if model.startswith(("file://", "pvc://")):
        return model
    if "://" in model:
        raise InvalidInputError(
            model, ["the file is kept beside the weights; name a folder, file:// or pvc://claim/path"]
        )
    return f"file://{Path(model).resolve()}"


def _command(options: SensitivityOptions, uri: str) -> list[str]:
    model = str(local_folder(uri)) if uri.startswith("file://") else uri
    command = [*CALIBRATE, model, "--threads", str(cores()), "--device", options.device]
    command += ["--tokens", str(options.tokens), "--held-back-tokens", str(options.held_back_tokens)]
    for flag, path in (("--text", options.text), ("--output", options.output)):
        if path is not None:
            command += [flag, str(path)]
    return command
