"""`strata profile`, and what plan and up make of its files: a fake runtime stands in for the minutes of measuring."""

import io
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from strata_operator.commands import profile as command
from strata_operator.commands.inputs import Question, read_question
from strata_operator.commands.plan import PlanOptions
from strata_operator.commands.plan import run as run_plan
from strata_operator.commands.profile import ProfileOptions, judged, kept_profiles, profiles_for, read_profile, shown
from strata_operator.errors import InvalidInputError
from strata_operator.local.errors import LocalError
from strata_planner.contract.latencies import LatencyProfile, ProfiledDevice
from tests.planner.builders import a_config
from tests.planner.latency_profiles import a_latency_profile

DEPLOYMENT = """
apiVersion: strata.dev/v1alpha1
kind: LLMDeployment
metadata: {name: chat}
spec:
  model: {uri: "file://%s", maxModelLen: 256}
  workload: {promptTokens: 32, outputTokens: 16, concurrency: 4}
  runtime: {computeType: bfloat16}
"""
CLUSTER = "nodes: [{name: a, devices: [{type: cpu, count: 1, threads: 1, memoryBytes: 400000000}]}]"


@pytest.fixture
def deployment(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(a_config()))
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    file = tmp_path / "deployment.yaml"
    file.write_text(_header(DEPLOYMENT % folder))
    return file


def _header(text: str) -> str:
    """The API version that this checkout serves."""
    example = Path(__file__).parents[3] / "examples" / "quickstart.yaml"
    version = next(line for line in example.read_text().splitlines() if line.startswith("apiVersion"))
    return text.replace("apiVersion: strata.dev/v1alpha1", version)


def question(deployment: Path) -> Question:
    return read_question(deployment, deployment.with_name("cluster.yaml"), measure=False)


def written(folder: Path, **changes: Any) -> Path:
    file = folder / "profile.json"
    file.write_bytes(a_latency_profile(**changes).encode())
    return file


def runtime_that(body: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = folder / "runtime.py"
    script.write_text(f"import sys\n{body}\n")
    monkeypatch.setattr(command, "PROFILE", (sys.executable, str(script)))


def options(**changes: Any) -> ProfileOptions:
    fields: dict[str, Any] = {
        "deployment": None,
        "cluster": None,
        "model": None,
        "threads": 0,
        "device": "cpu",
        "device_type": "cpu",
        "output": None,
        "quick": False,
        "fresh": False,
    }
    return ProfileOptions(**(fields | changes))


def test_measuring_ends_with_the_errors_of_points_left_out_in_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(tmp_path)
    runtime_that(f"print({str(file)!r})", tmp_path, monkeypatch)
    command.run(options(model=tmp_path, threads=2))
    judged = LatencyProfile.decode(file.read_bytes())
    assert set(judged.leave_one_out) == {f"{name} {phase}" for name in judged.layers for phase in ("prefill", "decode")}
    assert str(file) in capsys.readouterr().out.replace("\n", "")
    assert not list(tmp_path.glob("profile.[0-9]*"))


def test_a_deployment_says_whose_layers_on_how_many_threads(
    deployment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = written(tmp_path)
    told = tmp_path / "arguments"
    runtime_that(f"open({str(told)!r}, 'w').write(' '.join(sys.argv[1:])); print({str(file)!r})", tmp_path, monkeypatch)
    command.run(options(deployment=deployment, cluster=deployment.with_name("cluster.yaml"), quick=True))
    words = told.read_text()
    for each in (f"--model {tmp_path / 'model'}", "--threads 1", "--compute-type bfloat16", "--quick"):
        assert each in words


def words_of(command_options: ProfileOptions, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What the runtime is asked: flag -> value."""
    told, file = folder / "arguments", written(folder)
    runtime_that(f"open({str(told)!r}, 'w').write(' '.join(sys.argv[1:])); print({str(file)!r})", folder, monkeypatch)
    command.run(command_options)
    words = told.read_text().split()
    return dict(zip(words[::2], words[1::2], strict=False))


@pytest.mark.parametrize(
    ("precision", "formats", "kv_bits"),
    [
        ("{allowed: [4, 16], kvCacheBits: 8}", "dense,int4", "8"),
        ("{method: anyPrecision, allowed: [4, 8], activationBits: [8, 16]}", "w8a8,fp8_a8,any4,any8,any4_a8", "16"),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (
                ("{}", "dense,int8,int4,int3", "16"),
                ("{method: anyPrecision, allowed: [3, 4, 6, 16]}", "dense,any3,any4,any6", "16"),
                ("{activationBits: [16, 8]}", "dense,int8,w8a8,fp8_a8,int4,int3", "16"),
                ("{method: float8, allowed: [8, 16]}", "dense,fp8_e4m3", "16"),
            )
        ),
    ],
)
def test_a_deployment_says_which_formats_and_kv_bits(
    precision: str, formats: str, kv_bits: str, deployment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with deployment.open("a") as file:
        file.write(f"  precision: {precision}\n")
    asked = options(deployment=deployment, cluster=deployment.with_name("cluster.yaml"))
    words = words_of(asked, tmp_path, monkeypatch)
    assert (words["--formats"], words["--kv-bits"]) == (formats, kv_bits)
    chosen = replace(asked, formats=("any8", "dense"), kv_bits=8)
    words = words_of(chosen, tmp_path, monkeypatch)
    assert (words["--formats"], words["--kv-bits"]) == ("dense,any8", "8")


@pytest.mark.parametrize(
    ("mode", "formats"), [("selfPrecision", "dense,any3,any8"), ("auto", "dense,any3,any8"), ("suffix", "dense,any8")]
)
def test_what_drafts_is_measured_too(
    mode: str, formats: str, deployment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = "runtime: {computeType: bfloat16"
    text = deployment.read_text().replace(runtime, f"{runtime}, speculation: {{mode: {mode}, draftBits: 3}}")
    deployment.write_text(f"{text}  precision: {{method: anyPrecision, allowed: [8, 16]}}\n")
    asked = options(deployment=deployment, cluster=deployment.with_name("cluster.yaml"))
    assert words_of(asked, tmp_path, monkeypatch)["--formats"] == formats


@pytest.mark.parametrize("old", [True, False])
def test_a_checkpoint_that_is_quantized_already_is_measured_as_it_is(
    *, old: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    description = {"quant_method": "gptq", "bits": 4, "group_size": 32, "dynamic": {r".*layers\.0\.": {"bits": 8}}}
    config = a_config() | ({} if old else {"quantization_config": description})
    (tmp_path / "config.json").write_text(json.dumps(config))
    if old:
        (tmp_path / "quantize_config.json").write_text(json.dumps(description | {"dynamic": {}}))
    words = words_of(options(model=tmp_path), tmp_path, monkeypatch)
    assert words["--formats"] == ("dense,gptq4" if old else "dense,gptq4,gptq8")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"formats": ("int5", "dense")}, "int5: choose from dense, int8"),
        ({"kv_bits": 4}, "4: choose from 16, 8"),
    ],
)
def test_what_cannot_be_measured_is_named(changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=says):
        command.run(options(model=tmp_path, **changes))


def test_errors_that_are_known_already_are_not_told_anew(tmp_path: Path) -> None:
    file = written(tmp_path, formats=("dense", "any4"), leave_one_out={"dense prefill": 0.5})
    profile = judged(file)
    assert set(profile.leave_one_out) == {"dense prefill", "any4 prefill", "any4 decode"}
    before = file.read_bytes()
    assert judged(file) == profile
    assert file.read_bytes() == before


@pytest.mark.parametrize(
    ("code", "error", "says"), [(2, InvalidInputError, "reason above"), (1, LocalError, "go on where it stopped")]
)
def test_a_runtime_that_fails_is_told(
    code: int, error: type[Exception], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime_that(f"sys.exit({code})", tmp_path, monkeypatch)
    with pytest.raises(error, match=says):
        command.run(options(model=tmp_path))


@pytest.mark.parametrize("both", [True, False])
def test_one_model_is_named(*, both: bool, tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="give one of"):
        command.run(options(model=tmp_path, deployment=tmp_path) if both else options())


def test_a_plan_names_the_profile_that_it_is_from(
    deployment: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = deployment.with_name("cluster.yaml")
    run_plan(PlanOptions(deployment, cluster, None, None, ("roofline",), True, False, False, written(tmp_path)))
    plan = json.loads(capsys.readouterr().out)
    assert plan["replicas"][0]["stages"][0]["times"]["source"].startswith("profile of llama 128 wide on cpu")


def _truncated(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-50])


def _of_another_version(file: Path) -> None:
    file.write_text(json.dumps(json.loads(file.read_bytes()) | {"version": 99}))


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (_truncated, "not a valid LatencyProfile"),
        (_of_another_version, "version 99; this release reads version 2: run `strata profile` again"),
        (Path.unlink, "name a file that can be read"),
    ],
)
def test_a_file_that_is_no_profile_is_named_with_rule_and_fix(
    spoil: Any, says: str, deployment: Path, tmp_path: Path
) -> None:
    file = written(tmp_path)
    spoil(file)
    with pytest.raises(InvalidInputError, match=says) as refused:
        read_profile(file, question(deployment).request)
    assert str(file) in str(refused.value)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model": {"heads": 8}}, "this model's layers differ: run `strata profile`"),
        ({"device": ProfiledDevice("cpu", "a processor", 8, "2.0")}, "measured on 8 threads of 'cpu'"),
        ({"compute_type": "float32"}, "in float32 with keys and values of 16 bits; no device of the cluster is that"),
        ({"kv_bits": 8}, "with keys and values of 8 bits; no device of the cluster is that"),
    ],
)
def test_a_profile_that_answers_nothing_is_refused(
    changes: dict[str, Any], says: str, deployment: Path, tmp_path: Path
) -> None:
    profile = a_latency_profile()
    if "model" in changes:
        changes = {"model": msgspec.structs.replace(profile.model, **changes["model"])}
    with pytest.raises(InvalidInputError, match=says):
        read_profile(written(tmp_path, **changes), question(deployment).request)


def test_kept_profiles_are_found_where_rates_are_measured(
    deployment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = written(tmp_path)
    runtime_that(f"print({str(file)!r}); sys.exit('--kept' not in sys.argv)", tmp_path, monkeypatch)
    asked = question(deployment)
    assert [source.profile for source in kept_profiles(asked.request, [1])] == [a_latency_profile()]
    assert profiles_for(asked, None, kept=False) == ()
    runtime_that("sys.exit(1)", tmp_path, monkeypatch)
    assert profiles_for(asked, None, kept=True) == ()


@pytest.mark.parametrize("kv_bits", [16, 8])
def test_a_kept_profile_is_taken_for_its_own_kv_bits_alone(
    kv_bits: int, deployment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with deployment.open("a") as file:
        file.write(f"  precision: {{kvCacheBits: {kv_bits}}}\n")
    told, kept = tmp_path / "arguments", written(tmp_path, kv_bits=16)
    runtime_that(f"open({str(told)!r}, 'w').write(' '.join(sys.argv[1:])); print({str(kept)!r})", tmp_path, monkeypatch)
    found = kept_profiles(question(deployment).request, [1])
    assert f"--kv-bits {kv_bits}" in told.read_text()
    assert [source.profile.kv_bits for source in found] == [16] * (kv_bits == 16)


def test_formats_that_a_profile_lacks_come_from_the_next_source_and_the_plan_says_so(
    deployment: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with deployment.open("a") as file:
        file.write("  precision: {allowed: [4], method: anyPrecision}\n")
    cluster = deployment.with_name("cluster.yaml")
    warned = []
    for formats, begins in ((("dense",), "roofline"), (("any4",), "profile of llama 128 wide")):
        profile = written(tmp_path, formats=formats)
        run_plan(PlanOptions(deployment, cluster, None, None, ("roofline",), True, False, False, profile))
        said = capsys.readouterr()
        plan = json.loads(said.out)
        assert plan["replicas"][0]["stages"][0]["times"]["source"].startswith(begins)
        warned.append("has no any4: their seconds come from the next source" in " ".join(said.err.split()))
    assert warned == [True, False]


def test_the_table_has_a_row_for_each_format_and_phase() -> None:
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(shown(a_latency_profile(leave_one_out={"int4 decode": 0.0123})))
    text = console.export_text()
    assert "1.2%" in text
    assert text.count("decode") == text.count("prefill") == 4
