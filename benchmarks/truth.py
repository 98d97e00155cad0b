"""Predicted against measured tokens/s of what a newcomer runs: `make demo`, `strata up` of the quickstart, and random models of other sizes.

`python -m benchmarks.truth [--json FILE] [--runs 3]`: some minutes on two quiet cores. Everything is planned from `strata_runtime.measuring.measure` of
this machine alone, no profile of the model; then it serves through the gateway, and the planned load is sent. The processor is measured anew
after each run, as its speed drifts: a run is set beside the mean of what its plan predicts of the processor before it and after it.
"""

import argparse
import asyncio
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from benchmarks.rows import Row, run
from strata_operator.commands.inputs import read_question
from strata_operator.demo import CLUSTER, DEPLOYMENT, measured_tokens_per_second, options_of
from strata_operator.local.machine import with_measured_rates
from strata_operator.local.run import log_folder, serve
from strata_planner.contract.plan import Plan
from strata_planner.question.request import PlanRequest
from strata_planner.replan.running import running_replicas
from strata_planner.search.planning import make_plan
from strata_runtime.model.random_model import make_random_model

RUNS = 3


@dataclass(frozen=True)
class RandomModel:
    """Fields of a Llama's configuration, and the load and the widths of its deployment over two slots."""

    name: str
    shape: Mapping[str, int]
    workload: Mapping[str, int]
    bits: tuple[int, ...]


def _shape(vocabulary: int, hidden: int, intermediate: int, layers: int, heads: int) -> Mapping[str, int]:
    return {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 4,
        "max_position_embeddings": 1024,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }


def _load(prompt: int, answer: int, concurrency: int) -> Mapping[str, int]:
    return {"promptTokens": prompt, "outputTokens": answer, "concurrency": concurrency}


RANDOM_MODELS = (
    RandomModel("random_5m", _shape(4096, 192, 512, 8, 4), _load(96, 64, 8), (16,)),
    RandomModel("random_45m", _shape(8192, 512, 1536, 12, 8), _load(128, 48, 4), (8,)),
    RandomModel("random_470m", _shape(16384, 1280, 3584, 24, 16), _load(64, 32, 6), (4, 16)),
)


@dataclass(frozen=True)
class Seen:
    """Tokens a second of one run, and those that its plan predicts of the processor as it was before and after."""

    before: float
    after: float
    measured: float

    @property
    def ratio(self) -> float:
        return self.measured / statistics.mean((self.before, self.after))


def see(deployment_file: Path, cluster_file: Path | None) -> Seen:
    """As `strata up` plans and runs it with what was measured last."""
    question = read_question(deployment_file, cluster_file, measure=True)
    plan = make_plan(question.request).plan

    async def served(logs: Path) -> float:
        async with serve(plan, options_of(question, plan, logs), Console(stderr=True)) as deployment:
            return await measured_tokens_per_second(deployment, question.request.workload)

    with log_folder(None) as logs:
        measured = asyncio.run(served(logs))
    measure_anew(deployment_file, cluster_file)
    after = predicted(plan, read_question(deployment_file, cluster_file, measure=True).request)
    return Seen(plan.prediction.tokens_per_second, after, measured)


def measure_anew(deployment_file: Path, cluster_file: Path | None) -> None:
    """And keep it."""
    with_measured_rates(read_question(deployment_file, cluster_file, measure=False).cluster, fresh=True)


def predicted(plan: Plan, request: PlanRequest) -> float:
    """Tokens a second, under the request's costs."""
    replicas = running_replicas(request, plan)
    assert len(replicas) == len(plan.replicas), "it fits where it has run"
    return sum(each.prediction.tokens_per_second for each in replicas)


def cases(folder: Path) -> Iterator[tuple[str, Path, Path | None]]:
    """Names, deployments and clusters; None: this machine, as `strata up` cuts it."""
    yield "demo_truth", DEPLOYMENT, CLUSTER
    yield "quickstart_truth", DEPLOYMENT, None
    for each in RANDOM_MODELS:
        yield f"{each.name}_truth", _deployment(folder / each.name, each), None


def _deployment(folder: Path, model: RandomModel) -> Path:
    folder.mkdir()
    write_tokenizer(folder, model.shape["vocab_size"])
    make_random_model(folder, "llama", dtype=torch.bfloat16, **model.shape)
    wished = {
        "apiVersion": "strata.dev/v1alpha1",
        "kind": "LLMDeployment",
        "metadata": {"name": model.name.replace("_", "-")},
        "spec": {
            "model": {"uri": f"file://{folder}", "maxModelLen": 512},
            "workload": model.workload,
            "precision": {"allowed": model.bits},
            "placement": {"minStages": 2},
        },
    }
    file = folder / "deployment.yaml"
    file.write_bytes(msgspec.json.encode(wished))  # JSON is YAML
    return file


def write_tokenizer(folder: Path, vocabulary: int) -> None:
    """A word for each token: what a random model needs to be served over HTTP."""
    words = {f"w{number}": number for number in range(vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w2"))  # noqa: S106 -- no password
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="w0", eos_token="w1").save_pretrained(folder)  # noqa: S106


def run_all(runs: int) -> list[Row]:
    rows = []
    table = Table(title="measured over predicted tokens/s", title_justify="left")
    for column in ("", "predicted before", "and after", "measured", "ratios"):
        table.add_column(column)
    with tempfile.TemporaryDirectory() as folder:
        for name, deployment, cluster in cases(Path(folder)):
            measure_anew(deployment, cluster)
            seen = [see(deployment, cluster) for _ in range(runs)]
            ratios = [each.ratio for each in seen]
            table.add_row(
                name,
                _listed([each.before for each in seen], "{:.0f}"),
                _listed([each.after for each in seen], "{:.0f}"),
                _listed([each.measured for each in seen], "{:.0f}"),
                _listed(ratios, "{:.2f}"),
            )
            rows += _rows(name, ratios)
    Console(width=120).print(table)
    return rows


def _listed(values: Sequence[float], form: str) -> str:
    return " ".join(map(form.format, values))


def _rows(name: str, ratios: Sequence[float]) -> list[Row]:
    """A ratio within 0.9 and 1.1 is a distance of at most 0.1."""
    middle = statistics.median(ratios)
    unit = f"measured over predicted, median of {len(ratios)}"
    return [Row(name, middle, unit), Row(f"{name}_distance", abs(middle - 1), "from 1", goal=0.1, lower_is_better=True)]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.truth", add_help=False)
    parser.add_argument("--runs", type=int, default=RUNS)
    chosen, rest = parser.parse_known_args(sys.argv[1:] if arguments is None else arguments)
    run("truth", lambda: run_all(chosen.runs), rest)


if __name__ == "__main__":
    main()
