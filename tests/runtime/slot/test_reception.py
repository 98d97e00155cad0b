"""A leader's gateways: answered while a step goes on, and all of them heard between two steps."""

import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import zmq

from strata_planner.contract.frames import (
    Abort,
    GatewayMessage,
    Hello,
    LeaderHello,
    LeaderMessage,
    Sampling,
    StepFailed,
    StepFailure,
    Submit,
    TokenEvent,
    Tokens,
    encode,
    leader_message_decoder,
)
from strata_runtime.slot.reception import Gateways, Gone
from strata_runtime.wire.transport import Keys, connect, listen

KEYS = Keys.of("secret")
HELLO = LeaderHello(0, 1, "one", 100, 0, 0, 0.0)
PATIENCE_MILLISECONDS = 10_000


class Client:
    def __init__(self, context: zmq.Context[Any], endpoint: str) -> None:
        self.socket = connect(context.socket(zmq.DEALER), endpoint, KEYS)

    def say(self, message: GatewayMessage) -> None:
        self.socket.send(encode(message))

    def hear(self) -> LeaderMessage:
        assert self.socket.poll(PATIENCE_MILLISECONDS)
        return leader_message_decoder.decode(self.socket.recv())


class Reception:
    """The worker's side, and clients that reach it."""

    def __init__(self) -> None:
        self._inside: zmq.Context[Any] = zmq.Context()
        self._outside: zmq.Context[Any] = zmq.Context()
        socket = self._inside.socket(zmq.ROUTER)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        listen(socket, "tcp://127.0.0.1:*", KEYS)
        self._endpoint = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.gateways = Gateways(socket, 1, "one")
        self.gateways.open(HELLO)
        self._clients: list[Client] = []

    def client(self) -> Client:
        self._clients.append(Client(self._outside, self._endpoint))
        return self._clients[-1]

    def received(self, count: int) -> list[tuple[bytes, Submit | Abort | Gone]]:
        got: list[tuple[bytes, Submit | Abort | Gone]] = []
        while len(got) < count:
            assert self.gateways.socket.poll(PATIENCE_MILLISECONDS)
            got += self.gateways.received()
        return got

    def close(self) -> None:
        self.gateways.close()
        self._inside.term()
        for client in self._clients:
            client.socket.close(linger=0)
        self._outside.term()


@pytest.fixture
def reception() -> Iterator[Reception]:
    one = Reception()
    yield one
    one.close()


def a_submit(name: str) -> Submit:
    return Submit(name, [1], [], 5, [], Sampling())


def test_who_leads_is_answered_while_the_worker_is_in_a_step(reception: Reception) -> None:
    """The worker's side does not look at all here: as in a step without an end."""
    client = reception.client()
    for _ in range(3):
        client.say(Hello())
        assert client.hear() == HELLO
    assert not reception.gateways.socket.poll(0), "no hello waits for the worker"


def test_gateways_hear_at_once_who_was_in_a_step_that_does_not_end(reception: Reception) -> None:
    """Told by another thread, while the worker's side does not look: each of its own requests, and how many there were. Its slot is ended soon after."""
    clients = reception.client(), reception.client()
    for name, client in zip("ab", clients, strict=True):
        client.say(a_submit(name))
        client.say(Hello())
        assert client.hear() == HELLO
        [(identity, _)] = reception.received(1)
        reception.gateways.own(name, identity)
    thread = threading.Thread(target=reception.gateways.suspect, args=(["b", "forgotten"], "hangs"))
    thread.start()
    thread.join()
    assert [client.hear() for client in clients] == [StepFailure(0, 1, own, 2, "hangs") for own in ([], ["b"])]
    for client in clients:
        client.say(Hello())
        assert client.hear() == HELLO, "it is said once"


def test_all_requests_that_came_in_a_step_are_there_after_it(reception: Reception) -> None:
    client = reception.client()
    for number in range(32):
        client.say(a_submit(f"r{number}"))
    client.say(Hello())
    assert client.hear() == HELLO  # the requests came before it
    messages = [message for _, message in reception.gateways.received()]
    assert messages == [a_submit(f"r{number}") for number in range(32)]


def test_a_message_of_any_shape_is_passed_over(reception: Reception) -> None:
    client = reception.client()
    client.socket.send_multipart([b"", b"x", b"\xc1"])
    client.socket.send_multipart([encode(Abort("a")), b"second"])
    client.socket.send(b"")
    client.socket.send_multipart([b"delimiter", encode(Abort("b"))])
    assert [message for _, message in reception.received(1)] == [Abort("b")]


def test_a_gateway_that_is_gone_is_told_to_the_worker(reception: Reception) -> None:
    client, other = reception.client(), reception.client()
    client.say(a_submit("a"))
    [(identity, _)] = reception.received(1)
    reception.gateways.own("a", identity)
    client.socket.close(linger=0)
    gone: list[tuple[bytes, Any]] = []
    while not gone:  # the end of a connection takes a moment to be seen
        reception.gateways.deliver([TokenEvent("a", 0, 1, 0.0, [], None)], HELLO)
        other.say(Hello())
        other.hear()
        gone = list(reception.gateways.received())
    assert gone[0] == (identity, Gone())
    assert reception.gateways.owned_by(identity) == ["a"]


def test_news_reach_every_gateway_that_has_asked_whether_it_has_requests_or_not(reception: Reception) -> None:
    clients = [reception.client(), reception.client()]
    for client in clients:
        client.say(Hello())
        assert client.hear() == HELLO
    news = msgspec.structs.replace(HELLO, lost="b")
    reception.gateways.tell(news)
    assert [client.hear() for client in clients] == [news, news]
    late = reception.client()
    late.say(Hello())
    assert late.hear() == news


def test_each_gateway_learns_which_of_its_requests_were_in_a_failed_step(reception: Reception) -> None:
    clients = [reception.client(), reception.client()]
    for name, client in zip("ab", clients, strict=True):
        client.say(a_submit(name))
        [(identity, _)] = reception.received(1)
        reception.gateways.own(name, identity)
    reception.gateways.fail(StepFailed(0, 1, 7, [3, 4, 5], "stage 1: broken"), ["a"])
    assert clients[0].hear() == StepFailure(0, 1, ["a"], 3, "stage 1: broken")
    assert clients[1].hear() == StepFailure(0, 1, [], 3, "stage 1: broken")
    assert reception.gateways.hello is None, "who asks now gets no answer"


def test_tokens_go_to_who_asked(reception: Reception) -> None:
    client = reception.client()
    client.say(a_submit("a"))
    [(identity, _)] = reception.received(1)
    reception.gateways.own("a", identity)
    event = TokenEvent("a", 0, 1, 0.0, [], "length")
    reception.gateways.deliver([event], HELLO)
    assert client.hear() == Tokens(0, 1, [event], 0, 0, 0.0)
    assert reception.gateways.owned_by(identity) == []
