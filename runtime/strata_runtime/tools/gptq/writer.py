"""A GPTQ checkpoint written file by file: one for each decoder layer and one for all else, beside copies of the tokenizer's files.

Called by `calibrated`. Each file is written whole under another name and then renamed, config.json last, so what is there is whole and a broken run
can go on: layers whose files are there, made in the same way of the same model, are read back. All that is not quantized is copied as it is.
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from strata_planner.contract.quantization import CONFIG_FIELD, OLD_CONFIG_FILE
from strata_planner.contract.store import replacing
from strata_runtime.errors import InputError
from strata_runtime.formats.gptq.codes import GptqCodes
from strata_runtime.formats.gptq.tensors import PARTS, GptqTensors, decode, encode
from strata_runtime.model.layer_paths import layer_of
from strata_runtime.tools.gptq.description import Description

CONFIG, INDEX = "config.json", "model.safetensors.index.json"
_WEIGHT, _CODES = ".weight", ".qweight"
_MARK = "strata-gptq"
_MODE = 0o644
_NOT_COPIED = (".safetensors", ".bin", ".pt", ".gguf")


class GptqWriter:
    """`files`: names of the source's safetensors files. `made_of`: what else decides the result (the text, the arithmetic), for resuming."""

    def __init__(
        self, source: Path, files: Iterable[str], output: Path, description: Description, made_of: Mapping[str, Any]
    ) -> None:
        """Raises InputError where `output` cannot be written, is the source, or holds another finished model."""
        self._source = source
        self._output = output
        self._description = description
        self._layers = len(description.layer_bits)
        self._file_of = {key: name for name in files for key in _keys(source / name)}
        self.mark = _digest(source, self._file_of, description, made_of)
        self._prepare()

    def has(self, layer: int) -> bool:
        """Whether an earlier run has written the layer."""
        return self._opened(layer) is not None

    def finished(self, layer: int) -> dict[str, GptqCodes] | None:
        """The linears of a layer that an earlier run has written, by name; None: it has not."""
        tensors = self._opened(layer)
        return None if tensors is None else self._decoded(tensors)

    def _opened(self, layer: int) -> dict[str, Tensor] | None:
        """Mapped, not read."""
        try:
            with safe_open(self._output / self._name(layer), framework="pt") as file:
                if (file.metadata() or {}).get(_MARK) != self.mark:
                    return None
                return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118, no mapping
        except (OSError, SafetensorError):
            return None

    def write_layer(self, layer: int, linears: Mapping[str, GptqCodes]) -> None:
        """linears: name in the checkpoint, without `.weight` -> codes. The layer's other tensors are copied."""
        stored: dict[str, Tensor] = {}
        for name, codes in linears.items():
            stored |= encode(codes, self._description.zeros).named(name)
        quantized = {name + _WEIGHT for name in linears}
        self._save(self._name(layer), stored | self._copied(layer, without=quantized))

    def finish(self) -> None:
        """What lies outside the layers, the index, the tokenizer's files and, last, config.json: then the model is whole."""
        self._save(self._name(None), self._copied(None, without=frozenset()))
        self._write_index()
        for path in sorted(self._source.iterdir()):
            if path.is_file() and path.name not in {CONFIG, INDEX} and not path.name.endswith(_NOT_COPIED):
                _whole(self._output / path.name, lambda scratch, path=path: shutil.copyfile(path, scratch))  # type: ignore[misc]
        config = json.loads((self._source / CONFIG).read_text(encoding="utf-8"))
        described = self._description.config()
        _write_json(self._output / OLD_CONFIG_FILE, described)
        _write_json(self._output / CONFIG, config | {CONFIG_FIELD: described})

    def _prepare(self) -> None:
        if self._output.resolve() == self._source.resolve():
            raise InputError(f"{self._output} is the model itself: name another folder with --output")
        if (self._output / CONFIG).exists():
            raise InputError(f"{self._output} holds a model already: remove it, or name another folder with --output")
        try:
            self._output.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"{self._output} cannot be made ({error.strerror}): name another folder") from error

    def _name(self, layer: int | None) -> str:
        place = 1 if layer is None else layer + 2
        return f"model-{place:05}-of-{self._layers + 1:05}.safetensors"

    def _copied(self, layer: int | None, *, without: Iterable[str]) -> dict[str, Tensor]:
        hidden = frozenset(without)
        wanted: dict[str, list[str]] = {}
        for key, file in self._file_of.items():
            if layer_of(key) == layer and key not in hidden:
                wanted.setdefault(file, []).append(key)
        tensors: dict[str, Tensor] = {}
        for file, keys in wanted.items():
            with safe_open(self._source / file, framework="pt") as opened:
                tensors |= {key: opened.get_tensor(key) for key in keys}
        return tensors

    def _save(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        metadata = {"format": "pt", _MARK: self.mark}

        def write(scratch: Path) -> None:
            save_file(dict(tensors), scratch, metadata)
            scratch.chmod(_MODE)  # safetensors keeps files to their owner, and slots may run as somebody else

        _whole(self._output / name, write)

    def _decoded(self, tensors: Mapping[str, Tensor]) -> dict[str, GptqCodes]:
        quantization, found = self._description.quantization, {}
        for key in tensors:
            if key.endswith(_CODES):
                name = key.removesuffix(_CODES)
                parts = {part: tensors[f"{name}.{part}"] for part in PARTS if f"{name}.{part}" in tensors}
                how = quantization.of(name)
                assert how is not None, f"{name} was written, and the description leaves it out"
                found[name] = decode(name, GptqTensors.of(name, parts), how, quantization.zeros)
        return found

    def _write_index(self) -> None:
        weight_map, total = {}, 0
        for layer in (None, *range(self._layers)):
            name = self._name(layer)
            with safe_open(self._output / name, framework="pt") as file:
                for key in file.keys():  # noqa: SIM118, no mapping
                    weight_map[key] = name
                    total += file.get_tensor(key).nbytes
        _write_json(self._output / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def write_gptq(
    source: Path,
    files: Iterable[str],
    output: Path,
    layers: Iterable[Mapping[str, GptqCodes]],
    description: Description,
) -> None:
    """The whole checkpoint at once. `layers`: the linears of each layer in turn, empty where it is left as it is. Raises InputError."""
    writer = GptqWriter(source, files, output, description, {})
    for layer, linears in enumerate(layers):
        writer.write_layer(layer, linears)
    writer.finish()


def _keys(path: Path) -> list[str]:
    with safe_open(path, framework="pt") as file:
        return list(file.keys())


def _digest(source: Path, file_of: Mapping[str, str], description: Description, made_of: Mapping[str, Any]) -> str:
    """Of what decides the result. The source's files count by size and time of change, which cost nothing to read."""
    files = [
        (name, (stat := (source / name).stat()).st_size, stat.st_mtime_ns) for name in sorted(set(file_of.values()))
    ]
    text = json.dumps([str(source.resolve()), files, description.config(), dict(made_of)], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    _whole(path, lambda scratch: scratch.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8"))


def _whole(path: Path, write: Callable[[Path], object]) -> None:
    """All of it or nothing: written under another name, then renamed."""
    try:
        with replacing(path) as scratch:
            write(scratch)
    except OSError as error:
        raise InputError(
            f"{path} cannot be written ({error.strerror or error}): make room, or name another folder"
        ) from error
