"""The command line: what each wrong input says, on stderr, with which exit code; and `plan --json` as others script it."""

import json
import logging
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from strata_operator import cli
from strata_operator.commands.inputs import read_question
from strata_operator.commands.up import UpOptions, local_options
from strata_operator.local.acceptance import add, subject_of
from strata_operator.local.deployment import _gateway_arguments
from strata_operator.local.run import SIGNALS
from strata_planner.contract.acceptance import DraftCounts
from strata_planner.contract.plan import Plan, Speculation
from tests.operator.fakes import a_plan

Strata = Callable[..., "Ended"]


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str


@pytest.fixture
def strata(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Strata]:
    """Runs the command line in this process; what it does to signals and logging is undone."""
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    root = list(logging.getLogger().handlers)

    def run(*arguments: str | Path) -> Ended:
        monkeypatch.setattr(sys, "argv", ["strata", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        captured = capsys.readouterr()
        return Ended(int(ended.value.code or 0), captured.out, captured.err)

    yield run
    for number, handler in handlers.items():
        signal.signal(number, handler)
    logging.getLogger().handlers[:] = root


ACT_ORDER = {"quant_method": "gptq", "bits": 4, "group_size": 16, "sym": True, "desc_act": True}
CONFIG = """{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 300, "hidden_size": 256,
"intermediate_size": 688, "num_hidden_layers": 12, "num_attention_heads": 8, "num_key_value_heads": 4,
"max_position_embeddings": 1024, "tie_word_embeddings": false}"""
DEPLOYMENT = """
apiVersion: strata.dev/v1alpha1
kind: LLMDeployment
metadata: {{name: tiny}}
spec:
  model: {{uri: "file://{model}", maxModelLen: {max_model_len}}}
  workload: {{promptTokens: 32, outputTokens: 32, concurrency: 4}}
  {more}
"""
SPLIT = "placement: {minStages: 2}\n  precision: {allowed: [16]}"  # few widths, so that it is planned in a moment
CLUSTER = """
nodes:
- {{name: a, devices: [{{type: {type}, memoryBytes: {memory}, profile: {{layerOverheadSeconds: 0.001}}}}]}}
- {{name: b, devices: [{{type: {type}, memoryBytes: {memory}, profile: {{layerOverheadSeconds: 0.001}}}}]}}
"""  # rates are given, so that none are measured


class Inputs:
    """A valid deployment, cluster and model folder; keyword arguments make one of them wrong."""

    def __init__(self, folder: Path) -> None:
        self.deployment, self.cluster, self.model = folder / "tiny.yaml", folder / "cluster.yaml", folder / "model"
        self.model.mkdir()
        (self.model / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")  # whole, of no tensors
        self.write()

    def write(
        self,
        *,
        config: str = CONFIG,
        max_model_len: int = 256,
        more: str = SPLIT,
        model: str = "",
        type: str = "cpu",  # noqa: A002  the field's name
        memory: int = 200_000_000,
    ) -> "Inputs":
        (self.model / "config.json").write_text(config)
        text = DEPLOYMENT.format(model=model or self.model, max_model_len=max_model_len, more=more)
        self.deployment.write_text(text)
        self.cluster.write_text(CLUSTER.format(type=type, memory=memory))
        return self

    @property
    def arguments(self) -> tuple[str, ...]:
        return ("-f", str(self.deployment), "--cluster", str(self.cluster))


@pytest.fixture
def inputs(tmp_path: Path) -> Inputs:
    return Inputs(tmp_path)


def test_plan_json_is_the_plan_and_nothing_else(strata: Strata, inputs: Inputs) -> None:
    ended = strata("plan", *inputs.arguments, "--json")
    assert ended.code == 0
    plan = Plan.decode(ended.out)
    assert [stage.layers for stage in plan.replicas[0].stages] == [(0, 5), (6, 11)]
    assert plan.model_uri == f"file://{inputs.model}"


def test_plan_for_people_shows_stages_and_prediction(strata: Strata, inputs: Inputs) -> None:
    ended = strata("plan", *inputs.arguments)
    assert ended.code == 0
    for part in ("cpu #0", "0-5", "6-11", "6x16", "predicted", "tokens/s"):
        assert part in ended.out


def test_plan_json_has_its_goals_number_how_its_search_ended_and_what_users_see(strata: Strata, inputs: Inputs) -> None:
    inputs.write(more=f"{SPLIT}\n  objective: {{goal: latency}}")
    text = inputs.deployment.read_text()
    inputs.deployment.write_text(text.replace("concurrency: 4", "concurrency: 4, requestsPerSecond: 0.5"))
    ended = strata("plan", *inputs.arguments, "--json")
    assert not ended.err
    told = json.loads(ended.out)
    assert told["objective"]["unit"].startswith("s a request")
    assert told["objective"]["better"] == "less"
    assert told["search"] == {"ended": "settled", "cutAfterSeconds": None, "bound": None}
    assert told["prediction"]["arrivals"]["requestsPerSecond"] == 0.5
    assert told["prediction"]["arrivals"]["ttftMs"] > 0
    values = [each["value"] for each in told["alternatives"] if each["value"] is not None]
    assert all(value >= told["objective"]["value"] * (1 - 1e-5) for value in values)
    shown = strata("plan", *inputs.arguments).out
    for words in (
        "by the goal: ",
        "simulated, at random, 0.5 requests a second",
        "how far it is from the best plan is unknown",
    ):
        assert words in shown


GUESSES = f"{SPLIT}\n  runtime: {{speculation: {{mode: suffix, tokens: 3}}}}"


def test_what_speculation_brings_is_told_beside_the_prediction(strata: Strata, inputs: Inputs) -> None:
    plain, told = strata("plan", *inputs.arguments), strata("plan", *inputs.write(more=GUESSES).arguments)
    assert "speculation" not in plain.out
    assert "speculation suffix, 3 tokens: how many drafts are right is assumed" in told.out
    assert "if 80% are and every step has some: one stream x " in told.out


def test_what_was_measured_of_drafts_is_used(
    strata: Strata, inputs: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    inputs.write(more=GUESSES)
    subject = subject_of(f"file://{inputs.model}", Speculation("suffix", 3))
    assert subject is not None
    add(subject, DraftCounts(1000, 3000, 2000, 3000))
    plan = Plan.decode(strata("plan", *inputs.arguments, "--json").out)
    told = plan.prediction.speculation
    assert told is not None
    assert (told.measured, told.mode, told.tokens, len(told.cases)) == (True, "suffix", 3, 1)
    assert told.source.startswith("measured over 3,000 drafted tokens")
    assert told.cases[0].planned.plain_tokens_per_second == plan.prediction.tokens_per_second


@pytest.mark.slow
def test_other_devices_are_compared(strata: Strata, inputs: Inputs) -> None:
    asked = ("--what-if", "+1xcpu@c", "--what-if", "-b", "--price", "cpu=0.1")
    ended = strata("plan", *inputs.write(more="planning: {solver: layout}").arguments, *asked, "--json")
    assert ended.code == 0
    told = json.loads(ended.out)
    more, fewer = told["whatIf"]
    assert (more["name"], fewer["name"]) == ("+1xcpu@c", "-b")
    assert more["gain"] >= 0 >= fewer["gain"]
    assert fewer["hourlyCost"] == 0.1
    assert Plan.decode(json.dumps(told["plan"])).num_layers == 12


@pytest.mark.slow  # planner/answer/test_studies.py has the laws
def test_the_next_device_and_the_precisions_are_shown(strata: Strata, inputs: Inputs) -> None:
    ended = strata(
        "plan",
        *inputs.write(more="planning: {solver: layout}").arguments,
        "--next-device",
        "L4",
        "--price",
        "L4=0.5",
        "--front",
    )
    assert ended.code == 0
    for part in ("next device", "L4", "(best)", "precision", "3 bits", "16 bits", "* 24x16", "chosen"):
        assert part in ended.out


@pytest.mark.slow  # answer/test_unused.py has the reasons
def test_every_device_that_serves_nothing_has_its_reason(strata: Strata, inputs: Inputs) -> None:
    ended = strata("plan", *inputs.write(more="placement: {maxReplicas: 1, maxStages: 1}").arguments)
    assert re.search(r"unused: 1 x cpu on [ab]: placement.maxReplicas 1: with it as a replica", ended.out)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (("--what-if", "+1xL5@a", "--what-if", "-c"), ["--what-if: not accepted", "'L5' is unknown", "no node 'c'"]),
        (("--next-device", "L5"), ["--next-device: not accepted", "'L5' is unknown", "profiles: {L5: "]),
        (("--what-if", "-b", "--price", "L4"), ["'L4' is no price: write TYPE=AMOUNT"]),
        (("--price", "L4=1"), ["add --what-if or --next-device"]),
        (("--on", "a"), ["--on a says nothing without --next-device"]),
    ],
)
def test_what_cannot_be_compared_is_told_at_once(
    strata: Strata, inputs: Inputs, asked: tuple[str, ...], words: list[str]
) -> None:
    ended = strata("plan", *inputs.arguments, *asked)
    assert (ended.code, ended.out) == (2, "")
    for each in words:
        assert each in ended.err


@pytest.mark.slow
def test_a_running_plan_is_changed_no_more_than_pays(strata: Strata, inputs: Inputs, tmp_path: Path) -> None:
    running = tmp_path / "running.json"
    running.write_text(strata("plan", *inputs.arguments, "--json").out)
    same = strata("plan", *inputs.arguments, "--running", str(running))
    assert "keep the running plan: the best plan gains 0.0%" in same.out
    assert "cut by the clock" not in same.out
    inputs.cluster.write_text(inputs.cluster.read_text().replace("name: b", "name: c"))
    changed = strata("plan", *inputs.arguments, "--running", str(running))
    assert "change the plan: devices of the running plan are gone" in changed.out
    assert "load dense" in changed.out


def test_a_running_plan_that_is_none_is_refused(strata: Strata, inputs: Inputs) -> None:
    ended = strata("plan", *inputs.arguments, "--running", str(inputs.cluster))
    assert ended.code == 2
    assert "give what `strata plan --json` printed" in ended.err


def test_a_picture_is_written_where_it_can_be(strata: Strata, inputs: Inputs, tmp_path: Path) -> None:
    assert strata("plan", *inputs.arguments, "--picture", str(tmp_path / "plan.svg")).code == 0
    assert (tmp_path / "plan.svg").read_text().startswith("<svg ")
    ended = strata("plan", *inputs.arguments, "--picture", str(tmp_path / "nowhere" / "plan.svg"))
    assert ended.code == 2
    assert "cannot be written" in ended.err


def test_what_is_wrong_in_a_cluster_names_its_file(strata: Strata, inputs: Inputs) -> None:
    inputs.cluster.write_text("nodes: [")
    said = strata("plan", *inputs.arguments).err
    assert f"strata: {inputs.cluster}: not accepted" in said
    assert "the cluster is not valid YAML" in said


def test_more_threads_than_this_machine_has_are_refused_before_anything_is_measured(
    strata: Strata, inputs: Inputs
) -> None:
    inputs.cluster.write_text("nodes: [{name: a, devices: [{type: cpu, threads: 1000}]}]")
    ended = strata("plan", *inputs.arguments, "--measure")
    assert ended.code == 2
    assert "nodes[0].devices[0].threads: 1000: this machine has" in ended.err


def test_a_model_path_may_hold_below_the_deployments_folder(strata: Strata, inputs: Inputs) -> None:
    inputs.write(model="/model")
    ended = strata("plan", *inputs.arguments, "--json")
    assert Plan.decode(ended.out).model_uri == f"file://{inputs.model}"


@pytest.mark.parametrize(
    ("wrong", "code", "says"),
    [
        pytest.param({"more": "replicas: 2"}, 2, ["spec.replicas", "no such field"], id="unknown-field"),
        pytest.param({"more": "objective: {goal: beauty}"}, 2, ["beauty", "goal"], id="impossible-objective"),
        pytest.param(
            {"more": "placement: {minStages: 3, maxStages: 2}"}, 2, ["minStages", "maxStages"], id="impossible-split"
        ),
        pytest.param({"model": "/nowhere/at/all"}, 2, ["/nowhere/at/all", "there is no folder"], id="missing-model"),
        pytest.param({"config": "{"}, 2, ["config.json is not valid JSON"], id="malformed-config"),
        pytest.param(
            {"config": CONFIG.replace('"llama"', '"mamba"')}, 2, ["mamba"], id="architecture-that-is-not-supported"
        ),
        pytest.param({"max_model_len": 4096}, 2, ["maxModelLen 4096", "1024"], id="context-longer-than-the-models"),
        pytest.param({"type": "abacus"}, 2, ["abacus", "unknown", "T4"], id="unknown-device"),
        pytest.param(
            {
                "config": json.dumps(json.loads(CONFIG) | {"quantization_config": ACT_ORDER}),
                "more": "placement: {tensorParallel: [1, 2]}\n  planning: {solver: layout}",
            },
            2,
            ["desc_act", "not cut over several devices", "placement.tensorParallel [1]"],
            id="several-devices-for-a-checkpoint-that-is-not-cut",
        ),
        pytest.param(
            {
                "config": CONFIG.replace('"num_attention_heads": 8', '"num_attention_heads": 16'),
                "more": "placement: {tensorParallel: [2]}\n  precision: {method: roundToNearest, allowed: [4, 16]}",
            },
            2,
            ["groups of 4 bits", "heads are 16 wide", "anyPrecision"],
            id="several-devices-for-a-format-that-is-not-cut",
        ),
        pytest.param({"memory": 1_000_000, "more": ""}, 1, ["iB at 3 bits", "2 devices"], id="too-little-memory"),
        pytest.param({"more": "placement: {exclude: [a, b]}"}, 2, ["placement.exclude"], id="nothing-left"),
    ],
)
def test_wrong_input_is_a_sentence_and_an_exit_code(
    strata: Strata, inputs: Inputs, wrong: dict[str, object], code: int, says: list[str]
) -> None:
    inputs.write(**wrong)
    for command in ("plan", "up"):
        ended = strata(command, *inputs.arguments, *(("--port", "0") if command == "up" else ("--json",)))
        assert (ended.code, ended.out) == (code, "")
        assert any(line.startswith("strata: ") for line in ended.err.splitlines())
        for part in says:
            assert part in ended.err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        pytest.param(["plan", "-f", "/nowhere.yaml"], "/nowhere.yaml", id="missing-file"),
        pytest.param(["plan"], "Missing option", id="missing-option"),
        pytest.param(["plan", "-f", "x", "--colour"], "No such option", id="unknown-option"),
        pytest.param(["up", "-f", "x", "--port", "70000"], "port", id="impossible-port"),
        pytest.param(["fly"], "No such command", id="unknown-command"),
    ],
)
def test_wrong_arguments(strata: Strata, arguments: list[str], says: str) -> None:
    ended = strata(*arguments)
    assert ended.code == 2
    assert says in ended.err


def test_a_port_in_use_names_a_free_one(strata: Strata, inputs: Inputs) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = strata("up", *inputs.arguments, "--port", str(port))
    assert ended.code == 2
    assert f"port {port} on 127.0.0.1 is in use; choose a free one: --port " in ended.err


def test_up_tells_all_that_its_checks_find_at_once_and_starts_nothing(strata: Strata, inputs: Inputs) -> None:
    inputs.write(more="gateway: {apiKeysSecretRef: {name: keys}}")
    (inputs.model / "model.safetensors").unlink()
    inputs.cluster.write_text("nodes: [{name: a, devices: [{type: cpu, threads: 1000}]}]")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        logs = inputs.cluster / "logs"  # below a file
        ended = strata("up", *inputs.arguments, "--port", taken.getsockname()[1], "--logs", str(logs))
    assert ended.code == 2
    failed = [line.removeprefix("  - ").partition(":")[0] for line in ended.err.splitlines() if line.startswith("  - ")]
    assert failed == ["port", "logs", "keys", "shards", "threads", "tokenizer"]


def test_keys_that_the_object_asks_for_are_not_dropped(strata: Strata, inputs: Inputs) -> None:
    inputs.write(more="gateway: {apiKeysSecretRef: {name: keys}}")
    ended = strata("up", *inputs.arguments, "--port", "0")
    assert ended.code == 2
    assert "--api-keys-file" in ended.err


def test_pages_that_the_object_allows_may_ask_here_too(inputs: Inputs, tmp_path: Path) -> None:
    inputs.write(more="gateway: {allowedOrigins: [http://localhost:3000], docs: true}")
    options = UpOptions(inputs.deployment, inputs.cluster, "127.0.0.1", 0, None, None)
    question = read_question(inputs.deployment, inputs.cluster, measure=False)
    local = local_options(options, question, a_plan("a"), tmp_path)
    assert _gateway_arguments(a_plan("a"), local)[-3:] == ["--allowed-origins", "http://localhost:3000", "--docs"]


@pytest.mark.parametrize("command", ["plan", "up", "demo", "crds", "operator"])
def test_help_teaches_with_an_example(strata: Strata, command: str) -> None:
    ended = strata(command, "--help")
    assert ended.code == 0
    assert f"strata {command}" in ended.out.replace("\n", " ")
    assert "Example" in ended.out


def test_crds_prints_the_definition(strata: Strata) -> None:
    ended = strata("crds")
    assert ended.code == 0
    assert "kind: CustomResourceDefinition" in ended.out


@pytest.mark.slow  # a process
def test_planning_starts_without_what_only_others_need() -> None:
    probe = (
        "import sys, strata_operator.commands.plan\n"
        "print([name for name in ('kopf', 'kubernetes', 'torch', 'transformers') if name in sys.modules])"
    )
    ended = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "[]"


def test_a_plan_names_the_table_that_its_seconds_are_from(strata: Strata, inputs: Inputs, tmp_path: Path) -> None:
    table = tmp_path / "table.yaml"
    table.write_text(
        "{devices: [cpu], source: a test, prefillMilliseconds: {16: [[32, 0.1]]}, decodeMilliseconds: {16: [[1, 0.1]]}, "
        "layer: {hiddenSize: 256, heads: 8, kvHeads: 4, headDim: 32, linearParameters: 724992}}",
        encoding="utf-8",
    )
    ended = strata("plan", *inputs.arguments, "--json", "--costs", table)
    stages = Plan.decode(ended.out).replicas[0].stages
    assert {stage.times.source for stage in stages} == {"layer table, a test"}
    wrong = strata("plan", *inputs.arguments, "--costs", table, "--costs", "roofline")
    assert wrong.code == 2
    assert "roofline means nothing else" in wrong.err
