"""Which weights of a checkpoint are quantized already, and how: `quantization_config` of config.json, or an old `quantize_config.json`.

Read by the planner, which counts what such layers store, and by the runtime, which reads them, so that both say the same. Two methods are
read: GPTQ (Frantar et al., arXiv 2210.17323) as auto-gptq and GPTQModel write it, and `fp8` with a scale for each block, as
DeepSeek-V3 (arXiv 2412.19437, section 3.3) introduced it. Knows the description, not the tensors.

| field                          | meaning                                                                                     |
|--------------------------------|---------------------------------------------------------------------------------------------|
| `bits`                         | 2, 3, 4 or 8                                                                                |
| `group_size`                   | inputs that share a scale; -1: all of a row                                                 |
| `desc_act`                     | inputs were quantized in an order of their own, so groups are not runs of inputs            |
| `static_groups`                | groups are runs of inputs all the same (also under `meta`)                                  |
| `sym`                          | every zero is 2^(bits - 1)                                                                  |
| `checkpoint_format`, `format`  | `gptq`: zeros are stored less one; `gptq_v2`: as they are                                   |
| `dynamic`                      | regular expression -> overrides; `-:` before it: not quantized, `+:` or nothing: overridden |
| `modules_in_block_to_quantize` | the only linears of a layer that are quantized                                              |
| `meta.quantizer`               | who wrote it: tools differ in how zeros of 0 wrap around in `gptq`                          |

| field of `fp8`           | meaning                                                                                    |
|--------------------------|--------------------------------------------------------------------------------------------|
| `weight_block_size`      | outputs and inputs that share a scale, as `[128, 128]`                                     |
| `fmt`                    | `e4m3`, if it is there                                                                     |
| `activation_scheme`      | `dynamic`, if it is there: nothing is stored of activations                                |
| `modules_to_not_convert` | patterns and ends of paths whose linears are not quantized, as transformers reads them     |

`mxfp4` (gpt-oss' experts, by their tensors' names) is read to 16 bits: to the planner such a model is a plain one.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

from strata_planner.contract.architectures import UnsupportedModelError
from strata_planner.contract.formats import GPTQ, FormatName
from strata_planner.contract.text_part import TEXT_PARTS
from strata_planner.contract.values import Value

CONFIG_FIELD = "quantization_config"
OLD_CONFIG_FILE = "quantize_config.json"
Zeros = Literal["less one", "less one in words", "plain"]
_ZEROS_OF_FORMAT: dict[str, Zeros] = {"gptq": "less one", "gptq_v2": "plain"}
_BORROWING_QUANTIZERS = ("gptqmodel", "strata")
_WHOLE_ROW = -1
_SKIP, _OVERRIDE = "-:", "+:"
T = TypeVar("T")


class ModuleQuantization(Value, frozen=True):
    """How one linear is stored. `group`: inputs that share a scale, None: all of them; `ordered`: groups are not runs of inputs. `block`: of
    float8 with a scale for so many outputs and inputs; None: it is GPTQ's.
    """

    bits: int
    group: int | None
    ordered: bool
    symmetric: bool
    block: tuple[int, int] | None = None

    @property
    def format(self) -> FormatName:
        return "fp8_block" if self.block else GPTQ[self.bits]


class Override(Value, frozen=True):
    """One entry of `dynamic`: what modules whose path begins with a match of `pattern` do otherwise. `skip`: they are not quantized."""

    pattern: str
    skip: bool = False
    bits: int | None = None
    group_size: int | None = None
    desc_act: bool | None = None
    sym: bool | None = None


class Quantization(Value, frozen=True):
    """The description of a GPTQ checkpoint. `zeros`: how zeros are stored: plain, less one in each field, or less one in each field by a
    subtraction of whole 32-bit words (a field of zero borrows from the next one, and adding gives both back).
    """

    bits: int
    group_size: int
    desc_act: bool
    sym: bool
    static_groups: bool
    zeros: Zeros
    dynamic: tuple[Override, ...] = ()
    only: tuple[str, ...] = ()  # ends of the paths of the quantized linears; empty: all

    def of(self, path: str) -> ModuleQuantization | None:
        """The linear `path` (as `model.layers.0.mlp.up_proj`); None: the description leaves it in the model's own type.

        The first entry of `dynamic` that matches from the beginning of the path decides, as in GPTQModel and vLLM.
        """
        if self.only and not path.endswith(self.only):
            return None
        override = next((each for each in self.dynamic if re.match(each.pattern, path)), Override(""))
        if override.skip:
            return None
        size = _chosen(override.group_size, self.group_size)
        return ModuleQuantization(
            bits=_chosen(override.bits, self.bits),
            group=None if size == _WHOLE_ROW else size,
            ordered=_chosen(override.desc_act, self.desc_act) and not self.static_groups and size != _WHOLE_ROW,
            symmetric=_chosen(override.sym, self.sym),
        )


class BlockFloat8(Value, frozen=True):
    """The description of a checkpoint in float8. `block`: outputs and inputs that share a scale; `skipped`: as `modules_to_not_convert`."""

    block: tuple[int, int]
    skipped: tuple[str, ...] = ()

    def of(self, path: str) -> ModuleQuantization | None:
        """The linear `path` (as `model.layers.0.self_attn.q_proj`); None: it stays in the model's own type.

        A pattern counts from the beginning of the path up to a dot, or as its end, as in transformers.
        """
        if any(re.match(rf"(?:{each})(?:(?<=\.)|(?=\.|$))", path) or path.endswith(each) for each in self.skipped):
            return None
        return ModuleQuantization(bits=8, group=None, ordered=False, symmetric=True, block=self.block)


def read_quantization(config: Mapping[str, Any]) -> Quantization | BlockFloat8 | None:
    """What config.json says of weights that are quantized already; None: nothing, or they are read to 16 bits.

    Raises UnsupportedModelError for another method than GPTQ and block-wise fp8, and for a description that makes no sense.
    """
    fields = config.get(CONFIG_FIELD)
    if not fields:
        return None
    if not isinstance(fields, Mapping):
        raise UnsupportedModelError(f"{CONFIG_FIELD} is {fields!r}; an object is needed: fetch the model again")
    method = _method(fields)
    if is_read_to_16_bits(config):
        return None
    if str(config.get("model_type")) in TEXT_PARTS:
        raise UnsupportedModelError(
            f"{CONFIG_FIELD}: weights quantized by '{method}' are read of models for text alone, not of '{config['model_type']}'. "
            "Name the unquantized model"
        )
    if method == "fp8":
        return _block_float8(fields)
    if method != "gptq":
        raise UnsupportedModelError(
            f"{CONFIG_FIELD}: weights quantized by '{method}' are not read; GPTQ's are, and fp8 with a scale for each block. "
            "Name the unquantized model"
        )
    meta = fields.get("meta") if isinstance(fields.get("meta"), Mapping) else {}
    assert isinstance(meta, Mapping)
    return Quantization(
        bits=_bits(fields.get("bits"), "bits"),
        group_size=_group_size(fields.get("group_size", -1), "group_size"),
        desc_act=bool(fields.get("desc_act", False)),
        sym=bool(fields.get("sym", True)),
        static_groups=bool(fields.get("static_groups", meta.get("static_groups", False))),
        zeros=_zeros(fields, meta),
        dynamic=_dynamic(fields.get("dynamic") or {}),
        only=_only(fields.get("modules_in_block_to_quantize") or ()),
    )


def is_read_to_16_bits(config: Mapping[str, Any]) -> bool:
    """Whether the weights that are quantized already are read as those of a plain model: gpt-oss' experts in MXFP4."""
    fields = config.get(CONFIG_FIELD)
    return isinstance(fields, Mapping) and _method(fields) == "mxfp4" and config.get("model_type") == "gpt_oss"


def _method(fields: Mapping[str, Any]) -> str:
    return str(fields.get("quant_method") or fields.get("method") or "gptq").lower()


def with_old_description(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """config.json with what `quantize_config.json` beside it says, where auto-gptq wrote the description there alone."""
    file = folder / OLD_CONFIG_FILE
    if config.get(CONFIG_FIELD) or not file.is_file():
        return config
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UnsupportedModelError(f"{file} cannot be read as JSON ({error}): fetch the model again") from error
    return config | {CONFIG_FIELD: fields}


def without_description(config: Mapping[str, Any]) -> dict[str, Any]:
    """config.json as if its weights were plain: to be checked for all else."""
    return {key: value for key, value in config.items() if key != CONFIG_FIELD}


def _block_float8(fields: Mapping[str, Any]) -> BlockFloat8:
    block = fields.get("weight_block_size")
    sizes = block if isinstance(block, list | tuple) else ()
    if len(sizes) != 2 or not all(type(size) is int and size > 0 for size in sizes):
        raise UnsupportedModelError(
            f"{CONFIG_FIELD}: weight_block_size of fp8 is {block!r}; a scale for each block of outputs and inputs is read, as "
            "[128, 128]. Name the unquantized model"
        )
    for name, read in (("fmt", "e4m3"), ("activation_scheme", "dynamic")):
        if fields.get(name) not in (None, read):
            raise UnsupportedModelError(
                f"{CONFIG_FIELD}: {name} is {fields[name]!r}; '{read}' is read. Name the unquantized model"
            )
    skipped = fields.get("modules_to_not_convert") or ()
    if not isinstance(skipped, list | tuple) or not all(isinstance(name, str) for name in skipped):
        raise UnsupportedModelError(f"{CONFIG_FIELD}: modules_to_not_convert is {skipped!r}; a list of names is needed")
    for name in skipped:
        _check_pattern(name, f"modules_to_not_convert '{name}'")
    return BlockFloat8(block=(sizes[0], sizes[1]), skipped=tuple(skipped))


def _check_pattern(pattern: str, where: str) -> None:
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise UnsupportedModelError(
            f"{CONFIG_FIELD}: {where} is no regular expression ({error}): correct it"
        ) from error


def _zeros(fields: Mapping[str, Any], meta: Mapping[str, Any]) -> Zeros:
    name = str(fields.get("checkpoint_format") or fields.get("format") or "gptq").lower()
    if fields.get("is_marlin_format"):
        name = "marlin"
    if name not in _ZEROS_OF_FORMAT:
        raise UnsupportedModelError(
            f"{CONFIG_FIELD}: checkpoint_format '{name}' is a kernel's own layout; {' and '.join(_ZEROS_OF_FORMAT)} are read. "
            "Save the model again in one of these"
        )
    zeros = _ZEROS_OF_FORMAT[name]
    quantizers = meta.get("quantizer") or ()
    listed = quantizers if isinstance(quantizers, list | tuple) else [quantizers]
    borrowing = any(str(each).lower().startswith(_BORROWING_QUANTIZERS) for each in listed)
    return "less one in words" if borrowing and zeros == "less one" else zeros


def _dynamic(entries: Any) -> tuple[Override, ...]:
    if not isinstance(entries, Mapping):
        raise UnsupportedModelError(f"{CONFIG_FIELD}: dynamic is {entries!r}; an object of patterns is needed")
    return tuple(_override(key, value or {}) for key, value in entries.items())


def _override(key: str, fields: Any) -> Override:
    if not isinstance(fields, Mapping):
        raise UnsupportedModelError(f"{CONFIG_FIELD}: dynamic '{key}' is {fields!r}; an object of overrides is needed")
    pattern = key.removeprefix(_SKIP if key.startswith(_SKIP) else _OVERRIDE)
    where = f"dynamic '{key}'"
    _check_pattern(pattern, where)
    if key.startswith(_SKIP):
        return Override(pattern, skip=True)
    size, desc_act, sym = (fields.get(name) for name in ("group_size", "desc_act", "sym"))
    return Override(
        pattern,
        bits=_bits(fields["bits"], f"{where} bits") if "bits" in fields else None,
        group_size=None if size is None else _group_size(size, f"{where} group_size"),
        desc_act=None if desc_act is None else bool(desc_act),
        sym=None if sym is None else bool(sym),
    )


def _only(listed: Any) -> tuple[str, ...]:
    """`[["self_attn.q_proj", ...], ...]`, or one flat list."""
    outer = listed if isinstance(listed, list | tuple) else [None]
    flat = [name for each in outer for name in (each if isinstance(each, list | tuple) else [each])]
    if not all(isinstance(name, str) for name in flat):
        raise UnsupportedModelError(
            f"{CONFIG_FIELD}: modules_in_block_to_quantize is {listed!r}; a list of lists of names is needed"
        )
    return tuple(f".{name}" for name in flat)


def _bits(value: Any, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value not in GPTQ:
        raise UnsupportedModelError(f"{CONFIG_FIELD}: {where} is {value!r}; weights of {_listed(GPTQ)} bits are read")
    return value


def _group_size(value: Any, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or (value < 1 and value != _WHOLE_ROW):
        raise UnsupportedModelError(
            f"{CONFIG_FIELD}: {where} is {value!r}; a whole number of at least 1, or -1 for a whole row, is needed"
        )
    return value


def _listed(values: Mapping[int, Any]) -> str:
    *most, last = map(str, values)
    return f"{', '.join(most)} or {last}"


def _chosen(override: T | None, base: T) -> T:
    return base if override is None else override
