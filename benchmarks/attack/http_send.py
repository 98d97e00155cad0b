"""Sends HTTP attacks, several at once, and says what each was answered."""

import contextlib
import json
import re
import socket
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from benchmarks.attack.http_requests import HttpAttack, make, post, written
from benchmarks.attack.target import HOST, Outcome, Target

AT_ONCE = 8
PATIENCE_SECONDS = 4.0  # then the client goes away: an answer that is still generated is aborted
QUIET_SECONDS = 60.0  # until nothing of the attacks may run any more
_MOST_BYTES = 1 << 20


def fuzz(target: Target, seed: int, first: int, count: int) -> Outcome:
    """Attacks number `first` to `first + count` of this seed."""
    attacks = [make(seed, number, target.model) for number in range(first, first + count)]
    outcome = send_all(target, attacks)
    where = f"HTTP {first}..{first + count} of seed {seed}"
    outcome.complaints = [f"{where}: {complaint}" for complaint in outcome.complaints]
    outcome.complaints += [f"{where}: {complaint}" for complaint in await_quiet(target)]
    return outcome


def send_all(target: Target, attacks: Iterable[HttpAttack], at_once: int = AT_ONCE) -> Outcome:
    outcome = Outcome()
    with ThreadPoolExecutor(at_once) as threads:
        for attack, answer in threads.map(lambda attack: (attack, exchange(target.http_port, attack)), attacks):
            outcome.attacks += 1
            outcome.answers[answer] += 1
            if answer.startswith("5"):
                outcome.complaints.append(f"{attack.what} was answered {answer}: {attack.data[:300]!r}")
    return outcome


def exchange(port: int, attack: HttpAttack, seconds: float = PATIENCE_SECONDS) -> str:
    """The status code; else "closed", "refused", or "no answer" when the client went away first."""
    try:
        with socket.create_connection((HOST, port), timeout=seconds) as connection:
            with contextlib.suppress(ConnectionError, TimeoutError):  # it may answer and close before it has all
                connection.sendall(attack.data)
                if not attack.whole:
                    connection.shutdown(socket.SHUT_WR)
            return status_of(receive(connection, seconds))
    except TimeoutError:
        return "no answer"
    except OSError:
        return "refused"


def receive(connection: socket.socket, seconds: float) -> bytes:
    """All until the end, or what came in time. Raises TimeoutError if that is nothing."""
    data = bytearray()
    deadline = time.monotonic() + seconds
    try:
        while (left := deadline - time.monotonic()) > 0 and len(data) < _MOST_BYTES:
            connection.settimeout(left)
            piece = connection.recv(65536)
            if not piece:
                return bytes(data)
            data += piece
            if _is_whole(data):
                return bytes(data)
    except ConnectionError:
        return bytes(data)
    except TimeoutError:
        pass
    if not data:
        raise TimeoutError
    return bytes(data)


def _is_whole(data: bytearray) -> bool:
    """True once an answer that told its length is there: its connection may stay open."""
    head, end, body = data.partition(b"\r\n\r\n")
    length = re.search(rb"(?i)^content-length: *(\d+)", head, re.MULTILINE)
    return bool(end) and length is not None and len(body) >= int(length[1])


def status_of(answer: bytes) -> str:
    words = answer.split(b" ", 2)
    return words[1].decode("latin-1") if answer.startswith(b"HTTP/") and len(words) > 1 else "closed"


def ask(port: int, body: object, path: str = "/v1/completions", seconds: float = 60.0) -> tuple[str, bytes]:
    """One ordinary request: its status code and its body; "closed" if the answer was lost with the connection."""
    with socket.create_connection((HOST, port), timeout=seconds) as connection:
        with contextlib.suppress(ConnectionError):  # it may answer and close before it has all
            connection.sendall(post(path, body if isinstance(body, bytes) else written(body)))
        answer = receive(connection, seconds)
    return status_of(answer), answer.partition(b"\r\n\r\n")[2]


def text(port: int, model: str, prompt: str, tokens: int, **more: object) -> str:
    """A greedy answer; "status: body" for a failure."""
    body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, **more}
    try:
        status, data = ask(port, body)
        return str(json.loads(data)["choices"][0]["text"]) if status == "200" else f"{status}: {data[:300]!r}"
    except (OSError, ValueError) as error:
        return f"no answer: {error}"


def get(port: int, path: str, seconds: float = 10.0) -> tuple[str, bytes]:
    with socket.create_connection((HOST, port), timeout=seconds) as connection:
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        answer = receive(connection, seconds)
    return status_of(answer), answer.partition(b"\r\n\r\n")[2]


def gauge(port: int, name: str) -> float:
    """The value of one gauge of /metrics."""
    lines = get(port, "/metrics")[1].decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((f"{name}{{", f"{name} ")))


def await_quiet(target: Target, others: int = 1, seconds: float = QUIET_SECONDS) -> list[str]:
    """Complaints if more than `others` requests still run or wait after a while, or nobody answers."""
    deadline = time.monotonic() + seconds
    seen = "nothing"
    while time.monotonic() < deadline:
        try:
            running = sum(gauge(target.http_port, f"vllm:num_requests_{kind}") for kind in ("running", "waiting"))
        except OSError as error:
            seen = f"/metrics does not answer: {error}"
        else:
            if running <= others:
                return []
            seen = f"{running:g} requests run or wait"
        time.sleep(0.25)
    return [f"{seconds:g} s after the attacks {seen}"]
