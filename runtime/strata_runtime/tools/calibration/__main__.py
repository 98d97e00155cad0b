"""Calibrates a model: `python -m strata_runtime.tools.calibration MODEL --text FILE`. Called by `strata sensitivity`.

Writes `strata-sensitivity.json` beside the checkpoint, whole or not at all. Knows nothing of plans.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import torch

from strata_planner.contract.architectures import UnsupportedModelError
from strata_planner.contract.calibration import CALIBRATION_FILE, Calibration
from strata_planner.contract.formats import ComputeType
from strata_planner.contract.store import write_whole
from strata_runtime.command_line import natural, positive, window_tokens
from strata_runtime.errors import InputError
from strata_runtime.formats import COMPUTE_DTYPES
from strata_runtime.loading.uri import resolve_model
from strata_runtime.model.adapter import read_config
from strata_runtime.progress import shown
from strata_runtime.tools.calibration.calibrate import Subject, calibrate
from strata_runtime.tools.calibration.text import Windows, read_windows


def main(arguments: Sequence[str] | None = None) -> int:
    """0: written; 2: the input is wrong, said on stderr."""
    options = _parser().parse_args(arguments)
    torch.set_num_threads(options.threads)
    try:
        folder = resolve_model(options.model)
        output = options.output or folder / CALIBRATION_FILE
        _check_writable(output)
        calibration = run(folder, options)
        write(calibration, output)
    except (InputError, UnsupportedModelError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    sys.stdout.write(f"{output}\n")
    return 0


def run(folder: Path, options: argparse.Namespace) -> Calibration:
    """Raises InputError, UnsupportedModelError."""
    if options.device == "cuda" and not torch.cuda.is_available():
        raise InputError("--device cuda: torch sees no CUDA device here; use --device cpu, or a CUDA build of torch")
    windows = _windows(folder, options)
    subject = Subject(folder, windows[1], COMPUTE_DTYPES[options.compute_type], torch.device(options.device))
    with shown("calibrating layers") as update:
        return calibrate(subject, windows[0], update)


def write(calibration: Calibration, path: Path) -> None:
    """Whole or not at all: a reader never sees half a file. Raises InputError."""
    try:
        write_whole(path, calibration.encode())
    except OSError as error:
        raise InputError(f"{path} cannot be written ({error.strerror}): name another place with --output") from error


def _windows(folder: Path, options: argparse.Namespace) -> tuple[Windows, str]:
    limit = getattr(read_config(folder), "max_position_embeddings", None) or options.window
    text: Path = options.text or folder / "heldout.txt"
    if not text.is_file():
        raise InputError(
            f"there is no {text}: name a text like those that the model will see, with --text FILE (some 100,000 characters)"
        )
    windows = read_windows(folder, text, min(options.window, limit), options.tokens, options.held_back_tokens)
    return windows, text.name


def _check_writable(output: Path) -> None:
    """Before minutes of work."""
    if not os.access(output.parent, os.W_OK):
        raise InputError(f"{output.parent} cannot be written: name another place with --output")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m strata_runtime.tools.calibration", description=__doc__.split("\n", maxsplit=1)[0]
    )
    parser.add_argument("model", help="folder or uri of the model")
    parser.add_argument("--text", type=Path, help="UTF-8 text; without it, heldout.txt of the model's folder")
    parser.add_argument("--output", type=Path, help=f"without it, {CALIBRATION_FILE} in the model's folder")
    parser.add_argument("--tokens", type=positive, default=8192, help="tokens that statistics are taken of")
    parser.add_argument(
        "--held-back-tokens", type=natural, default=16384, help="other tokens that losses are measured on; 0: none"
    )
    parser.add_argument("--window", type=window_tokens, default=512, help="tokens that are seen together")
    parser.add_argument("--threads", type=positive, default=1)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--compute-type", choices=get_args(ComputeType), default="float32")
    return parser


if __name__ == "__main__":
    sys.exit(main())
