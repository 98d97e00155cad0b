"""`strata quantize`: has the runtime quantize a model in a process of its own, and shows what came out."""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from strata_operator.errors import InvalidInputError
from strata_operator.local.errors import LocalError
from strata_operator.local.run import leave_on_signals
from strata_operator.observe.model_files import local_folder, read_config
from strata_planner.contract.formats import ANY_PRECISION, stored_bytes
from strata_planner.contract.processors import cores

ANY = (sys.executable, "-m", "strata_runtime.tools.quantize")
GPTQ = (sys.executable, "-m", "strata_runtime.tools.gptq")
Method = Literal["any-precision", "gptq"]
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class QuantizeOptions:
    """The flags of `strata quantize`. `bits` None: 8 for any precision, 4 for GPTQ."""

    model: str
    method: Method
    bits: int | None
    text: Path | None
    tokens: int
    output: Path | None
    device: str
    no_refit: bool
    verify: bool
    json: bool


def run(options: QuantizeOptions) -> None:
    """Raises what `commands.errors` knows; the runtime's own sentence, where it refuses, is on stderr already."""
    leave_on_signals()
    uri = _uri(options.model)
    read_config(uri)  # wrong input is said before torch is imported
    command = _command(options, uri)
    try:
        ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)  # noqa: S603  our own modules
    except SystemExit:
        if not options.verify:
            sys.stderr.write("stopped; the same command goes on where it stopped\n")
        raise
    if ended.returncode == 2:
        what = "not verified" if options.verify else "not quantized"
        raise InvalidInputError(options.model, [f"{what}, for the reason above"])
    if ended.returncode:
        raise LocalError(
            f"quantizing {options.model} failed (exit {ended.returncode}); start again to go on where it stopped"
        )
    _show(options, ended.stdout.strip().splitlines()[-1])


def shown(told: dict[str, Any]) -> Table:
    """A row per layer: what a slot stores of it at every width, and how long it took; below, the sums."""
    tokens = told["calibration_tokens"]
    fitted = f", tables of {told['refitted'][0]} to {told['refitted'][-1]} bits fitted" if told["refitted"] else ""
    how = (
        f"calibrated with {tokens} tokens{fitted}"
        if tokens
        else "not calibrated: all weights count alike (--text FILE)"
    )
    widths = range(told["seed_bits"], told["bits"] + 1)
    bytes_of = [[_linear_bytes(layer["shapes"], bits) for bits in widths] for layer in told["layers"]]
    table = Table(title=f"any-precision copy, {how}; MiB of its linears", title_justify="left", show_footer=True)
    table.add_column("layer", "all", justify="right")
    for place, bits in enumerate(widths):
        table.add_column(f"{bits} bits", _mib(sum(row[place] for row in bytes_of)), justify="right")
    table.add_column("copy", _mib(sum(layer["size_bytes"] for layer in told["layers"])), justify="right")
    table.add_column("seconds", f"{told['seconds']:.1f}", justify="right")
    for layer, row in zip(told["layers"], bytes_of, strict=True):
        seconds = "kept" if layer["kept"] else f"{layer['seconds']:.1f}"
        table.add_row(str(layer["layer"]), *map(_mib, row), _mib(layer["size_bytes"]), seconds)
    return table


def _linear_bytes(shapes: dict[str, Sequence[int]], bits: int) -> int:
    return sum(stored_bytes(ANY_PRECISION[bits], outputs, inputs, "bfloat16") for outputs, inputs in shapes.values())


def _mib(count: int) -> str:
    return f"{count / _MIB:,.1f}"


def _show(options: QuantizeOptions, line: str) -> None:
    console = Console()
    if options.method == "gptq":
        told: dict[str, Any] = {"folder": line}
    else:
        told = json.loads(line)
    if options.json:
        sys.stdout.write(json.dumps(told) + "\n")
        return
    if "layers" in told:
        console.print(shown(told))
    if "verified_layers" in told:
        size, seconds = told["size_bytes"] / _MIB, told["seconds"]
        console.print(f"all {told['verified_layers']} layers are right: {size:,.1f} MiB read in {seconds:.1f} seconds")
    console.print(f"kept in {told['folder']}", soft_wrap=True)


def _uri(model: str) -> str:
    if model.startswith(("file://", "pvc://", "hf://")):
        return model
    if "://" in model:
        raise InvalidInputError(model, ["name a folder, file://, pvc://claim/path or hf://owner/name"])
    return f"file://{Path(model).resolve()}"


def _command(options: QuantizeOptions, uri: str) -> list[str]:
    model = str(local_folder(uri)) if uri.startswith("file://") else uri
    common = ["--threads", str(cores()), "--device", options.device, "--tokens", str(options.tokens)]
    for flag, value in (("--bits", options.bits), ("--text", options.text), ("--output", options.output)):
        if value is not None:
            common += [flag, str(value)]
    if options.method == "any-precision":
        return [*ANY, model, *common] + ["--no-refit"] * options.no_refit + ["--verify"] * options.verify
    if options.no_refit:
        raise InvalidInputError("--no-refit", ["GPTQ has no tables to fit; leave --method gptq or this away"])
    if options.verify:
        raise InvalidInputError("--verify", ["only any-precision copies have checksums; leave --method gptq away"])
    if options.output is None:
        raise InvalidInputError("--method gptq", ["a new checkpoint is written: name its folder with --output DIR"])
    return [*GPTQ, model, *common]
