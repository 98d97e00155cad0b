"""A local deployment of processes that only speak: ready, replaced when killed, refused, given up, nothing left behind."""

import asyncio
import contextlib
import os
import re
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import replace
from pathlib import Path

import msgspec
import psutil
import pytest

from strata_operator.decide.epochs import slots_of
from strata_operator.local.deployment import LocalDeployment, LocalOptions, Programs
from strata_operator.local.errors import CrashedError, PortInUseError, RefusedError
from strata_operator.local.launcher import Launcher, begin
from strata_operator.local.mending import Mender
from strata_operator.local.ports import free_port, free_ports
from strata_operator.local.progress import Progress
from strata_operator.render.epoch import Epoch
from strata_planner.contract.control import PrepareState, SlotStatus
from strata_planner.contract.environment import SLOT_ENVIRONMENT
from strata_planner.contract.plan import Plan
from strata_planner.contract.processors import Division
from strata_planner.question.cluster import Cluster, Device, Node
from strata_planner.question.model import Model
from strata_planner.question.request import PlanRequest
from strata_planner.question.workload import Workload
from strata_planner.replan.repair import Takeover
from strata_planner.search.planning import make_plan
from tests.laws import swept
from tests.operator.fake_gateway_process import DRAFTED
from tests.operator.fakes import FakeSlot, a_plan, replicas_of

ROOT = Path(__file__).parents[3]
LAUNCHER = (
    f"import sys; sys.path.insert(0, {str(ROOT)!r}); import strata_runtime.slot.launcher as launcher; "
    "sys.exit(launcher.main(['json']))"
)
PROGRAMS = Programs(
    launcher=(sys.executable, "-c", LAUNCHER),
    slot="tests.operator.fake_slot_process",
    gateway="tests.operator.fake_gateway_process",
)


def options(logs: Path, port: int = 0) -> LocalOptions:
    return LocalOptions("tiny", logs, port=port or free_port("127.0.0.1"), programs=PROGRAMS)


@contextlib.asynccontextmanager
async def running(logs: Path) -> AsyncIterator[LocalDeployment]:
    async with asyncio.timeout(30), LocalDeployment(a_plan("a", "b"), options(logs)) as deployment:
        await deployment.ready()
        yield deployment


def children() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


def started_since(before: set[psutil.Process]) -> set[psutil.Process]:
    """Other tests of this process may have left helpers of their own (multiprocessing's tracker of resources)."""
    return children() - before


async def until(holds: Callable[[], bool], what: str, seconds: float = 25) -> None:
    """Ends before whoever surrounds it is cancelled, and says what did not happen."""
    deadline = time.monotonic() + seconds
    while not holds():  # what is awaited is the state of other processes
        assert time.monotonic() < deadline, f"not {what} within {seconds:g} s"
        await asyncio.sleep(0.02)


def in_epoch(deployment: LocalDeployment, number: int) -> bool:
    return {status.committed_epoch for status in deployment.slot_statuses.values()} == {number}


async def test_slots_have_the_environment_that_memory_is_predicted_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MKL_DISABLE_FAST_MM", "0")  # what a user sets wins
    before = children()
    async with running(tmp_path):
        for process in started_since(before):
            assert {**SLOT_ENVIRONMENT, "MKL_DISABLE_FAST_MM": "0"}.items() <= process.environ().items()


@pytest.mark.slow  # gateway/test_metrics.py counts
async def test_what_its_gateway_counts_of_drafts_can_be_asked(tmp_path: Path) -> None:
    async with running(tmp_path) as deployment:
        status = deployment.gateway_status
        assert status is not None
        assert status.drafted == DRAFTED


async def test_it_serves_the_plan_and_leaves_nothing_behind(tmp_path: Path) -> None:
    before = children()
    async with running(tmp_path) as deployment:
        assert {status.committed_epoch for status in deployment.slot_statuses.values()} == {1}
        assert set(deployment.pids) == {"a", "b", "gateway"}
        _, writer = await asyncio.open_connection("127.0.0.1", deployment.options.port)
        writer.close()
        pids = list(deployment.pids.values())
    assert not [pid for pid in pids if psutil.pid_exists(pid)]
    assert not started_since(before)


async def test_slots_listen_where_they_are_told_to(tmp_path: Path) -> None:
    """As those of a benchmark, which have namespaces of their own."""
    programs = replace(PROGRAMS, hosts={"b": "127.0.0.2"})
    elsewhere = replace(options(tmp_path), programs=programs)
    async with asyncio.timeout(30), LocalDeployment(a_plan("a", "b"), elsewhere) as deployment:
        await deployment.ready()
        assert {name: each.host for name, each in deployment.slot_endpoints.items()} == {
            "a": "127.0.0.1",
            "b": "127.0.0.2",
        }


@pytest.mark.parametrize("victim", swept(["a", "b"], ["b"]))
async def test_a_slot_that_is_killed_comes_back_in_a_new_epoch(tmp_path: Path, victim: str) -> None:
    async with running(tmp_path) as deployment:
        killed = deployment.pids[victim]
        os.kill(killed, signal.SIGKILL)
        await until(lambda: in_epoch(deployment, 2), "in epoch 2")
        await deployment.ready()
        assert deployment.pids[victim] != killed


async def test_a_replica_waits_for_no_slot_of_another_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither at first nor after a loss of both; it is ready once all are."""
    late = tmp_path / "late"
    monkeypatch.setenv("FAKE_SLOT_LATE", str(late))
    plan = replicas_of(a_plan("a", "b"), a_plan("c"))

    def serves_without(deployment: LocalDeployment, epoch: int) -> bool:
        """The first replica an epoch from this one on, the second one none of these."""
        gateway, slots = deployment.gateway_status, deployment.slot_statuses
        committed = [slots[name].committed_epoch if name in slots else 0 for name in "abc"]
        return gateway is not None and gateway.epoch == committed[0] == committed[1] >= epoch > committed[2]

    late.write_text("c")
    async with asyncio.timeout(30), LocalDeployment(plan, options(tmp_path)) as deployment:
        await until(lambda: serves_without(deployment, 1), "serving with the first replica")
        assert not deployment._ready.is_set()
        late.unlink()
        await deployment.ready()
        assert in_epoch(deployment, 1)
        late.write_text("c")
        for victim in ("b", "c"):
            os.kill(deployment.pids[victim], signal.SIGKILL)
        await until(lambda: serves_without(deployment, 2), "serving with the first replica again")
        late.unlink()
        await deployment.ready()
        assert deployment.gateway_status is not None
        assert deployment.gateway_status.replicas == (0, 1)


@pytest.mark.slow  # processes; a slot that is killed at another moment
async def test_a_slot_that_dies_while_it_is_asked_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tmp_path) as deployment:
        ask, pids, asked = deployment._links.all_answer, deployment.pids, []

        async def all_answer(names: Iterable[str]) -> bool:
            asked.append(names)
            if len(asked) == 1:
                os.kill(pids["b"], signal.SIGKILL)
                await asyncio.Event().wait()
            return await ask(names)

        monkeypatch.setattr(deployment._links, "all_answer", all_answer)
        os.kill(pids["a"], signal.SIGKILL)
        await until(lambda: in_epoch(deployment, 2), "in epoch 2")
        assert deployment.pids["b"] != pids["b"]


@pytest.mark.slow
async def test_a_slot_that_is_stopped_is_started_anew_once_its_neighbours_have_lost_it_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accused = tmp_path / "accused"
    monkeypatch.setenv("FAKE_SLOT_ACCUSES", str(accused))
    async with running(tmp_path) as deployment:
        stopped = deployment.pids["b"]
        os.kill(stopped, signal.SIGSTOP)
        await until(lambda: "b" not in deployment.slot_statuses, "silent")
        assert deployment.pids["b"] == stopped  # it may only be busy
        accused.write_text("b")
        await until(lambda: deployment.pids.get("b", stopped) != stopped, "another process of b")
        accused.unlink()
        await until(lambda: in_epoch(deployment, 2), "in epoch 2")


async def test_a_slot_with_a_step_that_hangs_is_started_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It answers as before, and nobody has lost it."""
    stuck = tmp_path / "stuck"
    monkeypatch.setenv("FAKE_SLOT_STUCK", str(stuck))
    async with running(tmp_path) as deployment:
        before = deployment.pids
        stuck.write_text("b")
        await until(lambda: in_epoch(deployment, 2), "in epoch 2")
        await deployment.ready()
        assert {name for name, pid in deployment.pids.items() if before[name] != pid} == {"b"}


async def test_a_gateway_that_is_killed_learns_the_same_epoch(tmp_path: Path) -> None:
    async with running(tmp_path) as deployment:
        killed = deployment.pids["gateway"]
        os.kill(killed, signal.SIGKILL)
        await until(lambda: deployment.pids.get("gateway", killed) != killed, "another gateway")
        await deployment.ready()
        assert {status.committed_epoch for status in deployment.slot_statuses.values()} == {1}


async def test_a_refused_prepare_is_said_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = children()
    monkeypatch.setenv("FAKE_SLOT_REFUSES", "b: layer 3 is missing from the checkpoint")
    with pytest.raises(RefusedError, match="slot b refused its part of the plan: layer 3 is missing"):
        async with running(tmp_path):
            pass
    assert not started_since(before)


@pytest.mark.slow  # processes; test_losses.py has when it is tried again
async def test_what_a_slot_refuses_that_has_served_is_taken_over_by_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its disk broke, say: the others serve all, and it is tried again later each time."""
    plan, mender = a_planned_one()
    refuses = tmp_path / "refuses"
    monkeypatch.setenv("FAKE_SLOT_REFUSES", str(refuses))
    monkeypatch.setattr("strata_operator.local.losses.STEADY_SECONDS", 0.2)
    broken = plan.stages[1].slot
    async with asyncio.timeout(60), LocalDeployment(plan, replace(options(tmp_path), mender=mender)) as deployment:
        await deployment.ready()
        before = dict(deployment.pids)
        monkeypatch.setattr(mender, "improved", lambda each: each if mender._lost else plan)
        refuses.write_text(f"{broken}: layer 3 cannot be read")
        os.kill(before[broken], signal.SIGKILL)
        await until(lambda: deployment._losses.refused.get(broken, 0) == 2, "refused, tried again, refused again")
        await until(lambda: broken not in slots_of(deployment.plan), "without it")
        await deployment.ready()
        refuses.unlink()
        await until(lambda: deployment.plan is plan, "with it again")
        await deployment.ready()
        assert {name: pid for name, pid in deployment.pids.items() if name != broken} == {
            name: pid for name, pid in before.items() if name != broken
        }


async def test_a_slot_that_loads_for_ever_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = children()
    monkeypatch.setenv("FAKE_SLOT_HANGS", "b")
    hurried = replace(options(tmp_path), prepare_timeout_seconds=0.8)
    with pytest.raises(
        RefusedError, match=r"made no progress in loading for 0.8 s \(replanning.prepareTimeoutSeconds\)"
    ):
        async with asyncio.timeout(30), LocalDeployment(a_plan("a", "b"), hurried) as deployment:
            await deployment.ready()
    assert not started_since(before)


def test_a_slot_is_given_up_only_where_it_gets_no_further() -> None:
    progress, plan = Progress(timeout_seconds=10), a_plan("a", "b")
    epoch = Epoch(1, "key", plan)

    def seen(loaded: int, fetched: int = 0) -> dict[str, SlotStatus]:
        prepared, loading = FakeSlot("a"), FakeSlot("b")
        prepared.prepare = PrepareState(epoch=1, phase="prepared", layers_loaded=2, layers_total=2)
        loading.prepare = PrepareState(epoch=1, phase="loading", layers_loaded=loaded, layers_total=2, progress=fetched)
        return {"a": prepared.status(), "b": loading.status()}

    assert not progress.stalled(epoch, {}, now=0)
    assert not progress.stalled(epoch, seen(0), now=9)  # they answer
    assert not progress.stalled(epoch, seen(1), now=18)
    assert not progress.stalled(epoch, {}, now=27)  # both are started anew; a had everything and begins anew
    assert progress.stalled(epoch, {"b": seen(1)["b"]}, now=36).startswith(
        "slot b made no progress in loading for 10 s"
    )
    assert not progress.stalled(Epoch(2, "key", plan), seen(1), now=36)
    assert not progress.stalled(Epoch(3, "key", plan), {}, now=40)
    for second in range(50, 90, 9):  # a download gets on without a layer
        again = Epoch(1, "key", plan)
        assert not progress.stalled(again, seen(0, fetched=second), now=second)
    assert not progress.stalled(again, seen(0, fetched=3), now=95)
    assert progress.stalled(again, seen(0, fetched=3), now=96)
    assert not progress.stalled(None, {}, now=1000)


async def test_a_slot_that_cannot_stay_alive_is_given_up_with_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = children()
    monkeypatch.setenv("FAKE_SLOT_CRASHES", "b")
    monkeypatch.setattr("strata_operator.local.services.PAUSE_SECONDS", 0.0)
    with pytest.raises(
        CrashedError,
        match=r"b ended with exit code 3, 4 times in a row before it served[\s\S]*--logs[\s\S]*ran out of luck",
    ):
        async with running(tmp_path):
            pass
    assert not started_since(before)


@pytest.mark.slow  # processes; the test above has the one that waits
async def test_what_failed_while_nobody_waited_is_told_to_whoever_waits_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_SLOT_CRASHES", "b")
    monkeypatch.setattr("strata_operator.local.services.PAUSE_SECONDS", 0.0)
    async with asyncio.timeout(30), LocalDeployment(a_plan("a", "b"), options(tmp_path)) as deployment:
        await until(lambda: any(task.done() for task in deployment._tasks), "given up")
        with pytest.raises(CrashedError, match="ran out of luck"):
            await deployment.supervise()


async def test_a_port_in_use_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PortInUseError, match=re.escape(f"port {port} on 127.0.0.1 is in use; choose a free one")):
            async with LocalDeployment(a_plan("a"), options(tmp_path, port)):
                pass
    assert not (tmp_path / "launcher.log").exists()


async def test_everything_ends_when_the_supervisor_is_killed(tmp_path: Path) -> None:
    script = f"""
import asyncio, sys
sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
from tests.operator.local.test_local_deployment import *
async def main():
    async with running(Path({str(tmp_path)!r})) as deployment:
        print(*deployment.pids.values(), flush=True)
        await deployment.supervise()
asyncio.run(main())
"""
    supervisor = await asyncio.create_subprocess_exec(sys.executable, "-c", script, stdout=asyncio.subprocess.PIPE)
    assert supervisor.stdout is not None
    try:
        async with asyncio.timeout(40):  # it gives itself 30
            pids = [int(pid) for pid in (await supervisor.stdout.readline()).split()]
        assert len(pids) == 3
    finally:
        supervisor.kill()
        await supervisor.wait()
    await until(lambda: not any(psutil.pid_exists(pid) for pid in pids), f"without any of {pids}")


def test_free_ports_are_consecutive_and_free() -> None:
    first = free_ports("127.0.0.1", 3)
    with contextlib.ExitStack() as held:
        for port in range(first, first + 3):
            held.enter_context(socket.create_server(("127.0.0.1", port)))


@pytest.mark.slow
async def test_a_slot_may_be_killed_any_number_of_times_once_it_has_served(tmp_path: Path) -> None:
    async with running(tmp_path) as deployment:
        for _ in range(6):
            killed = deployment.pids["b"]
            os.kill(killed, signal.SIGKILL)
            await until(lambda killed=killed: deployment.pids.get("b", killed) != killed, "another process of b")
            await deployment.ready()


async def test_what_an_ended_process_said_is_not_taken_for_the_word_of_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long the deployment is busy with something else while one ends and another is there, at the same port."""
    busy, free = asyncio.Event(), asyncio.Event()

    async def be_busy() -> None:
        busy.set()
        await free.wait()

    async with running(tmp_path) as deployment:
        monkeypatch.setattr(deployment, "_give_orders", be_busy)
        deployment._changed.set()
        await busy.wait()
        killed = deployment.pids["b"]
        os.kill(killed, signal.SIGKILL)
        await until(lambda: deployment.pids.get("b", killed) != killed, "another process of b")
        assert "b" not in deployment.slot_statuses
        assert not deployment._slots["b"].has_served
        free.set()
        await until(lambda: in_epoch(deployment, 2), "formed anew")


async def test_a_start_that_nobody_waits_for_any_more_hurts_nothing(tmp_path: Path) -> None:
    """As of a slot that has just ended when everything does."""
    launcher = Launcher(begin(tmp_path / "launcher.log", PROGRAMS.launcher))
    started = tmp_path / "child.log"
    await launcher.spawn("tests.operator.fake_slot_process", [], started, {})
    starting = asyncio.create_task(launcher.spawn("tests.operator.fake_slot_process", [], started, {}))
    await asyncio.sleep(0)  # it is asked for; a turn later it may be there already
    assert launcher._starting
    starting.cancel()
    await launcher.close()
    await asyncio.sleep(0)  # its pipe is closed in the loop's next turn


async def test_the_loss_of_the_launcher_ends_it_with_a_reason(tmp_path: Path) -> None:
    async def lose_the_launcher() -> None:
        async with running(tmp_path) as deployment:
            assert deployment._launcher is not None
            deployment._launcher._process.kill()
            await deployment.supervise()

    with pytest.raises(CrashedError, match="the parent of all local processes has ended"):
        await lose_the_launcher()


def test_slots_verify_what_they_read_unless_told_not_to(tmp_path: Path) -> None:
    for verify in (True, False):
        local = replace(options(tmp_path), verify=verify, threads={"a": 3}, divisions={"a": Division(1, 4)})
        slots = LocalDeployment(a_plan("a", "b"), local)._slots
        assert slots["a"]._flags == ["--threads", "3", "--devices", "1/4", *["--no-verify"] * (not verify)]


def test_slots_are_told_how_long_a_step_may_be_still_where_that_was_said(tmp_path: Path) -> None:
    for seconds, flags in ((30, []), (0, ["--step-timeout", "0"]), (120, ["--step-timeout", "120"])):
        local = replace(options(tmp_path), step_timeout_seconds=seconds)
        assert LocalDeployment(a_plan("a", "b"), local)._slots["b"]._flags == ["--threads", "1", *flags]


def test_slots_are_told_of_how_many_ranks_a_stage_of_theirs_has(tmp_path: Path) -> None:
    plan = a_plan("a", "b")
    (replica,) = plan.replicas
    first = msgspec.structs.replace(replica.stages[0], tensor_parallel=2)
    shared = msgspec.structs.replace(replica, stages=(first, *replica.stages[1:]))
    slots = LocalDeployment(msgspec.structs.replace(plan, replicas=(shared,)), options(tmp_path))._slots
    assert [slots[name]._flags for name in "ab"] == [["--threads", "1", "--ranks", "2"], ["--threads", "1"]]


GONE_CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 256,
    "max_position_embeddings": 128,
}


def a_planned_one() -> tuple[Plan, Mender]:
    """Three slots of one processor each."""
    nodes = tuple(Node(name, (Device("cpu", 1, 1 << 30, 1),)) for name in ("n0", "n1", "n2"))
    request = PlanRequest(
        deployment="tiny",
        model_uri="file:///models/tiny",
        model=Model.from_config(GONE_CONFIG),
        cluster=Cluster(nodes),
        workload=Workload(16, 16, 2),
        max_model_len=64,
        min_stages=3,
        max_replicas=1,
        time_limit_seconds=1.0,
    )
    plan = make_plan(request, quick=True).plan
    return plan, Mender(replace(request, min_stages=1), Takeover(), min_gain=0.99)


@pytest.mark.slow  # processes; planner/replan/test_repair.py has repairs, the tests above slots that are lost
async def test_the_layers_of_a_slot_that_is_gone_for_good_are_taken_over_by_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, mender = a_planned_one()
    gone = tmp_path / "gone"
    monkeypatch.setenv("FAKE_SLOT_GONE", str(gone))
    monkeypatch.setattr("strata_operator.local.services.PAUSE_SECONDS", 0.0)
    names = [stage.slot for stage in plan.stages]
    own = replace(options(tmp_path), mender=mender)
    async with asyncio.timeout(60), LocalDeployment(plan, own) as deployment:
        await deployment.ready()
        before = dict(deployment.pids)
        gone.write_text(names[1])
        os.kill(before[names[1]], signal.SIGKILL)
        await until(
            lambda: [stage.slot for stage in deployment.plan.stages] == [names[0], names[2]], "without the second"
        )
        await deployment.ready()
        stayed = (names[0], names[2], "gateway")  # the lost one is started again and again
        assert [deployment.pids[name] for name in stayed] == [before[name] for name in stayed]
        epochs = {status.committed_epoch for status in deployment.slot_statuses.values()}
        assert len(epochs) == 1
        assert epochs.pop() >= 2
        gone.write_text(" ".join(names))
        for name in (names[0], names[2]):
            os.kill(deployment.pids[name], signal.SIGKILL)
        with pytest.raises(CrashedError):  # and when nobody is left to take over
            await deployment.supervise()


@pytest.mark.slow  # processes; test_losses.py has when, test_growing_back.py a stream
async def test_a_slot_that_is_taken_over_is_planned_with_again_when_it_is_back_and_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, mender = a_planned_one()
    gone = tmp_path / "gone"
    monkeypatch.setenv("FAKE_SLOT_GONE", str(gone))
    monkeypatch.setattr("strata_operator.local.services.PAUSE_SECONDS", 0.0)
    monkeypatch.setattr("strata_operator.local.deployment.RETRY_SECONDS", 0.1)
    monkeypatch.setattr("strata_operator.local.losses.STEADY_SECONDS", 0.2)
    lost = plan.stages[1].slot
    async with asyncio.timeout(60), LocalDeployment(plan, replace(options(tmp_path), mender=mender)) as deployment:
        await deployment.ready()
        gone.write_text(lost)
        os.kill(deployment.pids[lost], signal.SIGKILL)
        await until(lambda: lost in deployment._losses.away, "taken over")
        assert lost not in slots_of(deployment.plan)
        monkeypatch.setattr(mender, "improved", lambda each: each if mender._lost else plan)
        gone.write_text("")
        await until(lambda: deployment.plan is plan, "grown back")
        await deployment.ready()
        assert not deployment._losses.away
