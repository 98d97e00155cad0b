"""Plans under way: who is started when, that no device is dealt twice, and what a process of its own bounds."""

import asyncio
import copy
import os
import random
import select
import signal
from collections import Counter
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata_operator.act.plan_process import PlanLimits, PlanProcess
from strata_operator.act.planner_call import Answer, Question
from strata_operator.act.planners import Planners, Ticket, moves
from strata_operator.api import LLMDeployment
from strata_operator.decide.backoff import MOST_SECONDS, Backoff, seconds_after
from strata_operator.decide.ledger import Dealing, DeviceLedger, still_free
from strata_operator.observe.inventory import take_inventory
from strata_operator.render.requests import added
from strata_operator.render.slots import Claim, claims_of
from strata_planner.contract.plan import DeviceRef, Plan
from strata_planner.question.cluster import Cluster, Device, Node
from tests.laws import share
from tests.operator.builders import a_deployment, a_node
from tests.operator.commands.test_cli import CONFIG
from tests.operator.fakes import a_plan

tickets = st.lists(st.booleans(), max_size=8).map(
    lambda urgent: [Ticket(f"d{order}", each, order) for order, each in enumerate(urgent)]
)


@given(tickets, st.integers(1, 4), st.randoms(use_true_random=False))
def test_losses_come_first_and_no_place_is_given_twice(all_: list[Ticket], places: int, chance: random.Random) -> None:
    chance.shuffle(all_)
    running, waiting = all_[:places][: chance.randint(0, places)], []
    waiting = [each for each in all_ if each not in running]
    decided = moves(waiting, running, places)
    now = [each for each in running if each not in decided.put_back] + list(decided.start)
    left = [each for each in (*waiting, *decided.put_back) if each not in now]
    assert len(now) <= places
    assert set(decided.put_back) <= set(running)
    assert set(decided.start) <= set(waiting)
    if left:
        assert len(now) == places
    if any(each.urgent for each in left):
        assert all(each.urgent for each in now)  # no wish is planned while a loss waits
    assert not any(each.urgent for each in decided.put_back)
    assert list(decided.start) == sorted(decided.start, key=lambda each: each.rank)
    assert decided.is_crowded == bool(left)
    assert not decided.hasten, "none of these is a first plan at leisure"
    at_leisure = [replace(each, at_leisure=True) for each in running]
    hastened = moves(waiting, at_leisure, places)
    stay = [each for each in at_leisure if each not in hastened.put_back]
    assert list(hastened.hasten) == (stay if left else [])


@given(st.lists(st.booleans(), max_size=60))
def test_back_off_grows_to_a_bound_and_ends_with_success(failures: list[bool]) -> None:
    backoff, now = Backoff(), 0.0
    for failed in failures:
        later = backoff.failed(now) if failed else Backoff()
        assert 0 < seconds_after(later.failures) <= MOST_SECONDS if failed else not later.waits(now)
        assert not failed or later.until - now >= backoff.until - now or backoff.until == float("-inf")
        backoff, now = later, max(now, later.until)
        assert not backoff.waits(now)


def taking(deployment: LLMDeployment, cluster: Cluster, chance: random.Random) -> Plan:
    """Any plan for a cluster: some devices of some of its nodes, a stage each."""
    chosen = chance.sample(list(cluster.nodes), chance.randint(1, len(cluster.nodes)))
    plan = a_plan(*(f"{deployment.name}-{node.name}" for node in chosen), layers=len(chosen))
    stages = tuple(
        msgspec.structs.replace(
            stage,
            node=node.name,
            devices=tuple(DeviceRef(device.type, index, 1) for index in range(chance.randint(1, device.count))),
        )
        for stage, node in zip(plan.replicas[0].stages, chosen, strict=True)
        for device in [chance.choice(node.devices)]
    )
    return msgspec.structs.replace(plan, replicas=(msgspec.structs.replace(plan.replicas[0], stages=stages),))


@settings(max_examples=share(60), deadline=None)
@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(0, 3), st.booleans()), min_size=2, max_size=24),
    st.randoms(use_true_random=False),
)
def test_no_device_is_dealt_twice_however_plans_overlap(
    gpus: list[int], events: list[tuple[int, bool]], chance: random.Random
) -> None:
    """Four deployments, each asked (on what was free then) and answered at any time, in any order."""
    nodes = [
        a_node(f"n{index}").with_gpus("Tesla-T4", count).as_cpu_device("9", "9Gi", count).build()
        for index, count in enumerate(gpus)
    ]
    deployments = [a_deployment(f"d{index}").build() for index in range(4)]
    ledger, under_way = DeviceLedger(), dict[int, tuple[Plan, Cluster]]()
    for who, asks in events:
        deployment = deployments[who]
        uid = deployment.metadata.uid
        cluster = take_inventory(deployment, nodes, (), ledger.others(uid)).cluster
        if asks and cluster.nodes:
            under_way[who] = (taking(deployment, cluster, chance), cluster)
        elif not asks and who in under_way:
            plan, made_for = under_way.pop(who)
            if still_free(plan, made_for, cluster):
                ledger = ledger.dealt(uid, claims_of(deployment, plan, made_for))
        for index, count in enumerate(gpus):
            claims = [claim for claims in ledger.claims.values() for claim in claims if claim.node == f"n{index}"]
            dealt = added(*(claim.requests for claim in claims))
            assert dealt.get("nvidia.com/gpu", 0) <= count
            assert dealt.get("cpu", 0) <= 9
            assert dealt.get("memory", 0) <= 9 << 30


def test_processors_that_have_become_fewer_are_not_taken() -> None:
    def cluster(threads: int, memory: int) -> Cluster:
        return Cluster(nodes=(Node("a", (Device("cpu", memory_bytes=memory, threads=threads),)),))

    plan = a_plan("a")
    assert still_free(plan, cluster(2, 100), cluster(2, 100))
    assert still_free(plan, cluster(2, 100), cluster(4, 200))
    assert not still_free(plan, cluster(2, 100), cluster(1, 100))
    assert not still_free(plan, cluster(2, 100), cluster(2, 99))
    assert not still_free(plan, cluster(2, 100), Cluster(nodes=()))


def test_a_plan_that_is_being_recorded_holds_its_devices_until_its_record_shows_or_it_is_refused() -> None:
    deployment = a_deployment("chat").build()
    cluster = Cluster(nodes=tuple(Node(name, (Device("Tesla-T4", memory_bytes=1),)) for name in "ab"))

    def on(node: str) -> tuple[Claim, ...]:
        stage = msgspec.structs.replace(a_plan(node).stages[0], devices=(DeviceRef("Tesla-T4", 0, 1),))
        plan = a_plan(node)
        replica = msgspec.structs.replace(plan.replicas[0], stages=(stage,))
        return claims_of(deployment, msgspec.structs.replace(plan, replicas=(replica,)), cluster)

    def taken(dealing: Dealing) -> list[str]:
        return [claim.node for claim in dealing.ledger.others("somebody-else")]

    before, dealing = DeviceLedger({"chat": on("a")}), Dealing()
    dealing.refresh(before, {"chat": 1}, 0.0)
    dealing.deal("chat", 2, on("b"))
    assert taken(dealing) == ["b"]
    dealing.refresh(before, {"chat": 1}, 1.0)  # a look that began before the record was written
    assert taken(dealing) == ["b"]
    dealing.take_back("chat")
    assert taken(dealing) == ["a"]
    dealing.deal("chat", 2, on("b"))
    dealing.doubt("chat", 2.0)
    dealing.refresh(before, {"chat": 1}, 3.0)
    assert taken(dealing) == ["b"]
    dealing.refresh(before, {"chat": 1}, 100.0)  # it was never written
    assert taken(dealing) == ["a"]
    dealing.deal("chat", 2, on("b"))
    dealing.refresh(DeviceLedger({"chat": on("b")}), {"chat": 2}, 101.0)
    assert taken(dealing) == ["b"]


class Counting:
    """Answers when told to."""

    def __init__(self) -> None:
        self.running: list[str] = []
        self.most = 0
        self.hurried: dict[str, bool] = {}
        self.begun: Counter[str] = Counter()
        self.done = asyncio.Event()

    async def answer(self, question: Question) -> Answer:
        name = question.deployment["metadata"]["name"]
        self.running.append(name)
        self.hurried[name] = question.hurried
        self.begun[name] += 1
        self.most = max(self.most, len(self.running))
        try:
            await self.done.wait()
        finally:
            self.running.remove(name)
        return Answer(None, "Infeasible", name)

    def warm(self) -> None: ...

    async def close(self) -> None: ...


def about(name: str) -> Question:
    return Question(a_deployment(name).to_object(), Cluster(nodes=()))


async def test_two_are_planned_side_by_side_and_a_loss_takes_a_wishs_place() -> None:
    counting, woken = Counting(), asyncio.Event()
    planners = Planners(counting, 2, woken.set)
    for name in ("one", "two", "three"):
        planners.want(name, about(name), urgent=False)
    await asyncio.sleep(0)
    assert counting.running == ["one", "two"]
    planners.want("lost", about("lost"), urgent=True)
    for _ in range(3):
        await asyncio.sleep(0)
    assert sorted(counting.running) == ["lost", "one"]
    counting.done.set()
    answers = {}
    while len(answers) < 4:
        await asyncio.wait_for(woken.wait(), 10)
        woken.clear()
        answers |= {name: answer for name in ("one", "two", "three", "lost") if (answer := planners.answer(name))}
    assert {name: answer.message for name, answer in answers.items()} == {name: name for name in answers}
    assert counting.most == 2
    planners.drop("one")
    assert planners.answer("one") is None  # it is there until nobody wants it any more
    await planners.close()


async def test_who_wants_nothing_any_more_leaves_its_place_to_the_next() -> None:
    counting = Counting()
    planners = Planners(counting, 1, lambda: None)
    planners.want("one", about("one"), urgent=False)
    planners.want("two", about("two"), urgent=False)
    await asyncio.sleep(0)
    planners.drop("one")
    for _ in range(3):
        await asyncio.sleep(0)
    assert counting.running == ["two"]
    await planners.close()
    assert counting.running == []


@pytest.fixture
def question(tmp_path: Path) -> Question:
    (tmp_path / "config.json").write_text(CONFIG)
    thing = copy.deepcopy(a_deployment("chat").to_object())
    thing["spec"] |= {"model": {"uri": f"file://{tmp_path}", "maxModelLen": 64}}
    thing["spec"]["workload"] = {"promptTokens": 32, "outputTokens": 32, "concurrency": 2}
    return Question(thing, Cluster(nodes=(Node("a", (Device("cpu", memory_bytes=2 << 30, threads=1),)),)))


async def test_a_process_of_its_own_plans_and_what_it_cannot_read_is_an_answer(question: Question) -> None:
    nowhere = copy.deepcopy(question.deployment)
    nowhere["spec"]["model"] = {"uri": "file:///nowhere"}
    process = PlanProcess(PlanLimits())
    process.warm()
    assert process._parent is not None
    parent = await process._parent
    parent.process.kill()  # one that died while it waited is replaced
    await parent.process.wait()
    one, hurried, other = await asyncio.gather(
        process.answer(question),
        process.answer(msgspec.structs.replace(question, hurried=True)),
        process.answer(msgspec.structs.replace(question, deployment=nowhere)),
    )
    await process.close()
    assert one.plan is not None
    assert one.plan.num_layers == 12
    assert one.plan.alternatives
    assert hurried.plan is not None
    assert not hurried.plan.alternatives
    assert (other.plan, other.reason) == (None, "InvalidInput")


@pytest.mark.slow
async def test_a_plan_that_needs_more_memory_than_it_may_have_is_an_answer(question: Question) -> None:
    process = PlanProcess(PlanLimits(memory_bytes=1 << 20))
    answer = await process.answer(question)
    await process.close()
    assert (answer.plan, answer.reason) == (None, "PlanTooLarge")
    assert "planning.memoryMiB" in answer.message


async def test_a_plan_that_passes_its_deadline_is_ended(question: Question, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PlanLimits, "deadline_seconds", lambda *_: 0.0)
    process = PlanProcess(PlanLimits())
    answer = await process.answer(question)
    await process.close()
    assert (answer.plan, answer.reason) == (None, "NoPlanInTime")


async def test_a_plan_that_nobody_waits_for_any_more_ends_its_process(question: Question) -> None:
    process = PlanProcess(PlanLimits())
    fork = await process._fork()
    signal.pidfd_send_signal(fork.pidfd, signal.SIGSTOP)  # it cannot answer
    over = os.dup(fork.pidfd)
    process._fork = lambda: asyncio.sleep(0, fork)  # type: ignore[method-assign]
    task = asyncio.create_task(process.answer(question))
    await asyncio.sleep(0.05)
    assert not select.select([over], [], [], 0)[0]
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert select.select([over], [], [], 0)[0]  # as a process's descriptor is once it has ended
    os.close(over)
    await process.close()


@pytest.mark.slow  # processes; of the one above a parent died, too
async def test_a_fork_that_dies_takes_nobody_with_it(question: Question) -> None:
    """Nor is a parent that died while a fork of it planned taken for one that lives."""
    process = PlanProcess(PlanLimits())
    first = await process._fork()
    signal.pidfd_send_signal(first.pidfd, signal.SIGKILL)
    assert await first.ask(b"?") == b""
    await first.end()
    assert process._parent is not None
    parent = await process._parent
    busy = await process._fork()
    parent.process.kill()
    await parent.process.wait()
    assert (await process.answer(question)).plan is not None
    await busy.end()
    await process.close()


async def test_while_somebody_waits_plans_are_made_in_a_hurry_and_the_last_in_line_is_not() -> None:
    """What was begun at leisure is begun anew, once."""
    counting = Counting()
    planners = Planners(counting, 1, lambda: None)
    for name in ("one", "two", "three"):
        planners.want(name, about(name), urgent=False)
        await asyncio.sleep(0)
    counting.done.set()
    while not all(planners.answer(name) for name in ("one", "two", "three")):  # noqa: ASYNC110  tasks one after the other
        await asyncio.sleep(0)
    assert counting.hurried == {"one": True, "two": True, "three": False}
    assert counting.begun == {"one": 2, "two": 1, "three": 1}
    await planners.close()


def test_a_tenants_time_limit_is_bounded_by_the_administrators() -> None:
    patient = about("chat")
    patient.deployment["spec"]["planning"] = {"timeLimitSeconds": 3600}
    assert PlanLimits(time_limit_seconds=10).deadline_seconds(patient) == 80
