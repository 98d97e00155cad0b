"""The whole chain by virtual time: clients, a real gateway, real slots, the real controller, and the model of a cluster with its API server."""

import itertools
import random
from collections.abc import Callable
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any
from unittest import mock

import msgspec

from strata_planner.contract.control import Commit
from strata_planner.contract.frames import WantPages, encode, pages_decoder
from strata_runtime.gateway.keeping import birth, twins
from strata_runtime.gateway.routing import dispatcher, generation, leader_link
from strata_runtime.gateway.settings import Peer
from strata_runtime.gateway.standing import carrying
from strata_runtime.slot import epoch, finishing, gathering, giver, leader, ordered, prepare, reception, slot, switching
from strata_runtime.slot.gathering import Fetch
from strata_runtime.stage import handover
from strata_runtime.wire import transport
from tests.chain import slot_process
from tests.chain.arithmetic import Executor
from tests.chain.client import Client, KeptClient, a_client
from tests.chain.cluster import NAME, PAGES, POOL_BYTES, ROOMY_BYTES, TIGHT_BYTES, Chain, ChainPlanner, ChainSlot
from tests.chain.gateway_process import GatewayProcess
from tests.chain.slot_process import Served, SlotProcess
from tests.chain.virtual_network import Frames, Host
from tests.chain.virtual_threads import VirtualThreading
from tests.chain.virtual_zmq import VirtualZmq, await_event, read_event
from tests.operator.cluster_model import status_of
from tests.operator.virtual_operator import ApiFaults, ModelControl, VirtualOperator

# Until all is well again, once nothing goes wrong any more: after many failures the next plan waits for ten minutes, behind a prepare that stalls, and so does the one
# after it, where two devices are gone for good.
MOST_SECONDS = 1320.0
MOST_BEFORE = 48  # tokens of a chat that goes on
BEFALLS = ("dies", "stops", "is late", "is parted", "answers for another epoch")  # pages under way


class ChainWorld:
    """One deployment on four nodes. `close` it."""

    def __init__(self, seed: int = 0, *, tight: bool = True, gateways: int = 2, logged: int = 0) -> None:
        """`tight`: devices hold a role of all layers and nothing beside it. `logged`: pages of which stages keep what they hand on."""
        draw = random.Random(seed)
        self._held = ExitStack()
        usable = TIGHT_BYTES if tight else ROOMY_BYTES
        self.cluster = Chain("a", "b", "c", "d", keep=lambda most: draw.randint(0, most), usable_bytes=usable)
        self._replace(draw)
        self.cluster.serve(NAME)
        self.cluster.edit(
            NAME, replanning={"prepareTimeoutSeconds": 30}, gateway={"replicas": gateways}, precision={"allowed": [16]}
        )
        if logged:
            self.cluster.edit(NAME, runtime={"boundaryLog": {"maxMemory": f"{logged}k"}})
        self.api = ApiFaults()
        self.planner = ChainPlanner(self.cluster)
        self.planner.repairs = True
        self.operator = self._a_new_operator()
        self.clients: list[Client] = []
        self._gateways: set[GatewayProcess] = set()  # that lived at the last look
        self._names = itertools.count(1)

    def _replace(self, draw: random.Random) -> None:
        """Threads, sockets, clocks and weights; all else is the real thing."""
        network = self.cluster.network
        virtual = VirtualZmq(network)
        clock = self.cluster.time.time
        time = SimpleNamespace(monotonic=clock, time=clock, perf_counter=clock)
        for module in (transport, slot, epoch, leader, reception):
            self._put(module, zmq=virtual)
        for module in (leader_link, dispatcher, twins):
            self._put(module, zmq=virtual)
        for module in (slot, epoch, finishing, dispatcher, generation, birth, ordered, carrying):
            self._put(module, time=time)
        self._put(transport, recv_monitor_message=read_event, _see_to_gatekeeper=lambda _: None)
        for module in (leader_link, twins):
            self._put(module, recv_monitor_message=await_event)
        self._put(twins, _endpoints=self._endpoints)
        chance = SimpleNamespace(token_hex=lambda count: draw.randbytes(count).hex(), randbits=draw.getrandbits)
        self._put(birth, secrets=chance)
        threads = VirtualThreading(network)
        for module in (prepare, gathering, giver):
            self._put(module, threading=threads)
        for module in (gathering, giver):
            self._put(module, zmq=virtual, time=time)
        for module in (slot, giver):
            self._put(module, Wakeup=slot_process.Wakeup)
        self._put(prepare, load_stage=slot_process.load_stage, resolve_model=slot_process.resolved)
        self._put(prepare, read_change=slot_process.Moved)
        self._put(switching, check_change=slot_process.check_change, growth_of=slot_process.growth_of)
        self._put(handover, PART_BYTES=2 * POOL_BYTES // PAGES)  # two pages of a layer in a message
        self._put(slot, private_bytes=lambda: 0)
        self._put(epoch, StageExecutor=Executor, serve=_served)
        self._put(epoch, _give_up=lambda _: None)  # it would end this process; `Served.join` plays it
        self._put(reception.Gateways, open=lambda gateways, hello: setattr(gateways, "hello", hello))

    def _put(self, where: Any, **things: Any) -> None:
        for name, thing in things.items():
            self._held.enter_context(mock.patch.object(where, name, thing))

    def _a_new_operator(self) -> VirtualOperator:
        control = ModelControl(self.cluster)
        control.on_message = self._check_commit
        return VirtualOperator(self.cluster, self.api, control, self.planner)

    def _check_commit(self, told: Any, message: Any) -> None:
        """Before anybody is told to, all of its replicas have prepared."""
        if not isinstance(message, Commit) or not isinstance(told, ChainSlot):
            return
        own = _asked_for(told.process, message.epoch)
        for name, process in self.cluster.slots().items():
            state = process.slot.status().prepare
            if state.phase == "loading" and own & _asked_for(process, message.epoch):
                self.cluster.found.append(f"{told.name} is to commit epoch {message.epoch} while {name} loads")

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

    def ask(self, prompt: tuple[int, ...], most: int, seed: int | None = None, at: int = 0) -> Client:
        """`seed`: None: under an Idempotency-Key. `at`: one of the gateways."""
        client = a_client(f"r{next(self._names)}", prompt, most, seed)
        self.clients.append(client)
        self._serve(client, at)
        return client

    def _serve(self, client: Client, at: int = 0) -> None:
        gateways = list(self.cluster.gateways.values())
        if gateways:
            client.served_by = gateways[at % len(gateways)]
            client.served_by.serve(client)

    def asks_again(self, client: Client, at: int) -> None:
        """Its connection breaks, and it goes on at one of the gateways."""
        if not client.done:
            client.drop()
            client.begin_anew()
            self._serve(client, at)

    def comes_back(self, number: int, at: int, *, forgets: bool = False) -> None:
        """One of those who wait under a key. `forgets`: what it has."""
        waiting = [client for client in self.clients if isinstance(client, KeptClient) and not client.done]
        if waiting:
            client = waiting[number % len(waiting)]
            if forgets:
                client.forgets()
            self.asks_again(client, at)

    def goes_on(self, number: int, at: int = 0) -> Client | None:
        """A chat whose beginning, prompt and answer, is that of an answer so far."""
        begun = [client for client in self.clients if client.got]
        if not begun:
            return None
        before = begun[-1 - number % len(begun)]
        prompt = (*before.request.prompt, *before.got)[:MOST_BEFORE]
        return self.ask((*prompt, number), 8, number % 3, at)

    def leaves(self, number: int) -> None:
        """The client closes its connection in the midst of its answer."""
        waiting = [client for client in self.clients if not client.done]
        if number < len(waiting):
            waiting[number].leave()

    # What goes wrong.

    def kill(self, pod: str, *, for_good: bool = False) -> None:
        self.watch_gateways()
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

    def fetches(self) -> list[tuple[str, Fetch]]:
        """Pages that are under way, by the pod that gets them."""
        found = []
        for pod, process in self.cluster.slots().items():
            loading, running = process.slot._loading, process.slot._running
            fetches = list(loading._fetches) if loading else []
            fetches += [each for role in running.roles for each in role._fetches] if running else []
            found += [(pod, each) for each in fetches if not each.over]
        return found

    def until_pages_go(self, seconds: float) -> bool:
        until = self.cluster.time.time() + seconds
        while not self.fetches() and self.cluster.time.time() < until:
            self.passes(0.05, every=0.05)
        return bool(self.fetches())

    def befalls_pages(self, what: str, *, giver: bool) -> None:
        """One of BEFALLS: of pages that are under way, who gives them or who gets them."""
        fetches = self.fetches()
        if not fetches:
            return
        pod, fetch = fetches[0]
        giving = f"{fetch.source.slot}-0"
        match what:
            case "dies":
                self.kill(giving if giver else pod)
            case "stops":
                self.stop(giving if giver else pod, stopped=True)
                self.passes(3.0, every=0.5)
                self.stop(giving if giver else pod, stopped=False)
            case "is late":
                self.part(giving, pod, apart=True)
                self.passes(1.2, every=0.1)
                self.part(giving, pod, apart=False)
            case "is parted":
                self.part(giving, pod, apart=True)
            case "answers for another epoch":
                self.cluster.network.altered = _of_another_epoch

    def slow_down(self, pod: str, seconds: float) -> None:
        if process := self.cluster.slots().get(pod):
            process.step_seconds = seconds

    def part(self, one: str, other: str, *, apart: bool) -> None:
        pair = frozenset((one, other))
        (self.cluster.network.cut.add if apart else self.cluster.network.cut.discard)(pair)
        self.cluster.network.changed()
        self.watch_gateways()

    def node_goes(self, node: str, *, power: bool) -> None:
        self.cluster.set_ready(node, "Unknown", power=power)

    def node_falls_silent(self, node: str) -> None:
        """It loses its power, and Kubernetes still calls it Ready."""
        self.cluster.set_ready(node, "True", power=False)

    def node_returns(self, node: str) -> None:
        self.cluster.set_ready(node, "True")

    def heal(self) -> None:
        self.cluster.network.altered = _as_it_is
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
        self.watch_gateways()
        end = self.cluster.time.time() + seconds
        while (left := end - self.cluster.time.time()) > 1e-6:
            self.cluster.tick(min(left, every))
            self._look()
            self._ask_again()
            self.check()

    def _look(self) -> None:
        self.operator.look()

    def _ask_again(self) -> None:
        """Clients whose gateway is gone: a stream without a key is broken, as its documentation says, and asked anew."""
        alive = list(self.cluster.gateways.values())
        for client in self.clients:
            if not client.done and client.served_by not in alive:
                client.begin_anew()
                self._serve(client)

    def watch_gateways(self) -> None:
        """Answers may be lost that one gateway alone knows."""
        alive = set(self.cluster.gateways.values())
        for client in self.clients:
            if isinstance(client, KeptClient) and not client.done:
                by = client.served_by
                known = by.is_whole if by in alive else bool(alive & self._gateways)
                client.may_be_lost |= not known
        self._gateways = alive

    async def _endpoints(self, peer: Peer) -> list[str]:
        return [f"tcp://{host}:{port}" for host, port in self.cluster.network.listening if port == peer.port]

    def settle(self) -> None:
        """Nothing goes wrong any more: every client gets its whole answer."""
        until = self.cluster.time.time() + MOST_SECONDS
        while not self.is_well():
            assert self.cluster.time.time() < until, self.story()
            self.passes(2.0)

    def is_well(self) -> bool:
        return all(client.done or client.error for client in self.clients) and self.is_serving()

    def is_serving(self) -> bool:
        """At all gateways, and by all replicas of the plan as the operator sees it."""
        dispatchers = [gateway.dispatcher for gateway in self.cluster.gateways.values()]
        told = [(each.status(), len(each._links)) for each in dispatchers]
        is_routed = bool(told) and all(status.epoch and status.leaders_connected == count for status, count in told)
        return is_routed and status_of(self.cluster, NAME).phase == "Ready"

    def story(self) -> str:
        slots = {name: process.slot._essence() for name, process in self.cluster.slots().items()}
        gateway = {name: each.dispatcher.status() for name, each in self.cluster.gateways.items()}
        waiting = [client.request.id for client in self.clients if not client.done]
        return f"{gateway}\nwaiting: {waiting}\n" + "\n".join(f"{name}: {essence}" for name, essence in slots.items())

    # What holds at every moment.

    def check(self) -> None:
        self.watch_gateways()
        for process in self.cluster.slots().values():
            process.check_hung()
        assert not self.cluster.found, self.cluster.found
        for client in self.clients:
            assert not client.broken, client.broken
            assert not client.error, f"{client.request.id}: {client.error}"


def _served(worker: Any, name: str, failed: Callable[[str], None], *_: object) -> Served:
    return Served(worker, failed, name)


def _asked_for(process: SlotProcess, epoch: int) -> set[int]:
    """The replicas of which a slot was to prepare roles."""
    asked = process.slot._asked
    return {role.replica for role in asked.roles} if asked is not None and asked.epoch == epoch else set()


def _as_it_is(_: Host, frames: Frames) -> Frames:
    return frames


def _of_another_epoch(_: Host, frames: Frames) -> Frames:
    """Pages that somebody has given in the epoch before."""
    try:
        message = pages_decoder.decode(frames[0])
    except (msgspec.MsgspecError, IndexError):
        return frames
    if isinstance(message, WantPages):
        return frames
    return [encode(msgspec.structs.replace(message, epoch=message.epoch - 1)), *frames[1:]]
