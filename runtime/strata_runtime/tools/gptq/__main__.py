"""Quantizes a model by GPTQ: `python -m strata_runtime.tools.gptq MODEL --bits 4 --group 128 --text FILE --output DIR`.

Called by `strata quantize --method gptq` in a process of its own. Writes a checkpoint that Strata, transformers with GPTQModel, and vLLM
read. Run again after a break, it goes on where it was. Knows nothing of plans.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import torch

from strata_planner.contract.architectures import UnsupportedModelError, check_without_experts
from strata_planner.contract.formats import GPTQ, ComputeType
from strata_planner.contract.quantization import CONFIG_FIELD, with_old_description
from strata_runtime.allocator import freed_at_once
from strata_runtime.command_line import positive, window_tokens
from strata_runtime.errors import InputError
from strata_runtime.formats import COMPUTE_DTYPES
from strata_runtime.loading.uri import resolve_model
from strata_runtime.model.adapter import read_config
from strata_runtime.progress import shown
from strata_runtime.tools.calibration.text import read_windows
from strata_runtime.tools.gptq.calibrated import Job, quantize_model
from strata_runtime.tools.gptq.description import CheckpointFormat, Description
from strata_runtime.tools.gptq.solver import GptqSettings

INTERRUPTED = 130
_WHOLE_ROW = -1


def main(arguments: Sequence[str] | None = None) -> int:
    """130: interrupted, run again it goes on; 0: written; 2: the input is wrong, said on stderr."""
    options = _parser().parse_args(arguments)
    torch.set_num_threads(options.threads)
    try:
        folder = resolve_model(options.model)
        run(folder, options)
    except (InputError, UnsupportedModelError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    except KeyboardInterrupt:
        return INTERRUPTED
    sys.stdout.write(f"{options.output}\n")
    return 0


def run(folder: Path, options: argparse.Namespace) -> None:
    """Raises InputError, UnsupportedModelError."""
    if options.device == "cuda" and not torch.cuda.is_available():
        raise InputError("--device cuda: torch sees no CUDA device here; use --device cpu, or a CUDA build of torch")
    fields = with_old_description(json.loads((folder / "config.json").read_text(encoding="utf-8")), folder)
    if CONFIG_FIELD in fields:
        raise InputError(f"{folder} is quantized already: name the model that it was made of")
    config = read_config(folder)
    check_without_experts(fields, "GPTQ")
    description = _description(options, config.num_hidden_layers)
    window = min(options.window, getattr(config, "max_position_embeddings", None) or options.window)
    text: Path = options.text or folder / "heldout.txt"
    if not text.is_file():
        raise InputError(f"there is no {text}: name a text like those that the model will see, with --text FILE")
    windows = read_windows(folder, text, window, options.tokens, 0).calibration
    dtype, device = COMPUTE_DTYPES[options.compute_type], torch.device(options.device)
    job = Job(folder, options.output, description, text.name, dtype, device)
    with freed_at_once(), shown("quantizing layers") as update:
        quantize_model(job, windows, update)


def _description(options: argparse.Namespace, layers: int) -> Description:
    group = None if options.group == _WHOLE_ROW else options.group
    settings = GptqSettings(
        bits=options.bits,
        group=group,
        symmetric=not options.asymmetric,
        act_order=not options.no_act_order,
        static_groups=not options.ordered_groups,
        damp=options.damp,
    )
    layer_bits = [options.bits] * layers
    for chosen, bits in options.layer_bits or ():
        for layer in chosen:
            if layer >= layers:
                raise InputError(f"--layer-bits: there is no layer {layer}; the model has layers 0 to {layers - 1}")
            layer_bits[layer] = bits
    # zeros of 0 have no form in `gptq` that all readers share
    usual: CheckpointFormat = "gptq_v2" if options.asymmetric else "gptq"
    return Description(settings, tuple(layer_bits), options.format or usual)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m strata_runtime.tools.gptq", description=__doc__.split("\n", maxsplit=1)[0]
    )
    parser.add_argument("model", help="folder or uri of the model, not quantized")
    parser.add_argument("--output", type=Path, required=True, help="folder of the new checkpoint")
    parser.add_argument("--bits", type=int, choices=sorted(GPTQ), default=4)
    parser.add_argument(
        "--layer-bits", type=_layer_bits, metavar="0-3=8,11=16", help="other bits for some layers; 16: left alone"
    )
    parser.add_argument("--group", type=_group, default=128, help="inputs that share a scale; -1: a whole row")
    parser.add_argument("--text", type=Path, help="UTF-8 text; without it, heldout.txt of the model's folder")
    parser.add_argument("--tokens", type=positive, default=16384, help="of the text, at most")
    parser.add_argument("--window", type=window_tokens, default=512, help="tokens that are seen together")
    parser.add_argument("--asymmetric", action="store_true", help="a zero of its own for every group")
    parser.add_argument("--no-act-order", action="store_true", help="round inputs in the model's order")
    parser.add_argument("--ordered-groups", action="store_true", help="groups by act-order: desc_act in the old sense")
    parser.add_argument(
        "--damp", type=float, default=0.01, help="share of the Hessian's mean that is added to its diagonal"
    )
    parser.add_argument("--format", choices=get_args(CheckpointFormat), help="gptq, or gptq_v2 with --asymmetric")
    parser.add_argument("--threads", type=positive, default=1)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--compute-type", choices=get_args(ComputeType), default="float32")
    return parser


def _layer_bits(text: str) -> list[tuple[range, int]]:
    """`0-3=8,11=16`."""
    found = []
    for part in text.split(","):
        layers, _, bits = part.partition("=")
        first, _, last = layers.partition("-")
        if not (first.isdigit() and (last or first).isdigit() and bits.isdigit()):
            raise argparse.ArgumentTypeError(f"{part!r} is no layers=bits; write 0-3=8 or 11=16, with commas between")
        found.append((range(int(first), int(last or first) + 1), int(bits)))
    return found


def _group(text: str) -> int:
    return _WHOLE_ROW if text == str(_WHOLE_ROW) else positive(text)


if __name__ == "__main__":
    sys.exit(main())
