"""A slot whose process is gone, on a node that is there: waited for, or taken over by the others, and told so with the seconds of both."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import pytest

from tests.cluster.deployed import Deployed, Status
from tests.cluster.deployment.life import process_of, processes_of, ready_with_three, streamed
from tests.cluster.timings import Steps

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]


def test_a_slot_that_is_killed_is_waited_for_or_taken_over(chat: Deployed, expected: str) -> None:
    """As it started before: where nothing else runs it is back before a better plan than the repair were found. `minStages` is 2 by now: others may take over."""
    ready_with_three(chat)
    before, steps = chat.get()["status"], Steps("kill -9 of a slot that could be taken over")
    slot = before["stages"][-1]["slot"]
    assert streamed(chat, lambda: os.kill(process_of(slot), signal.SIGKILL)) == expected
    status = chat.wait(lambda now: is_ready_after(now, before), "Ready again")
    steps.mark("Ready")
    replan = next(each for each in status["replans"] if each["epoch"] > before["committedEpoch"])
    tell(steps, replan)
    assert replan["choice"]["chosen"] == {"SlotLost": "restart", "Takeover": "takeover"}[replan["reason"]]
    stage = next(each for each in before["stages"] if each["slot"] == slot)
    steps.happened("its start before", timedelta(seconds=stage["startSeconds"]))
    steps.happened("its load before", timedelta(seconds=stage["loadSeconds"]))


def test_a_slot_that_does_not_come_back_is_taken_over(chat: Deployed, expected: str) -> None:
    """Its kubelet waits longer and longer before it starts the container again. Its node is Ready all the time."""
    ready_with_three(chat)
    before, steps = chat.get()["status"], Steps("a slot that ends whenever it starts")
    lost = before["stages"][-1]
    with ever_ending(lost["slot"]) as begin:
        assert streamed(chat, begin) == expected
        steps.mark("stream complete")
        status = chat.wait(lambda now: is_ready_after(now, before), "Ready without it")
    since = [each for each in status["replans"] if each["epoch"] > before["committedEpoch"]]
    replan = next(each for each in since if each.get("choice", {}).get("chosen") == "takeover")
    tell(steps, replan)
    assert (replan["reason"], replan["node"]) == ("Takeover", lost["node"])
    assert "TakeoverChosen" in {event["reason"] for event in chat.events()}


def tell(steps: Steps, replan: Status) -> None:
    for way in ("restart", "takeover"):
        steps.happened(f"a {way}, as predicted", timedelta(seconds=replan["choice"][f"{way}Seconds"]))
    steps.title += f" ({replan['choice']['chosen']})"


def is_ready_after(status: Status, before: Status) -> bool:
    return bool(status["phase"] == "Ready" and status["committedEpoch"] > before["committedEpoch"])


@contextmanager
def ever_ending(slot: str) -> Iterator[Callable[[], None]]:
    """What begins it: from then on its process is killed whenever there is one."""
    over = threading.Event()

    def kills() -> None:
        while not over.wait(0.2):
            for process in processes_of(slot):
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)

    thread = threading.Thread(target=kills)
    try:
        yield thread.start
    finally:
        over.set()
        if thread.is_alive():
            thread.join()
