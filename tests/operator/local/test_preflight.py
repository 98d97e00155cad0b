"""Checks before anything is started: what each one sees, that all are told at once, and that nothing outlives them."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from strata_operator.errors import InvalidInputError, NotReadyError
from strata_operator.local.errors import LocalInputError, NameInUseError, PortInUseError
from strata_operator.local.preflight import (
    Check,
    check_driver,
    check_memory,
    check_shards,
    failures,
    runtime_check,
)
from strata_operator.local.record import RunningDeployment, claimed, folder, recorded, running_deployment
from strata_operator.local.run import log_folder
from strata_operator.observe.model_files import check_shards as check_visible_shards
from strata_operator.observe.shards import INDEX, SINGLE, shard_problems
from strata_planner.contract.values import to_json
from strata_planner.question.cluster import Cluster, Device, Node
from tests.operator.fakes import a_plan


def safetensors(*tensors: str) -> bytes:
    """A file of four bytes for each."""
    header = json.dumps(
        {name: {"dtype": "F32", "shape": [1], "data_offsets": [4 * at, 4 * at + 4]} for at, name in enumerate(tensors)}
    ).encode()
    return len(header).to_bytes(8, "little") + header + bytes(4 * len(tensors))


def sharded(place: Path, **files: str) -> Path:
    """Shards named after letters, each with one tensor."""
    place.mkdir(exist_ok=True)
    for name, tensor in files.items():
        (place / f"{name}.safetensors").write_bytes(safetensors(tensor))
    index = {"weight_map": {tensor: f"{name}.safetensors" for name, tensor in files.items()}}
    (place / INDEX).write_text(json.dumps(index))
    return place


def test_a_whole_checkpoint_has_no_problem(tmp_path: Path) -> None:
    assert [*check_shards(sharded(tmp_path / "a", x="t", y="u"))] == []
    (tmp_path / SINGLE).write_bytes(safetensors("t", "u"))
    assert [*check_shards(tmp_path)] == []


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=st.integers(0, len(safetensors("t", "u")) - 1), more=st.binary(min_size=1, max_size=9))
def test_a_file_that_is_cut_off_or_longer_is_told(tmp_path: Path, cut: int, more: bytes) -> None:
    whole = safetensors("t", "u")
    for wrong in (whole[:cut], whole + more):
        (tmp_path / SINGLE).write_bytes(wrong)
        (problem,) = shard_problems(tmp_path)
        assert "fetch the checkpoint again" in problem


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(max_size=40))
def test_no_bytes_in_a_checkpoints_files_raise(tmp_path: Path, content: bytes) -> None:
    for name in (INDEX, SINGLE):
        (tmp_path / name).write_bytes(content)
        assert [*shard_problems(tmp_path)]
        (tmp_path / name).unlink()


def test_every_shard_is_looked_at(tmp_path: Path) -> None:
    place = sharded(tmp_path, x="t", y="u", z="v")
    (place / "x.safetensors").unlink()
    (place / "y.safetensors").write_bytes(safetensors("other"))
    missing, lacking = shard_problems(place)
    assert "x.safetensors is missing" in missing
    assert "y.safetensors lacks 1 tensors" in lacking
    with pytest.raises(NotReadyError, match=r"x.safetensors is missing"):
        check_visible_shards(f"file://{place}")


def test_an_index_that_leaves_the_folder_is_told(tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text('{"weight_map": {"t": "../secret"}}')
    (problem,) = shard_problems(tmp_path)
    assert "'../secret'" in problem


def test_a_folder_without_weights_is_told_where_it_is_to_be_served(tmp_path: Path) -> None:
    (problem,) = check_shards(tmp_path)
    assert "only safetensors checkpoints are read" in problem
    check_visible_shards(f"file://{tmp_path}")  # planning shapes needs none


def test_gpus_need_a_driver_that_lists_them() -> None:
    cluster = Cluster((Node("a", (Device("T4", count=2), Device("cpu"))),))
    (problem,) = check_driver(cluster, 1)
    assert "2 GPUs (T4), nvidia-smi lists 1" in problem
    assert [*check_driver(cluster, 2)] == []


def test_slots_on_processors_need_their_memory_together() -> None:
    plan = a_plan("a", "b")
    stages = [stage for replica in plan.replicas for stage in replica.stages]
    nodes = tuple(Node(stage.node, tuple(Device(each.type) for each in stage.devices)) for stage in stages)
    cluster = Cluster(nodes, profiles={})
    on_cpus = all(device.type == "cpu" for node in nodes for device in node.devices)
    wanted = sum(stage.memory.total_bytes for stage in stages)
    assert on_cpus
    assert [*check_memory(plan, cluster, wanted)] == []
    (problem,) = check_memory(plan, cluster, wanted - 1)
    assert "2 slots on processors" in problem


def test_all_failures_are_told_at_once() -> None:
    def refuse() -> None:
        raise PortInUseError("port 1 is in use")

    def two() -> None:
        raise InvalidInputError("x", ["first", "second"])

    found = failures([Check("port", refuse), Check("keys", two), Check("fine", lambda: None)])
    assert found == ["port: port 1 is in use", "keys: first", "keys: second"]


@pytest.mark.parametrize(
    ("code", "says"),
    [("""print('{"problems": ["no"]}')""", "tokenizer: no"), ("raise SystemExit('broken')", "tokenizer: .*broken")],
)
def test_the_runtimes_check_is_asked_for_later(code: str, says: str) -> None:
    with runtime_check("file:///model", (sys.executable, "-c", code)) as check:
        (said,) = failures([check])

    assert re.match(says, said)


CLAIM = """
import sys
from strata_operator.local.record import claimed
with claimed("tiny"):
    print("claimed", flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def _own_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))


def test_two_of_one_name_are_refused_until_the_first_has_ended_however_it_does() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", CLAIM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as first:
        assert first.stdout
        assert first.stdout.readline() == "claimed\n"
        with (
            pytest.raises(NameInUseError, match=rf"process {first.pid}\).*kill {first.pid}.*metadata.name"),
            claimed("tiny"),
        ):
            pass
        with claimed("other"):
            pass
        first.kill()
        first.wait()
        with claimed("tiny"):
            pass


def test_a_folder_that_cannot_be_written_is_told_by_its_path(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file, where a folder is needed")

    def claim() -> None:
        with claimed("tiny"):
            pass

    def log() -> None:
        with log_folder(tmp_path / "run" / "logs"):
            pass

    name, logs = failures([Check("name", claim), Check("logs", log)])
    assert f"name: {tmp_path}/run/strata/running/tiny.lock: Not a directory" in name
    assert f"logs: {tmp_path}/run/logs: Not a directory" in logs
    assert "--logs" in logs


def test_a_disk_that_is_full_keeps_no_logs_without_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.TemporaryFile", lambda dir: Path("/dev/full").open("wb", buffering=0))  # noqa: A006, SIM115  closed by whoever asked
    with pytest.raises(LocalInputError, match=r"No space left on device.*TMPDIR"), log_folder(None):
        pass


def test_what_runs_goes_on_where_nobody_can_be_told_of_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "run").write_text("a file, where a folder is needed")
    with recorded("tiny", a_plan("a"), {}):
        assert "tiny.json: Not a directory; what runs here cannot be found" in caplog.text


def test_a_record_whose_number_another_process_has_by_now_is_stale() -> None:
    with recorded("tiny", a_plan("a"), {}):
        path = folder() / "tiny.json"
        assert running_deployment("tiny").pid == os.getpid()
        record = msgspec.json.decode(path.read_bytes(), type=RunningDeployment)
        path.write_bytes(to_json(msgspec.structs.replace(record, started="an earlier process")))
        with pytest.raises(InvalidInputError, match="no deployment of this name"):
            running_deployment("tiny")
