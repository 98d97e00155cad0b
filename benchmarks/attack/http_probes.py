"""Named probes of the gateway's HTTP port: requests that once poisoned, froze or exhausted it. Each gives its complaints."""

import json
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from benchmarks.attack.http_requests import HttpAttack, chunked, post, written
from benchmarks.attack.http_send import ask, await_quiet, exchange, gauge, get, send_all, text
from benchmarks.attack.target import BEYOND, HOST, ROWS, Outcome, Target

_JSON = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
_ALWAYS_READ_BYTES = 256 << 10
_PARALLEL = 2000
_STORM = 300


def numbers_without_bound(target: Target) -> list[str]:
    """Sampling parameters beyond what a frame can hold: refused, or cut to what means the same; never kept as they are."""
    cut: list[dict[str, Any]] = [{"top_k": number} for number in (2**31, 2**32, 2**63, 2**64, 10**30)]
    cut += [{"stop_token_ids": [number]} for number in (2**31, 2**63, 2**64, 10**30)]
    refused: list[dict[str, Any]] = [
        {"seed": 2**64},
        {"max_tokens": 2**64},
        {"n": 2**64},
        {"logprobs": 2**64},
        {"prompt": [2**64]},
    ]
    return _all_refused(target, refused) + _all_refused(target, cut, also=("200",))


def beyond_the_embedding(target: Target) -> list[str]:
    """Tokens that the tokenizer knows and the model has no row for, as text and as ids."""
    bodies: list[dict[str, Any]] = [{"prompt": f"a {BEYOND} b"}, {"prompt": [5, ROWS]}, {"prompt": [5, ROWS + 100]}]
    complaints = _all_refused(target, bodies)
    chat = {"model": target.model, "messages": [{"role": "user", "content": BEYOND}], "max_tokens": 2}
    return complaints + _refused(target, chat, "/v1/chat/completions")


def tool_choice(target: Target) -> list[str]:
    """A choice among tools without tools is no request that can be answered as asked."""
    bodies = [{"tool_choice": choice} for choice in ("auto", "required", "any", {"type": "function"})]
    return _all_refused(target, bodies)


def hardly_warm(target: Target) -> list[str]:
    """A temperature that a 32-bit reciprocal turns into infinity: refused, or greedy as its limit is."""
    greedy = text(target.http_port, target.model, "def read(", 12)
    complaints = []
    for temperature in (1e-38, 1e-39, 1e-40, 1e-45, 5e-324):
        got = text(target.http_port, target.model, "def read(", 12, temperature=temperature)
        if got != greedy and not got.startswith("400"):
            complaints.append(f"temperature {temperature}: {got[:80]!r}, greedy is {greedy[:80]!r}")
    return complaints


def arrays(target: Target) -> list[str]:
    """Bodies of up to 1.6 MB whose every element is wrong, one after the other and several at once."""
    model = json.dumps(target.model).encode()
    elements = (b"1.5", b"-1", b"[1.5]", b"[-1]", b"null", b'""', b"{}", b"true", b"1e400", b"[]")
    bodies = [
        b'{"model":%s,"%s":[%s]}' % (model, field, b",".join([element] * 270_000))
        for element in elements
        for field in (b"prompt", b"stop_token_ids", b"messages", b"stop")
    ]
    attacks = [HttpAttack(f"array of {body[-20:]!r}, {len(body)} bytes", post(_path(body), body)) for body in bodies]
    return _told(send_all(target, attacks, at_once=2))


def many_names(target: Target) -> list[str]:
    """Bodies and messages of hundreds of thousands of unknown names, and as many messages."""
    names = ",".join(f'"k{number}":0' for number in range(300_000))
    model = f'"model":{json.dumps(target.model)},"max_tokens":1'
    message = '{"role":"user","content":""}'
    bodies = [
        f'{{{model},"prompt":"a",{names}}}',
        f'{{{model},"prompt":"a","stream":true,"stream_options":{{{names}}}}}',
        f'{{{model},"messages":[{{"role":"user","content":"a",{names}}}]}}',
        f'{{{model},"messages":[{{"role":"user","content":[{{"type":"text",{names}}}]}}]}}',
        f'{{{model},"messages":[{",".join([message] * 300_000)}]}}',
        f'{{{model},"prompt":"a","response_format":{{{names}}}}}',
    ]
    attacks = [HttpAttack(f"many names, {body[:60]}...", post(_path(body.encode()), body.encode())) for body in bodies]
    return _told(send_all(target, attacks, at_once=2))


def tiny_chunks(target: Target) -> list[str]:
    """A body in chunks of a byte each, four clients at once."""
    body = b'{"model":"' + b"x" * 300_000
    data = _JSON + b"Transfer-Encoding: chunked\r\n\r\n"
    data += b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
    attacks = [HttpAttack("300,000 chunks of a byte", data)] * 8
    return send_all(target, attacks, at_once=4).complaints


def long_names(target: Target) -> list[str]:
    """What a client wrote comes back in an error only as far as a person reads it."""
    complaints = []
    for body in ({"model": "m" * 4_000_000, "prompt": "a"}, {"prompt": "a", "x" * 1_000_000: 1}):
        status, answer = ask(target.http_port, {"model": target.model, **body}, seconds=20)
        if status[0] == "5" or len(answer) > 10_000:
            complaints.append(f"a name of megabytes: {status} with {len(answer)} bytes")
    return complaints


def many_prompts(target: Target) -> list[str]:
    """20 kB that ask for up to 640,000 answers."""
    bodies: list[dict[str, Any]] = [{"prompt": [prompt] * 5000, "n": 128} for prompt in ("a", [5])]
    bodies += [{"prompt": ["a"] * 1_000_000}, {"prompt": [[5]] * 1_000_000, "n": 128}]
    return _all_refused(target, bodies)


def long_texts(target: Target) -> list[str]:
    """Texts that cannot fit, as long as a body may be: refused before they are tokenized."""
    texts = (
        "a " * 4_000_000,
        "a" * 8_000_000,
        "\n" * 8_000_000,
        "é" * 4_000_000,
        "\U0001f600" * 2_000_000,
        "<|user|>" * 900_000,
    )
    bodies: list[HttpAttack] = []
    for content in texts:
        what = f"a text of {len(content)} characters, {content[:8]!r}"
        bodies += [
            HttpAttack(what, post("/v1/completions", written({"model": target.model, "prompt": content}))),
            HttpAttack(what, post("/v1/chat/completions", written({"model": target.model, "messages": [{"role": "user", "content": content}]}))),
            HttpAttack(f"{what}, as a stop string", post("/v1/completions", written({"model": target.model, "prompt": "a", "max_tokens": 1, "stop": content}))),
        ]  # fmt: skip
    return _told(send_all(target, bodies, at_once=2))


def deep(target: Target) -> list[str]:
    """Nesting, as deep as a body may be."""
    shapes = (b"[", b'{"a":', b'{"prompt":[', b'{"messages":[{"content":[')
    bodies = [shape * depth for shape in shapes for depth in (1000, 100_000, 500_000)]
    bodies += [b"[" * depth + b"]" * depth for depth in (500, 100_000, 500_000)]
    attacks = [HttpAttack(f"{body[:12]!r}..., {len(body)} bytes", post("/v1/completions", body)) for body in bodies]
    return _told(send_all(target, attacks, at_once=2))


def smuggling(target: Target) -> list[str]:
    """Requests whose length can be read in two ways get one answer at most."""
    body = written({"model": target.model, "prompt": "a", "max_tokens": 1})
    second = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"
    shapes = {
        "two lengths": (b"Content-Length: %d\r\nContent-Length: %d" % (len(body), len(body) + len(second)), body + second),
        "length and chunks": (b"Content-Length: %d\r\nTransfer-Encoding: chunked" % (5 + len(second)), b"0\r\n\r\n" + second),
        "chunks and length": (b"Transfer-Encoding: chunked\r\nContent-Length: 5", chunked(body) + second),
        "an odd coding": (b"Transfer-Encoding: xchunked\r\nContent-Length: %d" % len(body), body + second),
        "two codings": (b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity", chunked(body) + second),
        "a space before the colon": (b"Content-Length: %d\r\nTransfer-Encoding : chunked" % len(body), body + second),
        "a list of lengths": (b"Content-Length: %d, %d" % (len(body), len(body) + len(second)), body + second),
        "a length with a sign": (b"Content-Length: +%d" % len(body), body + second),
    }  # fmt: skip
    complaints = []
    for name, (headers, rest) in shapes.items():
        answer = _answer_to(target, _JSON + headers + b"\r\n\r\n" + rest)
        if (count := answer.count(b"HTTP/1.1 ")) > 1 and b'"owned_by"' in answer:
            complaints.append(f"{name}: {count} answers, the second to the request inside the first")
    return complaints


def cross_origin(target: Target) -> list[str]:
    """What a page of another site may post from a browser without being asked: text and forms, and bodies of no kind."""
    body = written({"model": target.model, "prompt": "a", "max_tokens": 1})
    kinds = (b"text/plain", b"application/x-www-form-urlencoded", b"multipart/form-data; boundary=x", b"")
    complaints = []
    for kind in kinds:
        headers = b"Origin: http://evil.example\r\nContent-Type: %s\r\n" % kind
        answer = exchange(target.http_port, HttpAttack("cross origin", post("/v1/completions", body, headers)))
        if answer not in {"400", "403", "415"}:
            complaints.append(f"a post of another site as {kind!r} was answered {answer}")
    return complaints


def parallel(target: Target) -> list[str]:
    """2,000 ordinary requests at once: each is answered, or told to come later."""
    body = written({"model": target.model, "prompt": "a", "max_tokens": 2, "temperature": 0})
    attack = HttpAttack("one of 2,000", post("/v1/completions", body))
    with ThreadPoolExecutor(_PARALLEL) as threads:
        answers = Counter(threads.map(lambda _: exchange(target.http_port, attack, seconds=90), range(_PARALLEL)))
    odd = {answer: count for answer, count in answers.items() if answer not in {"200", "429", "refused", "503"}}
    complaints = [f"of {_PARALLEL} requests at once {count} ended as {answer!r}" for answer, count in odd.items()]
    if answers["200"] < 100:
        complaints.append(f"of {_PARALLEL} requests at once only {answers['200']} were answered: {dict(answers)}")
    return complaints + await_quiet(target)


def aborts(target: Target) -> list[str]:
    """Streams of many long answers whose clients go away at once: nothing of them runs on."""
    body = {"model": target.model, "prompt": "a", "max_tokens": 400, "n": 4, "stream": True, "ignore_eos": True}
    data = post("/v1/completions", written(body))
    for _ in range(_STORM):
        with socket.create_connection((HOST, target.http_port), timeout=10) as connection:
            connection.sendall(data)
    complaints = await_quiet(target)
    usage = _settled(target)
    return complaints + ([f"KV in use stays at {usage:.0%} after aborts"] if usage > 0.5 else [])


def refusals_then_service(target: Target) -> list[str]:
    """What a client gets right after all of it: the gateway says that it is well, and it is."""
    status, body = get(target.http_port, "/health")
    if status != "200":
        return [f"/health says {status} {body!r}"]
    got = text(target.http_port, target.model, "def read(", 4)
    return [f"/health says 200, a request gets {got!r}"] if got.startswith(("4", "5", "no answer")) else []


PROBES: dict[str, Callable[[Target], list[str]]] = {
    "numbers": numbers_without_bound,
    "embedding": beyond_the_embedding,
    "tool-choice": tool_choice,
    "temperature": hardly_warm,
    "smuggling": smuggling,
    "cross-origin": cross_origin,
    "arrays": arrays,
    "many-names": many_names,
    "tiny-chunks": tiny_chunks,
    "long-names": long_names,
    "many-prompts": many_prompts,
    "long-texts": long_texts,
    "deep": deep,
    "parallel": parallel,
    "aborts": aborts,
    "service": refusals_then_service,
}


def _all_refused(target: Target, bodies: Sequence[dict[str, Any]], also: Sequence[str] = ()) -> list[str]:
    basic = {"model": target.model, "prompt": "a", "max_tokens": 2}
    return [complaint for body in bodies for complaint in _refused(target, {**basic, **body}, also=also)]


def _refused(
    target: Target, body: dict[str, Any], path: str = "/v1/completions", also: Sequence[str] = ()
) -> list[str]:
    shown = str({name: value for name, value in body.items() if name != "model"})[:120]
    data = written(body)
    started = time.monotonic()
    try:
        status, answer = ask(target.http_port, data, path, seconds=20)
    except OSError as error:
        return [f"{shown}: no answer: {error}"]
    took = time.monotonic() - started
    if status == "closed" and len(data) > _ALWAYS_READ_BYTES:  # its refusal is lost with what was on the way
        return []
    complaints = [] if status in {"400", "413", "422", *also} else [f"{shown}: {status}, not 400: {answer[:120]!r}"]
    return complaints + ([f"{shown}: refused only after {took:.1f} s"] if took > 2 else [])


def _told(outcome: Outcome) -> list[str]:
    """Every one of them had to be refused."""
    wrong = {answer: count for answer, count in outcome.answers.items() if answer not in {"400", "413", "422"}}
    complaints = [
        f"{count} of {outcome.attacks} ended as {answer!r}, not as 400 or 413" for answer, count in wrong.items()
    ]
    return outcome.complaints + complaints


def _answer_to(target: Target, data: bytes) -> bytes:
    with socket.create_connection((HOST, target.http_port), timeout=5) as connection:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        answer = bytearray()
        try:
            while piece := connection.recv(65536):
                answer += piece
        except OSError:
            pass
    return bytes(answer)


def _settled(target: Target, seconds: float = 5.0) -> float:
    """The smallest share of KV in use that is seen within some seconds."""
    least = 1.0
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        least = min(least, gauge(target.http_port, "vllm:kv_cache_usage_perc"))
        time.sleep(0.2)
    return least


def _path(body: bytes) -> str:
    return "/v1/chat/completions" if b'"messages"' in body else "/v1/completions"
