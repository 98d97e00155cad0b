"""The whole chain by virtual time: clients, a real gateway, real slots, the real controller, and the model of a cluster with its API server."""

import itertools
import random
from collections.abc import Callable
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any
from unittest import mock

from strata_planner.contract.control import Commit
from strata_runtime.gateway.routing import dispatcher, generation, leader_link
from strata_runtime.gateway.standing import carrying
from strata_runtime.slot import epoch, leader, ordered, reception, room, slot
from strata_runtime.wire import transport
from tests.chain import slot_process
from tests.chain.arithmetic import Executor
from tests.chain.cluster import NAME, Chain, ChainPlanner
from tests.chain.gateway_process import Client, a_client
from tests.chain.slot_process import Loading, NoGiver, Served, Wakeup
from tests.chain.virtual_zmq import VirtualZmq, await_event, read_event
from tests.operator.virtual_operator import ApiFaults, ModelControl, VirtualOperator

# Until all is well again, once nothing goes wrong any more: after many failures the next plan waits for ten minutes, behind a prepare that stalls.
MOST_SECONDS = 660.0


class ChainWorld:
    """One deployment on four nodes. `close` it."""

    def __init__(self, seed: int = 0) -> None:
        draw = random.Random(seed)
        self._held = ExitStack()
        self.cluster = Chain("a", "b", "c", "d", keep=lambda most: draw.randint(0, most))
        self._replace()
        self.cluster.serve(NAME)
        self.cluster.edit(NAME, replanning={"prepareTimeoutSeconds": 30})
        self.api = ApiFaults()
        self.planner = ChainPlanner(self.cluster)
        self.planner.repairs = True
        self.operator = self._a_new_operator()
        self.clients: list[Client] = []
        self._names = itertools.count(1)

    def _replace(self) -> None:
        """Threads, sockets, clocks and weights; all else is the real thing."""
        network = self.cluster.network
        virtual = VirtualZmq(network)
        clock = self.cluster.time.time
        time = SimpleNamespace(monotonic=clock, time=clock, perf_counter=clock)
        for module in (transport, slot, epoch, leader, reception):
            self._put(module, zmq=virtual)
        for module in (leader_link, dispatcher):
            self._put(module, zmq=virtual)
        for module in (slot, epoch, dispatcher, generation, ordered, carrying):
            self._put(module, time=time)
        self._put(transport, recv_monitor_message=read_event, _see_to_gatekeeper=lambda _: None)
        self._put(leader_link, recv_monitor_message=await_event)
        self._put(slot, Loading=Loading, Wakeup=Wakeup, Giver=NoGiver, private_bytes=lambda: 0)
        self._put(room, store_of=slot_process.store_of)
        self._put(epoch, StageExecutor=Executor, serve=_served)
        self._put(reception.Gateways, open=lambda gateways, hello: setattr(gateways, "hello", hello))

    def _put(self, where: Any, **things: Any) -> None:
        for name, thing in things.items():
            self._held.enter_context(mock.patch.object(where, name, thing))

    def _a_new_operator(self) -> VirtualOperator:
        control = ModelControl(self.cluster)
        control.on_message = self._check_commit
        return VirtualOperator(self.cluster, self.api, control, self.planner)

    def _check_commit(self, _: Any, message: Any) -> None:
        """Before anybody is told to, all have prepared."""
        for name, process in self.cluster.slots().items() if isinstance(message, Commit) else ():
            state = process.slot.status().prepare
            if (state.epoch, state.phase) == (message.epoch, "loading"):
                self.cluster.found.append(f"epoch {message.epoch} is committed while {name} loads")

    def operator_starts_anew(self) -> None:
        self.operator.close()
        self.operator = self._a_new_operator()

    def close(self) -> None:
        self.operator.close()
        for pod in self.cluster.all("pods"):
            self.cluster.stop(pod)
        self.cluster.time.passes(0.1)
        self._held.close()
        self.cluster.time.close()

    # What happens.

    def ask(self, prompt: tuple[int, ...], most: int, seed: int) -> Client:
        client = a_client(f"r{next(self._names)}", prompt, most, seed)
        self.clients.append(client)
        self._serve(client)
        return client

    def _serve(self, client: Client) -> None:
        gateway = self.cluster.gateway
        if gateway is not None:
            client.served_by = gateway
            gateway.serve(client)

    def leaves(self, number: int) -> None:
        """The client closes its connection in the midst of its answer."""
        waiting = [client for client in self.clients if not client.done]
        if number < len(waiting):
            waiting[number].leave()

    # What goes wrong.

    def kill(self, pod: str, *, for_good: bool = False) -> None:
        found = self.cluster.one("pods", pod)
        if found is not None:
            (self.cluster.kill if for_good else self.cluster.stop)(found)

    def stop(self, pod: str, *, stopped: bool) -> None:
        """SIGSTOP and SIGCONT. Kubernetes sees nothing of it."""
        if host := self.cluster.hosts.get(pod):
            host.frozen = stopped
            self.cluster.network.changed()
            host.wake()

    def fail_step(self, pod: str) -> None:
        if (process := self.cluster.slots().get(pod)) and process.serving:
            process.serving[0].worker.executor.fails = "out of memory"

    def hang_step(self, pod: str) -> None:
        """The next one never ends; all else of the process goes on."""
        if (process := self.cluster.slots().get(pod)) and process.serving:
            process.serving[0].worker.executor.hangs = True

    def slow_down(self, pod: str, seconds: float) -> None:
        if process := self.cluster.slots().get(pod):
            process.step_seconds = seconds

    def part(self, one: str, other: str, *, apart: bool) -> None:
        pair = frozenset((one, other))
        (self.cluster.network.cut.add if apart else self.cluster.network.cut.discard)(pair)
        self.cluster.network.changed()

    def node_goes(self, node: str, *, power: bool) -> None:
        self.cluster.set_ready(node, "Unknown", power=power)

    def node_falls_silent(self, node: str) -> None:
        """It loses its power, and Kubernetes still calls it Ready."""
        self.cluster.set_ready(node, "True", power=False)

    def node_returns(self, node: str) -> None:
        self.cluster.set_ready(node, "True")

    def heal(self) -> None:
        self.cluster.faults.end()
        self.api.end()
        self.cluster.network.cut.clear()
        for pod, host in list(self.cluster.hosts.items()):
            if host.frozen:
                self.stop(pod, stopped=False)
        for process in self.cluster.slots().values():
            process.step_seconds = slot_process.STEP_SECONDS
            for served in process.serving:
                served.worker.executor.fails, served.worker.executor.hangs = "", False
        for node in self.cluster.all("nodes"):
            self.node_returns(node["metadata"]["name"])
        self.cluster.network.changed()

    # What passes.

    def passes(self, seconds: float, every: float = 0.5) -> None:
        """With a look of the operator now and then."""
        end = self.cluster.time.time() + seconds
        while (left := end - self.cluster.time.time()) > 1e-6:
            self.cluster.tick(min(left, every))
            self._look()
            self._ask_again()
            self.check()

    def _look(self) -> None:
        self.operator.look()

    def _ask_again(self) -> None:
        """Clients whose gateway is gone: their streams are broken, as its documentation says, and they ask anew."""
        for client in self.clients:
            if not client.done and client.served_by is not self.cluster.gateway:
                client.got.clear()
                self._serve(client)

    def settle(self) -> None:
        """Nothing goes wrong any more: every client gets its whole answer."""
        until = self.cluster.time.time() + MOST_SECONDS
        while not self.is_well():
            assert self.cluster.time.time() < until, self.story()
            self.passes(2.0)

    def is_well(self) -> bool:
        return all(client.done or client.error for client in self.clients) and self.is_serving()

    def is_serving(self) -> bool:
        gateway = self.cluster.gateway
        status = gateway.dispatcher.status() if gateway else None
        return bool(status and status.epoch and status.leaders_connected == len(gateway.dispatcher._links))

    def story(self) -> str:
        slots = {name: process.slot._essence() for name, process in self.cluster.slots().items()}
        gateway = self.cluster.gateway.dispatcher.status() if self.cluster.gateway else None
        waiting = [client.request.id for client in self.clients if not client.done]
        return f"{gateway}\nwaiting: {waiting}\n" + "\n".join(f"{name}: {essence}" for name, essence in slots.items())

    # What holds at every moment.

    def check(self) -> None:
        for process in self.cluster.slots().values():
            process.check_hung()
        assert not self.cluster.found, self.cluster.found
        for client in self.clients:
            assert not client.broken, client.broken
            assert not client.error, f"{client.request.id}: {client.error}"


def _served(worker: Any, name: str, failed: Callable[[str], None], *_: object) -> Served:
    return Served(worker, failed, name)
