"""Measuring a device: rates are the inverse of the planner's roofline; a kept profile is believed only for the same machine."""

import contextlib
import dataclasses
import io
import json
import math
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from strata_planner.contract.devices import DeviceProfile
from strata_planner.contract.formats import COMPUTE_TYPE_BYTES, ComputeType, FormatName, stored_bytes
from strata_planner.contract.rows import TIMED_ROWS
from strata_planner.contract.values import from_json
from strata_planner.costs.roofline import linear_seconds, row_values
from strata_planner.costs.source import Rates
from strata_planner.question.linear import Linear
from strata_planner.question.model import Model
from strata_runtime import device
from strata_runtime.errors import InputError
from strata_runtime.formats import MAKERS, measured
from strata_runtime.formats.kernels import packed_rows
from strata_runtime.kernels.native import build
from strata_runtime.measuring import kernel_timing, measure, overheads, served, timing
from strata_runtime.measuring.measure import Store
from strata_runtime.measuring.profiling import company
from strata_runtime.measuring.profiling.grid import Work
from strata_runtime.measuring.profiling.stage import Taken
from strata_runtime.measuring.rates import (
    PREFILL_TOKENS,
    SOME_TOKENS,
    LinearSeconds,
    Overheads,
    Subject,
    Timings,
    mean_of,
    profile_of,
)
from tests.laws import swept

SECONDS = st.floats(1e-6, 1.0)


OVERHEADS = Overheads(2e-4, 1000, 8, 1e-4, 1e-5, 2e-5, 5e-6, 5e9, 4e10, 1e-5, 2000, 5000, 3e-4, 0.05)


def some_timings(**changes: object) -> Timings:
    linears: dict[FormatName, LinearSeconds] = dict.fromkeys(
        MAKERS, LinearSeconds(decode=1e-3, prefill=1e-2, some=2.5e-3)
    )
    values = {
        "features": 2048,
        "bandwidth_bytes_per_second": 2e10,
        "flops_per_second": 4e11,
        "float32_flops_per_second": 1e11,
        "linears": linears,
        "overheads": OVERHEADS,
    }
    return Timings(**(values | changes))  # type: ignore[arg-type]


def a_profile(**changes: object) -> DeviceProfile:
    profile = profile_of(Subject("cpu", 1 << 30, 1, "bfloat16"), some_timings())
    return msgspec.structs.replace(profile, **changes)


@given(decode=SECONDS, prefill=SECONDS, compute=st.sampled_from(sorted(COMPUTE_TYPE_BYTES)))
def test_the_roofline_gives_back_what_was_timed(decode: float, prefill: float, compute: ComputeType) -> None:
    timings = some_timings(linears=dict.fromkeys(MAKERS, LinearSeconds(decode, prefill, prefill)))
    profile = profile_of(Subject("cpu", 1 << 30, 1, compute), timings)
    flops = profile.float32_flops_per_second if compute == "float32" else profile.flops_per_second
    for name in MAKERS:
        moved = stored_bytes(name, 2048, 2048, compute) + 2 * 2048 * COMPUTE_TYPE_BYTES[compute]
        read = moved / (profile.bandwidth_bytes_per_second * profile.decode_efficiency[name])
        multiplied = 2 * PREFILL_TOKENS * 2048**2 / (flops * profile.prefill_efficiency[name])
        assert read == pytest.approx(decode)
        assert multiplied == pytest.approx(prefill)


@given(
    once=st.floats(0, 2e-5),
    each=st.floats(1e-7, 1e-4),
    packed=st.sampled_from([0, 32, SOME_TOKENS - 1, SOME_TOKENS, 1 << 62]),
)
def test_weights_are_unpacked_once_a_step_beyond_the_rows_that_kernels_take_packed(
    once: float, each: float, packed: int
) -> None:
    """What was timed at some and at many tokens comes back, and what does not depend on tokens is no part of the rate."""
    seconds = LinearSeconds(1e-6, once + each * PREFILL_TOKENS, once + each * SOME_TOKENS)
    timings = some_timings(linears=dict.fromkeys(MAKERS, seconds))
    profile = profile_of(Subject("cpu", 1 << 30, 1, "bfloat16", packed_rows={"int8": packed}), timings)
    linear = Linear("up", 2048, 2048)
    for tokens in (SOME_TOKENS, PREFILL_TOKENS):
        told = linear_seconds(linear, "int8", Rates(profile, "bfloat16", 16, "cpu"), tokens)
        if packed < SOME_TOKENS:
            assert told == pytest.approx(once + each * tokens, rel=1e-6)
        elif tokens == PREFILL_TOKENS:
            assert told == pytest.approx(seconds.prefill, rel=1e-6)
    assert set(profile.unpacked_per_second) <= ({"int8"} if packed < SOME_TOKENS else set())


@given(prefill=SECONDS, some=SECONDS)
def test_noise_leaves_rates_that_can_be(prefill: float, some: float) -> None:
    """Some tokens may seem to take longer than many: rates stay above 0 and within twice what was timed."""
    timings = some_timings(linears=dict.fromkeys(MAKERS, LinearSeconds(1e-6, prefill, some)))
    profile = profile_of(Subject("cpu", 1 << 30, 1, "bfloat16", packed_rows={"int8": 32}), timings)
    plain = profile.prefill_efficiency["dense"]
    assert 0 < plain <= profile.prefill_efficiency["int8"] <= 2 * plain * (1 + 1e-9)
    assert all(0 < rate < float("inf") for rate in profile.unpacked_per_second.values())


@given(
    few=st.tuples(*[st.floats(1e-5, 1e-2)] * len(TIMED_ROWS)),
    packed=st.sampled_from([{}, {"int8": 4}, {"int8": 1 << 62}]),
)
def test_few_rows_take_what_was_timed_and_more_rows_no_less(
    few: tuple[float, ...], packed: dict[FormatName, int]
) -> None:
    seconds = LinearSeconds(1e-3, 1e-2, 2.5e-3, few)
    profile = profile_of(
        Subject("cpu", 1 << 30, 1, "bfloat16", packed_rows=packed),
        some_timings(linears=dict.fromkeys(MAKERS, seconds)),
    )
    rates = Rates(profile, "bfloat16", 16, "cpu")
    told = [linear_seconds(Linear("up", 2048, 2048), "int8", rates, rows) for rows in TIMED_ROWS]
    longest = [max(1e-3, *few[: at + 1]) for at in range(len(few))]
    assert told == pytest.approx(longest, rel=0.01)  # a processor's memory may read faster than this linear did


def test_a_sequences_own_seconds_are_without_the_products_of_its_row() -> None:
    """The roofline counts those, by the model's widths."""
    linears: dict[FormatName, LinearSeconds] = dict.fromkeys(
        MAKERS, LinearSeconds(1e-3, 1e-2, 2.5e-3, (1e-3, 1e-3, 2e-3, 3e-3))
    )
    weights = int(0.07 * 2048**2)
    own = dataclasses.replace(OVERHEADS, layer_weights=weights, sequence_layer=1.5e-5)
    profile = profile_of(Subject("cpu", 1 << 30, 1, "bfloat16"), some_timings(linears=linears, overheads=own))
    assert profile.sequence_layer_seconds == pytest.approx(1.5e-5 - 1e-3 * 0.07 / 7, rel=1e-3)
    reading = 1e-3 * weights * 2 / (2048**2 * 2 + 2 * 2048 * 2)
    assert profile.layer_overhead_seconds == pytest.approx(
        2e-4 - reading + 1e-3 * 0.07 / 7, rel=1e-3
    )  # which had its row's
    quick = dataclasses.replace(own, sequence_layer=1e-6)
    profile = profile_of(Subject("cpu", 1 << 30, 1, "bfloat16"), some_timings(linears=linears, overheads=quick))
    assert profile.sequence_layer_seconds == 0.0


def test_rows_of_prompts_take_what_is_left_beside_their_products() -> None:
    """Of a layer as wide as the measured one a prompt's rows take what was timed."""
    profile = a_profile()
    product = 2 * OVERHEADS.row_weights / (profile.flops_per_second * profile.prefill_efficiency["dense"])
    assert product + OVERHEADS.row_values * 2 / profile.activation_bytes_per_second == pytest.approx(OVERHEADS.row)
    assert profile.chunk_layer_seconds == OVERHEADS.chunk
    quick = dataclasses.replace(OVERHEADS, row=0.0)
    told = profile_of(Subject("cpu", 1 << 30, 1, "bfloat16"), some_timings(overheads=quick))
    assert told.activation_bytes_per_second == 0, "nothing is left: not counted"


def test_no_decode_efficiency_is_above_one() -> None:
    fast: dict[FormatName, LinearSeconds] = dict.fromkeys(MAKERS, LinearSeconds(decode=1e-6, prefill=1e-2, some=2.5e-3))
    profile = profile_of(Subject("cpu", 1 << 30, 1, "bfloat16"), some_timings(linears=fast))
    assert max(profile.decode_efficiency.values()) == 1.0


def test_the_mean_of_two_measurements_is_taken_figure_by_figure() -> None:
    """Of few rows that one of them did not time nothing is known."""
    few = (1e-3, 2e-3, 3e-3, 4e-3)
    fast: dict[FormatName, LinearSeconds] = dict.fromkeys(MAKERS, LinearSeconds(5e-4, 2e-2, 2e-3, few))
    mean = mean_of(some_timings(flops_per_second=3e11), some_timings(linears=fast))
    assert mean.flops_per_second == pytest.approx(3.5e11)
    assert mean.linears["dense"] == LinearSeconds(pytest.approx(7.5e-4), pytest.approx(1.5e-2), pytest.approx(2.25e-3))
    assert mean_of(some_timings(linears=fast), some_timings(linears=fast)).linears["dense"].few == pytest.approx(few)


def test_a_kept_profile_comes_back_for_the_same_key_only(tmp_path: Path) -> None:
    store = Store(tmp_path / "strata" / "profile.json", {"version": 1, "processor": "a"})
    assert store.load() is None
    store.save(a_profile())
    assert store.load() == a_profile()
    assert Store(store.file, {"version": 2, "processor": "a"}).load() is None
    assert [each.name for each in store.file.parent.iterdir()] == ["profile.json"]


def test_rates_of_a_processor_are_those_of_one_build_of_the_native_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    measure.store_of("cpu", 1, "bfloat16").save(a_profile())
    assert measure.store_of("cpu", 1, "bfloat16").load() == a_profile()
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-DANOTHER"))
    assert measure.store_of("cpu", 1, "bfloat16").load() is None


@pytest.mark.parametrize("text", ["", "[]", "{", '{"key": {}, "profile": {"type": "cpu"}}', '{"key": {}}'])
def test_a_damaged_profile_is_measured_again(text: str, tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    file.write_text(text)
    assert Store(file, {}).load() is None


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ({}, 8 << 30),
        ({"memory.max": "max"}, 8 << 30),
        ({"pod/memory.max": str(2 << 30), "pod/main/memory.max": "max"}, 2 << 30),
        ({"pod/memory.max": str(2 << 30), "pod/main/memory.max": str(1 << 30)}, 1 << 30),
        ({"memory/memory.limit_in_bytes": str(3 << 30)}, 3 << 30),
        ({"memory/memory.limit_in_bytes": "9223372036854771712"}, 8 << 30),
    ],
    ids=["none", "no-limit", "of-the-pod", "least-counts", "version-1", "version-1-without"],
)
def test_memory_is_the_least_limit_above_this_process(groups: dict[str, str], expected: int, tmp_path: Path) -> None:
    for name, text in {
        "proc/meminfo": f"MemTotal: {8 << 20} kB\nMemFree: 1 kB\n",
        "proc/self/cgroup": "0::/pod/main\n",
        **{f"sys/fs/cgroup/{name}": text for name, text in groups.items()},
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert device.memory_limit_bytes(tmp_path) == expected


def test_a_second_call_prints_the_kept_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    measured: list[tuple[object, ...]] = []

    def fake(*arguments: object) -> DeviceProfile:
        measured.append(arguments)
        return a_profile()

    monkeypatch.setattr(measure, "measure", fake)
    for arguments in (["--json"], ["--json"], ["--json", "--type", "cpu-small"], ["--json", "--fresh"]):
        assert measure.main(["--threads", "2", *arguments]) == 0
    printed = [from_json(line, DeviceProfile) for line in capsys.readouterr().out.splitlines()]
    assert measured == [("cpu", "cpu", 2, "bfloat16")] * 2
    assert [profile.type for profile in printed] == ["cpu", "cpu", "cpu-small", "cpu"]
    assert {profile.memory_bytes for profile in printed} == {device.memory_limit_bytes()}


def test_threads_and_compute_types_have_files_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    stores = [
        measure.store_of("cpu", 1, "bfloat16"),
        measure.store_of("cpu", 2, "bfloat16"),
        measure.store_of("cpu", 1, "float32"),
    ]
    assert len({store.file for store in stores}) == 3
    assert stores[0].file.parent == tmp_path / "strata"


def test_a_gpus_profile_is_kept_for_its_model_and_libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = tmp_path / "driver"
    assert device.gpu_names(driver) == ""
    for place, model in (("0000:17:00.0", "NVIDIA H100 PCIe"), ("0000:65:00.0", "NVIDIA L4")):
        (driver / "gpus" / place).mkdir(parents=True)
        (driver / "gpus" / place / "information").write_text(f"Model: \t\t {model}\nIRQ:   \t\t 16\n")
    assert device.gpu_names(driver) == "NVIDIA H100 PCIe, NVIDIA L4"
    monkeypatch.setattr(measure, "gpu_names", lambda: "NVIDIA L4")
    key = measure.store_of("cuda", 1, "float16").key
    assert key["gpus"] == "NVIDIA L4"
    assert set(device.gpu_libraries()) == {"triton", "humming-kernels"} <= set(key)
    assert "gpus" not in measure.store_of("cpu", 1, "float16").key


@pytest.mark.parametrize("broken", [0, 1, 2])
def test_kernels_of_a_gpu_are_timed_apart_and_once_more_without_those_of_others(
    broken: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[list[str]] = []

    def fake(command: list[str], **_: object) -> None:
        ran.append(command)
        if len(ran) <= broken:
            raise (
                subprocess.CalledProcessError(-11, command) if len(ran) == 1 else subprocess.TimeoutExpired(command, 9)
            )

    monkeypatch.setattr(subprocess, "run", fake)
    measure._keep_kernels_of_gpu("float16")
    assert [command[-1] == "--without-humming" for command in ran] == [False, True][: min(broken, 1) + 1]
    assert all(command[1:3] == ["-m", "strata_runtime.measuring.kernel_timing"] for command in ran)
    said = capsys.readouterr().err
    assert ("trying again" in said, "by their own limits" in said) == (broken > 0, broken > 1)


def test_a_folder_that_cannot_be_written_is_said_and_survived(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    monkeypatch.setattr(measure, "measure", lambda *_: a_profile())
    assert measure.main([]) == 0
    printed = capsys.readouterr()
    assert "not kept" in printed.err
    assert "share of these that a linear reaches" in printed.out


@pytest.mark.parametrize("threads", ["0", "-1", "two"])
def test_threads_must_be_a_number(threads: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        measure.main(["--threads", threads])
    assert "use 1 or more" in capsys.readouterr().err


def test_a_missing_gpu_is_an_error_that_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InputError, match="use --device cpu"):
        measure.measure("cuda", "T4", 1, "bfloat16")


@pytest.mark.parametrize("compute", swept(["bfloat16", "float32"], []))
def test_a_small_measurement_of_this_machine(compute: ComputeType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "CPU_FEATURES", 256)
    monkeypatch.setattr(timing, "LEAST_WORKING_SET_BYTES", 1 << 18)
    monkeypatch.setattr(timing, "MOST_WORKING_SET_BYTES", 1 << 18)
    monkeypatch.setattr(overheads, "_RUNS", 5)
    said = io.StringIO()
    for _ in range(5):  # differences of few runs: others may disturb some of them
        taken = overheads.take(torch.device("cpu"), compute)
        if min(taken.layer, taken.row) > 0:
            break
    timings = timing.take(torch.device("cpu"), compute, taken, said.write)
    profile = profile_of(Subject("cpu", 1 << 30, 1, compute), timings)
    assert "linears in int3" in said.getvalue()
    assert set(profile.decode_efficiency) == set(profile.prefill_efficiency) == set(MAKERS)
    rates = [*profile.decode_efficiency.values(), *profile.prefill_efficiency.values(), timings.overheads.layer]
    assert all(rate > 0 for rate in rates)
    assert profile.step_overhead_seconds > 1e-5, "scheduling, messages and frames take their time"
    assert 0 < profile.attention_bytes_per_second <= profile.bandwidth_bytes_per_second
    assert profile.attention_flops_per_second >= 0  # 0 where others disturbed it: then as products are
    assert timings.overheads.row > 0
    assert timings.overheads.row_values == row_values(Model.from_config(overheads.FIELDS).layers[0])
    assert json.loads(msgspec.json.encode(profile))["source"] == "measured"


@pytest.mark.slow
def test_a_processors_profile_says_where_it_packs_rows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    measured._kept.cache_clear()
    for module in (timing, kernel_timing):
        monkeypatch.setattr(module, "CPU_FEATURES", 256)
    monkeypatch.setattr(timing, "LEAST_WORKING_SET_BYTES", 1 << 18)
    monkeypatch.setattr(timing, "MOST_WORKING_SET_BYTES", 1 << 18)
    threads = torch.get_num_threads()
    profile = measure.measure("cpu", "cpu", threads, "bfloat16")
    assert profile.packed_rows == packed_rows(torch.bfloat16, threads)
    assert "any4" in profile.packed_rows
    assert "kernels by number of tokens" in capsys.readouterr().err
    measured._kept.cache_clear()


@given(seconds=st.lists(st.floats(1e-4, 1.0), min_size=2, max_size=12))
def test_steps_vary_by_half_of_what_two_of_them_differ_by(seconds: list[float]) -> None:
    pairs = [abs(one - other) for at, one in enumerate(seconds) for other in seconds[:at]]
    told = overheads.gini(seconds)
    assert told == pytest.approx(statistics.fmean(pairs) / 2 / statistics.fmean(seconds), abs=1e-9)


@pytest.mark.parametrize(("seconds", "runs"), [(0.0001, 30), (0.1, 5), (60.0, 4)])
def test_a_slow_device_gets_fewer_runs(seconds: float, runs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No figure takes minutes, where one step takes a second."""
    now = [0.0]

    class Stage:
        def prepare(self, _work: object) -> None: ...

        def run(self, _work: object) -> Taken:
            now[0] += seconds
            return Taken(seconds, 0.0, 0.0)

    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "sleep", lambda _: None)
    told = overheads._round(cast("Any", Stage()), Work("decode", 1, 1, 64))
    assert told.mean.layer == pytest.approx(seconds)
    assert now[0] == pytest.approx(runs * seconds)


def test_all_processors_read_together_and_the_process_keeps_its_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "READ_OUTPUTS", 256)
    monkeypatch.setattr(timing, "LEAST_WORKING_SET_BYTES", 1 << 18)
    monkeypatch.setattr(timing, "MOST_WORKING_SET_BYTES", 1 << 18)
    threads = torch.get_num_threads()
    assert 0 < timing.read_together(threads + 1) < math.inf
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize(("processors", "expected"), [(1, 0.0), (2, 0.0), (4, 3e10)])
def test_memory_is_shared_where_a_machine_has_processors_for_more_devices(
    processors: int, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a device of two threads."""
    monkeypatch.setattr(measure, "cores", lambda: processors)
    monkeypatch.setattr(measure, "_keep_kernels", lambda _: None)
    monkeypatch.setattr(company, "in_company", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(overheads, "take", lambda *_: OVERHEADS)
    monkeypatch.setattr(served, "token_seconds", lambda _: 1e-4)
    monkeypatch.setattr(timing, "take", lambda *_: some_timings())
    monkeypatch.setattr(timing, "read_together", lambda threads: 3e10 if threads == processors else 0.0)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    profile = measure.measure("cpu", "cpu", 2, "bfloat16")
    assert profile.node_bandwidth_bytes_per_second == expected
    assert ("of all devices of the machine" in measure.table(profile)) == (expected > 0)
