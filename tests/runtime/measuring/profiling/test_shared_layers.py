"""Layers that real ranks share, measured in small: every work of the grid that fits, and what the command keeps of it."""

import json
from pathlib import Path

import pytest
import torch

from strata_planner.contract.latencies import LatencyProfile
from strata_runtime.errors import InputError
from strata_runtime.measuring.profiling import __main__ as command
from strata_runtime.measuring.profiling import shared_layers, strategies
from strata_runtime.measuring.profiling.grid import Work
from strata_runtime.measuring.profiling.shared_layers import SharedSubject, measure_shared
from tests.planner.latency_profiles import a_latency_profile
from tests.runtime.measuring.profiling.shapes import FIELDS

WORKS = (Work("decode", 1, 1, 20), Work("decode", 3, 1, 33), Work("prefill", 2, 20, 0), Work("prefill", 1, 16, 33))


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_layers, "_grid", lambda **_: iter(WORKS))
    monkeypatch.setattr(shared_layers, "PASSES", 1)
    monkeypatch.setattr(shared_layers, "PASS_SECONDS", 0.0)
    monkeypatch.setattr(shared_layers, "copies_beyond_cache", lambda *_: 1)
    monkeypatch.setattr(strategies, "PASSES", 1)


@pytest.mark.slow  # the others of this file measure one
def test_every_work_is_measured_in_every_format() -> None:
    said = list[tuple[int, int, str]]()
    subject = SharedSubject(FIELDS, 2, 1, "bfloat16", more=(Work("decode", 2, 1, 5), Work("decode", 1, 1, 100_000)))
    points = measure_shared(subject, ("dense", "int8"), a_latency_profile(), lambda *told: said.append(told))
    works = {*WORKS, Work("decode", 2, 1, 5)}  # not the one that is beyond the model's positions
    assert {(each.format, Work(each.phase, each.sequences, each.tokens, each.past)) for each in points} == {
        (name, work) for name in ("dense", "int8") for work in works
    }
    assert all(each.layer_seconds > 0 for each in points)
    assert said == [(1, 2, "dense over 2 ranks"), (2, 2, "int8 over 2 ranks")]
    assert torch.get_num_threads() == 1


@pytest.mark.slow
def test_the_command_adds_what_ranks_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: None, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(command, "keep_rates", lambda *_: None)
    (tmp_path / "config.json").write_text(json.dumps(FIELDS))
    asked = ["--model", str(tmp_path), "--threads", "1", "--ranks", "2", "--quick"]
    assert command.main([*asked, "--formats", "int4,dense"]) == 0
    file = Path(capsys.readouterr().out.strip())
    profile = LatencyProfile.decode(file.read_bytes())
    assert profile.shared_by(2).formats == {"dense", "int4"}
    assert {each.format for each in profile.strategies} == {"dense"}
    before = file.read_bytes()
    assert command.main([*asked, "--formats", "dense"]) == 0
    assert file.read_bytes() == before, "nothing was missing"


def test_ranks_of_gpus_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(FIELDS))
    asked = ["--model", str(tmp_path), "--device", "cuda", "--ranks", "2", "--output", str(tmp_path / "profile.json")]
    assert command.main(asked) == 2
    assert "not yet those of several GPUs" in capsys.readouterr().err


def test_a_model_that_ranks_cannot_share_is_refused() -> None:
    """With the reason that a prepare would have."""
    subject = SharedSubject(FIELDS | {"num_attention_heads": 4}, 8, 1, "bfloat16")
    with pytest.raises(InputError, match="8"):
        measure_shared(subject, ("dense",), a_latency_profile(), lambda *_: None)
