"""The pass that quantizes a model: layer after layer sees the calibration windows as the layers before it, quantized, hand them on.

Called by `__main__`. At any time one layer, its Hessians and the hidden states of all windows are held. A broken run goes on where it was,
with the states that its last layer handed on (`.calibration/` in the output until all is written).
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from strata_planner.contract.formats import GPTQ
from strata_runtime.errors import InputError
from strata_runtime.formats.gptq.codes import GptqCodes
from strata_runtime.loading.checkpoint import Checkpoint
from strata_runtime.model.layer_paths import layer_of, within_layer
from strata_runtime.tools.calibration.hessians import input_hessians
from strata_runtime.tools.calibration.kept import FOLDER, KeptStates
from strata_runtime.tools.calibration.layers import LayeredModel, Piece
from strata_runtime.tools.gptq.description import Description
from strata_runtime.tools.gptq.solver import GptqSettings, quantize_gptq
from strata_runtime.tools.gptq.writer import GptqWriter

CPU = torch.device("cpu")
Progress = Callable[[float, int], None]


@dataclass(frozen=True)
class Job:
    """What is quantized, where to, how, and in which arithmetic. `text`: the name under which the calibration text is recorded."""

    source: Path
    output: Path
    description: Description
    text: str
    dtype: torch.dtype = torch.float32
    device: torch.device = CPU


def quantize_model(job: Job, windows: Sequence[Tensor], progress: Progress) -> None:
    """windows: token ids [tokens] each. `progress(layers done, layers)`, layers in parts too. Raises InputError, UnsupportedModelError."""
    checkpoint, made_of = Checkpoint(job.source), _made_of(job, windows)
    with torch.inference_mode(), contextlib.ExitStack() as stack:
        model = LayeredModel(job.source, job.dtype, job.device)
        if len(job.description.layer_bits) != model.num_layers:
            raise InputError(f"bits for {len(job.description.layer_bits)} layers, and the model has {model.num_layers}")
        writer = GptqWriter(job.source, checkpoint.files, job.output, job.description, made_of)
        kept = stack.enter_context(KeptStates(job.output / FOLDER, writer.mark))
        begin, states = _begun(model, writer, kept, windows, job.device)
        for index, bits in enumerate(job.description.layer_bits):
            if index < begin:
                progress(index + 1, model.num_layers)
                continue
            layer = model.layer(index)
            names = _names(layer, index, checkpoint.keys)
            codes = writer.finished(index)
            if codes is None:
                codes = {}
                for done, (path, found) in enumerate(_quantized(layer, states, bits, job.description.settings)):
                    codes[names[path]] = found
                    progress(index + (done + 1) / len(names), model.num_layers)
                writer.write_layer(index, codes)
            by_path = {path: codes[name].dequantized(job.dtype) for path, name in names.items() if name in codes}
            with layer.with_weights({path: weight.to(job.device) for path, weight in by_path.items()}):
                states = layer.run(states)
            kept.put(_name(index + 1), states)
            kept.drop(_name(index))
            progress(index + 1, model.num_layers)
        writer.finish()
        kept.clear()


def _begun(
    model: LayeredModel, writer: GptqWriter, kept: KeptStates, windows: Sequence[Tensor], device: torch.device
) -> tuple[int, list[Tensor]]:
    """The layer to go on at, and what enters it: an earlier run has written all layers before, and kept that."""
    for index in range(model.num_layers, 0, -1):
        if kept.has(_name(index)) and all(writer.has(each) for each in range(index)):
            states = kept.get(_name(index), device)
            if states is not None:
                return index, states
    return 0, model.embedding().run(windows)


def _name(layer: int) -> str:
    return f"states-{layer:05d}"


def _quantized(
    layer: Piece, states: Sequence[Tensor], bits: int, settings: GptqSettings
) -> Iterator[tuple[str, GptqCodes]]:
    """Path in the layer -> codes; nothing for a layer that is left as it is."""
    if bits not in GPTQ:
        return
    linears = layer.linears
    for shared in input_hessians(layer, states):
        for path in shared.linears:
            weight = linears[path].weight.data
            codes = quantize_gptq(weight, shared.hessian, replace(settings, bits=bits), name=path)
            yield path, _on_cpu(codes)


def _on_cpu(codes: GptqCodes) -> GptqCodes:
    tensors = (each.cpu() for each in (codes.codes, codes.scales, codes.zeros, codes.groups))
    return GptqCodes(codes.bits, *tensors)


def _names(layer: Piece, index: int, keys: Sequence[str]) -> dict[str, str]:
    """Path of a linear in its layer -> its name in the checkpoint. Raises InputError where the checkpoint calls it otherwise."""
    names = {}
    for path in layer.linears:
        ending = f"{path}.weight"
        found = [key for key in keys if layer_of(key) == index and within_layer(key) == ending]
        if len(found) != 1:
            raise InputError(
                f"the checkpoint has {len(found)} tensors of layer {index} that end in '{ending}', and one is needed: this model's names are not "
                "those of its modules, and its GPTQ form could not be read back"
            )
        names[path] = found[0].removesuffix(".weight")
    return names


def _made_of(job: Job, windows: Sequence[Tensor]) -> Mapping[str, object]:
    tokens = torch.cat(list(windows)).tolist()
    return {"text": job.text, "tokens": tokens, "windows": [len(each) for each in windows], "dtype": str(job.dtype)}
