"""Published measurements of serving engines, and how they were taken: the accuracy data of `aiconfigurator-core` (Apache-2.0).

Read from the installed package (`systems/silicon_sample.csv`), never copied. Its rows are of two kinds, told apart by `measured`:

- `InferenceMAX`, October 2025 (SemiAnalysis, https://github.com/SemiAnalysisAI/InferenceMAX, Apache-2.0): Llama-3.3-70B-Instruct-FP8, whose
  shapes are those of Llama-3.1-70B. `benchmarks/70b_fp8_*.sh` and `.github/workflows/full-sweep-tmpl.yml` of 20 October 2025 say how: all
  clients start at once and send on as they are answered, lengths drawn evenly from 0.8 to 1 of the nominal ones, KV of 8 bits, at most
  8,192 tokens a step under vLLM (0.10.2) and 16,384 under TensorRT-LLM (1.1.0rc2).
- Its authors' own comparisons: Llama-3.1-8B and Qwen3-32B. The clients' settings were not published. Taken here: fixed lengths, KV of 8
  bits where `nvidia`'s checkpoint says so (`hf_quant_config.json`) and else of 16, 8,192 tokens a step, what all three engines default to.
"""

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import util
from pathlib import Path

from strata_planner.contract.formats import FormatName
from strata_planner.costs.operators import PACKAGE, SYSTEMS
from strata_planner.question.model import Model

EXAMPLES = Path(__file__).parents[2] / "examples" / "models"
TUNED_ON = "Qwen/Qwen3-32B"  # looked at while the operator tables' terms were worked out; every other model is held out
_FORMATS: dict[str, FormatName] = {"": "dense", "bfloat16": "dense", "fp8": "fp8_a8"}
_INFERENCE_MAX = "meta-llama/Llama-3.1-70B"
_STEP_TOKENS = {("InferenceMAX", "vllm"): 8192, ("InferenceMAX", "trtllm"): 16384}
_DEFAULT_STEP_TOKENS = 8192


@dataclass(frozen=True)
class Sample:
    """One measured load on one engine. `device`: a catalogue name; `shortest`: the least share of the nominal lengths that is drawn."""

    name: str
    engine: str
    model: str
    device: str
    format_name: FormatName
    tensor_parallel: int
    kv_bits: int
    prompt_tokens: int
    output_tokens: int
    concurrency: int
    shortest: float
    step_tokens: int
    ttft_ms: float
    tpot_ms: float

    @property
    def framework(self) -> str:
        return self.engine.split()[0]

    @property
    def group(self) -> str:
        """What shares weights and engine: a row of the table of means."""
        return f"{self.model.split('/')[1]} {self.format_name}, {self.device}, {self.engine}"

    @property
    def held_out(self) -> bool:
        return self.model != TUNED_ON


def samples() -> tuple[list[Sample], dict[str, int]]:
    """Those that the operator tables cover, and why how many others are left out. Empty without the package."""
    covered, left_out = [], dict[str, int]()
    for row in _rows():
        reason = _not_covered(row)
        if reason:
            left_out[reason] = left_out.get(reason, 0) + 1
        else:
            covered.append(_sample(row))
    return covered, left_out


@cache
def model_of(name: str) -> Model:
    """Shapes: of a folder of examples/models, or the sizes of Qwen3-32B (its published config.json, Apache-2.0)."""
    folders = {
        "meta-llama/Llama-3.1-70B": "llama-3.1-70b",
        "meta-llama/Llama-3.1-8B-Instruct": "llama-3.1-8b",
        "nvidia/Llama-3.1-8B-Instruct-FP8": "llama-3.1-8b",
    }
    if name in folders:
        return Model.from_folder(EXAMPLES / folders[name])
    return Model.from_config({
        "model_type": "qwen3", "hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64, "head_dim": 128,
        "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 151936, "max_position_embeddings": 40960,
    })  # fmt: skip


MODELS = (
    "meta-llama/Llama-3.1-70B",
    "meta-llama/Llama-3.1-8B-Instruct",
    "nvidia/Llama-3.1-8B-Instruct-FP8",
    TUNED_ON,
)


def _rows() -> Iterator[dict[str, str]]:
    found = util.find_spec(PACKAGE.replace("-", "_"))
    if found is None or not found.submodule_search_locations:
        return
    with (Path(found.submodule_search_locations[0]) / "systems" / "silicon_sample.csv").open(encoding="utf-8") as file:
        yield from csv.DictReader(file)


def _not_covered(row: dict[str, str]) -> str | None:
    if row["mode"] != "agg":
        return "prefilling and decoding on devices of their own"
    if row["system"] not in SYSTEMS.values():
        return "a system that the operator tables are not read for"
    if row["model_path"] not in MODELS:
        return "experts, or another architecture than the tables' layers"
    if row["gemm_quant_mode"] not in _FORMATS:
        return "weights of 4 bits with 4-bit activations, or scales by blocks"
    return None if row["silicon_tpot_ms"] else "no TPOT"


def _sample(row: dict[str, str]) -> Sample:
    model, engine = row["model_path"], row["backend"]
    campaign = "InferenceMAX" if model == _INFERENCE_MAX else ""
    format_name = _FORMATS[row["gemm_quant_mode"]]
    devices = {system: name for name, system in SYSTEMS.items() if name != "A800-80GB"}
    return Sample(
        name=row["id"],
        engine=f"{engine} {row['backend_version']}".strip(),
        model=model,
        device=devices[row["system"]],
        format_name=format_name,
        tensor_parallel=int(row["tp_size"]),
        kv_bits=16 if format_name == "dense" else 8,
        prompt_tokens=int(row["isl"]),
        output_tokens=int(row["osl"]),
        concurrency=int(row["batch_size"]),
        shortest=0.8 if campaign else 1.0,
        step_tokens=_STEP_TOKENS.get((campaign, engine), _DEFAULT_STEP_TOKENS),
        ttft_ms=float(row["silicon_ttft_ms"]),
        tpot_ms=float(row["silicon_tpot_ms"]),
    )
