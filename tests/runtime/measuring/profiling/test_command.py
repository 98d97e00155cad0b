"""`python -m strata_runtime.measuring.profiling`: which file is kept of what, and that it is extended rather than measured anew."""

import json
from pathlib import Path
from typing import Any

import pytest

from strata_planner.contract.devices import DeviceProfile
from strata_planner.contract.latencies import LatencyProfile
from strata_runtime.measuring.profiling import __main__ as command
from strata_runtime.measuring.profiling import survey as surveys
from strata_runtime.measuring.profiling.grid import Work
from strata_runtime.measuring.profiling.stage import ProfiledStage, Taken
from tests.runtime.measuring.profiling.shapes import FIELDS


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: None) -> list[str]:
    """A command line; what it keeps lies below tmp_path, and rates are measured already."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(command, "keep_rates", lambda *_: None)
    (tmp_path / "config.json").write_text(json.dumps(FIELDS))
    return ["--model", str(tmp_path), "--threads", "1"]


def the_profile(capsys: pytest.CaptureFixture[str]) -> tuple[Path, LatencyProfile]:
    file = Path(capsys.readouterr().out.strip())
    return file, LatencyProfile.decode(file.read_bytes())


def test_the_command_keeps_a_profile_and_finds_it(
    tmp_path: Path, asked: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main([*asked, "--kept"]) == 1
    assert command.main([*asked, "--formats", "dense"]) == 0
    file, profile = the_profile(capsys)
    assert file.is_relative_to(tmp_path / "cache" / "strata")
    assert (profile.kv_bits, list(profile.layers)) == (16, ["dense"])
    assert [each.name for each in file.parent.iterdir()] == [file.name]
    assert command.main([*asked, "--kept"]) == 0
    assert command.main([*asked, "--kept", "--compute-type", "float32"]) == 1
    assert command.main([*asked, "--kept", "--kv-bits", "8"]) == 1
    file.write_text("{}")
    assert command.main([*asked, "--kept"]) == 1


@pytest.mark.slow
def test_formats_that_a_kept_profile_lacks_are_added(asked: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([*asked, "--formats", "int4,dense"]) == 0
    file, first = the_profile(capsys)
    assert command.main([*asked, "--formats", "dense,any4"]) == 0
    same, second = the_profile(capsys)
    assert same == file
    assert list(second.layers) == ["dense", "int4", "any4"]
    assert second.of(("dense", "int4")).encode() == first.encode()
    before = file.stat().st_mtime_ns
    assert command.main([*asked, "--formats", "any4,int4"]) == 0  # nothing is missing
    assert file.stat().st_mtime_ns == before
    capsys.readouterr()
    assert command.main([*asked, "--formats", "int4", "--fresh"]) == 0
    _, third = the_profile(capsys)
    assert third.of(("dense",)).points == first.of(("dense",)).points
    assert third.of(("any4",)).points == second.of(("any4",)).points
    assert third.of(("int4",)).points != first.of(("int4",)).points


@pytest.mark.slow  # test_profiling.py has notes that go on
def test_an_extension_that_is_interrupted_goes_on(
    asked: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert command.main([*asked, "--formats", "dense"]) == 0
    file, first = the_profile(capsys)
    with monkeypatch.context() as patched:
        patched.setattr(surveys, "_runs", _interrupted_after(2))
        with pytest.raises(KeyboardInterrupt):
            command.main([*asked, "--formats", "dense,int8"])
    assert LatencyProfile.decode(file.read_bytes()) == first
    assert (
        command.main([*asked, "--formats", "int8,any3"]) == 0
    )  # what was noted of int8 is good for other formats beside it
    assert "going on after 2 measurements" in capsys.readouterr().err


def _interrupted_after(count: int) -> Any:
    measure, left = surveys._runs, [None] * count

    def runs(stage: ProfiledStage, work: Work) -> list[Taken]:
        if not left:
            raise KeyboardInterrupt
        left.pop()
        return measure(stage, work)

    return runs


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        pytest.param(["--kv-bits", "8"], "keys and values of 16 bits", marks=pytest.mark.slow),
        pytest.param(["--company", "1"], "0 others beside it", marks=pytest.mark.slow),
        pytest.param(["--compute-type", "float32"], "in bfloat16", marks=pytest.mark.slow),
        (["--type", "other"], "of 1 threads of 'cpu'"),
    ],
)
def test_a_named_file_of_another_subject_is_not_extended(
    changes: list[str], says: str, tmp_path: Path, asked: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    named = [*asked, "--output", str(tmp_path / "own.json")]
    assert command.main([*named, "--formats", "dense"]) == 0
    assert command.main([*named, *changes, "--formats", "dense"]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.slow
def test_a_named_file_of_another_model_is_not_extended(
    tmp_path: Path, asked: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    named = [*asked, "--output", str(tmp_path / "own.json")]
    assert command.main([*named, "--formats", "dense"]) == 0
    (tmp_path / "config.json").write_text(json.dumps(FIELDS | {"intermediate_size": 192}))
    assert command.main([*named, "--formats", "int8"]) == 2
    assert "write to another file" in capsys.readouterr().err


@pytest.mark.slow
def test_keys_and_values_of_8_bits_are_a_profile_of_their_own(
    asked: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    profiles = {}
    for bits in ("16", "8"):
        assert command.main([*asked, "--formats", "dense", "--kv-bits", bits]) == 0
        file, profile = the_profile(capsys)
        profiles[file] = profile.kv_bits
    assert list(profiles.values()) == [16, 8]


def test_rates_are_measured_first_where_they_are_not_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A slot chooses its kernels by what is kept with them, so what is profiled must too."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    rates = DeviceProfile(
        type="cpu",
        memory_bytes=1,
        bandwidth_bytes_per_second=1.0,
        flops_per_second=1.0,
        float32_flops_per_second=1.0,
        decode_efficiency={},
        prefill_efficiency={},
        layer_overhead_seconds=0.0,
        source="measured",
    )
    asked_for: list[tuple[object, ...]] = []

    def measured(*words: object) -> DeviceProfile:
        asked_for.append(words)
        return rates

    monkeypatch.setattr(command, "measure", measured)
    for _ in range(2):
        command.keep_rates("cpu", 3, "float32")
    assert asked_for == [("cpu", "cpu", 3, "float32")]


def test_a_profile_of_a_gpu_is_of_that_gpu_and_its_libraries(
    tmp_path: Path, asked: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    versions = {"triton": "1"}
    monkeypatch.setattr(command, "gpu_names", lambda: "a GPU")
    monkeypatch.setattr(command, "gpu_libraries", lambda: versions)
    measured: list[Path] = []

    def note(options: Any, fields: Any, device: Any, file: Path, work: Any) -> None:
        measured.append(file)

    monkeypatch.setattr(command, "_measure", note)
    for triton in ("1", "2"):
        versions["triton"] = triton
        assert command.main([*asked, "--device", "cuda", "--type", "T4"]) == 0
    assert command.main(asked) == 0
    assert len(set(measured)) == 3


@pytest.mark.parametrize("text", ["int5", "dense,,int4", "dense;int4"])
def test_a_format_that_is_none_is_named(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["--model", ".", "--formats", text])
    assert "the formats are dense, int8" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"model_type": "llama"}'])
def test_a_config_without_shapes_is_an_error(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(text)
    assert command.main(["--model", str(tmp_path)]) == 2
    assert "config.json" in capsys.readouterr().err
