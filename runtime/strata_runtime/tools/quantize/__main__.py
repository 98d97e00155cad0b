"""Makes the any-precision copy of a model, or verifies it: `python -m strata_runtime.tools.quantize MODEL`. Called by `strata quantize`.

The copy lies beside the checkpoint (`strata-any/`), or where this node keeps those of models whose folders cannot be written. The last line of stdout
is what was made, as JSON; progress is on stderr. Run again after a break, it goes on where it was. Knows nothing of plans.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from strata_planner.contract.architectures import UnsupportedModelError
from strata_planner.contract.formats import ANY_PRECISION
from strata_planner.contract.model_folder import ANY_PRECISION_FOLDER
from strata_runtime.command_line import positive, window_tokens
from strata_runtime.errors import InputError
from strata_runtime.loading.artefact import find_artefact, open_artefact
from strata_runtime.loading.artefact_manifest import cache_folder
from strata_runtime.loading.digest import model_digest
from strata_runtime.loading.uri import resolve_model
from strata_runtime.model.adapter import read_config
from strata_runtime.progress import shown
from strata_runtime.tools.calibration.text import read_windows
from strata_runtime.tools.quantize.any_copy import Job, LayerDone, make_copy

INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """130: interrupted, run again it goes on; 0: done; 2: the input is wrong or the copy is damaged, said on stderr."""
    options = _parser().parse_args(arguments)
    torch.set_num_threads(options.threads)
    try:
        model = resolve_model(options.model)
        told = verify(model, options.output) if options.verify else run(model, options)
    except (InputError, UnsupportedModelError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    except KeyboardInterrupt:
        return INTERRUPTED
    sys.stdout.write(json.dumps(told) + "\n")
    return 0


def run(model: Path, options: argparse.Namespace) -> dict[str, object]:
    """Raises InputError, UnsupportedModelError."""
    if options.device == "cuda" and not torch.cuda.is_available():
        raise InputError("--device cuda: torch sees no CUDA device here; use --device cpu, or a CUDA build of torch")
    windows = _windows(model, options) if options.text else ()
    job = Job(
        model,
        folder_for(model, options.output),
        options.bits,
        windows=windows,
        device=torch.device(options.device),
        refit=not options.no_refit,
    )
    started = time.perf_counter()
    with shown("calibrating and quantizing" if windows else "quantizing") as update:
        layers = make_copy(job, update)
    return {
        "folder": str(job.folder),
        "calibration_tokens": sum(map(len, windows)),
        "bits": job.bits,
        "seed_bits": job.seed_bits,
        "refitted": job.refitted,
        "seconds": time.perf_counter() - started,
        "layers": [_told(layer) for layer in layers],
    }


def verify(model: Path, output: Path | None) -> dict[str, object]:
    """Reads all of the copy. Raises InputError where it is absent, unfinished, of another model, or a checksum is wrong."""
    artefact = find_artefact(model) if output is None else open_artefact(output, model)
    if artefact is None:
        raise InputError(f"{model} has no any-precision copy: run `strata quantize {model}`")
    started = time.perf_counter()
    with shown("verifying") as update:
        for done, _ in enumerate(artefact.verify(), start=1):
            update(done, artefact.manifest.layers)
    files = artefact.manifest.files
    return {
        "folder": str(artefact.folder),
        "verified_layers": len(files),
        "size_bytes": sum(file.size_bytes for file in files),
        "seconds": time.perf_counter() - started,
    }


def folder_for(model: Path, output: Path | None) -> Path:
    """Where the copy is made. Raises InputError where nothing can be written, before minutes of work."""
    beside = model / ANY_PRECISION_FOLDER
    folder = output or (
        beside if os.access(beside if beside.is_dir() else model, os.W_OK) else cache_folder(model_digest(model))
    )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{folder} cannot be made ({error.strerror}): name another place with --output") from error
    if not os.access(folder, os.W_OK):
        raise InputError(f"{folder} cannot be written: name another place with --output")
    return folder


def _told(layer: LayerDone) -> dict[str, object]:
    return {
        "layer": layer.layer,
        "shapes": layer.shapes,
        "size_bytes": layer.size_bytes,
        "seconds": layer.seconds,
        "kept": layer.kept,
    }


def _windows(model: Path, options: argparse.Namespace) -> tuple[torch.Tensor, ...]:
    window = min(options.window, getattr(read_config(model), "max_position_embeddings", None) or options.window)
    return read_windows(model, options.text, window, options.tokens, 0).calibration


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m strata_runtime.tools.quantize", description=__doc__.split("\n", maxsplit=1)[0]
    )
    parser.add_argument("model", help="folder or uri of the model")
    parser.add_argument("--bits", type=int, choices=sorted(ANY_PRECISION), default=8, help="of the widest model kept")
    parser.add_argument("--text", type=Path, help="UTF-8 text to calibrate with; without it all weights count alike")
    parser.add_argument("--tokens", type=positive, default=16384, help="of the text, at most")
    parser.add_argument("--window", type=window_tokens, default=512, help="tokens that are seen together")
    parser.add_argument(
        "--no-refit",
        action="store_true",
        help="with --text: weigh errors of weights alone, do not fit the tables of 3 to 5 bits to the inputs",
    )
    parser.add_argument("--output", type=Path, help=f"without it, {ANY_PRECISION_FOLDER} in the model's folder")
    parser.add_argument("--verify", action="store_true", help="make nothing: read the copy and compare its checksums")
    parser.add_argument("--threads", type=positive, default=1)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    return parser


if __name__ == "__main__":
    sys.exit(main())
