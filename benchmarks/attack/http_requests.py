"""Fuzzed HTTP requests: request number N of a seed is always the same bytes. Pure; `http_send` sends them.

Six kinds: bodies of OpenAI's interface with hostile values, bytes of whole requests turned over, methods and paths, framing as
smugglers write it, floods of headers, and requests that stop in the middle.
"""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.attack.target import SENTINEL


@dataclass(frozen=True)
class HttpAttack:
    """Bytes to send. `whole`: they are a request whose end the server can see, so an answer or an end is due."""

    what: str
    data: bytes
    whole: bool = True


class Raw(str):
    """JSON text that is written as it is, well-formed or not."""

    __slots__ = ()


_DEEP = 3000
VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 128, 129, 1e-40, 1e-308, 5e-324, 0.5, 1.5, -0.0, 1e308, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64, -(2**63), -(2**64),
    Raw("NaN"), Raw("Infinity"), Raw("-Infinity"), Raw("1e999"), Raw("-1e999"), Raw("1" * 400), Raw("1" * 5000), Raw("0x10"), Raw("01"), Raw("1."), Raw("truE"), Raw(""), Raw("'a'"),
    "", " ", "\x00", "\ud800", "\udfff\ud800", "\ufeff", "\u202e", "a" * 5000, "é" * 300, "\U0001f600" * 200, "<|endoftext|>", "<|user|>" * 50, "{{ 7*7 }}", "{% for x in range(10**9) %}{% endfor %}",
    "auto", "none", "required", "json_object", "../../../etc/passwd", Raw('"\\ud800"'), Raw('"\\u0000"'), Raw('"\\x"'),
    [], {}, [[]], [{}], [None], [""], [0], [-1], [1.5], [True], ["a", 1], [1, "a"], [[1], ["a"]], [[1.5]], [[-1]], [2**64], [[2**64]], [4095], [4096], [4097], [2**31],
    ["a"] * 500, [1] * 2000, [-1] * 2000, [1.5] * 2000, [[1]] * 300, [[]] * 300, [None] * 1000, ["\n"] * 17, [{"a": []}] * 50,
    {"type": "text"}, {"type": "json_object"}, {"type": "json_schema", "json_schema": {}}, {"type": "function", "function": {"name": "f"}}, {"include_usage": True}, {"": None},
    Raw("[" * _DEEP + "]" * _DEEP), Raw('{"a":' * _DEEP + "1" + "}" * _DEEP), Raw("[" * _DEEP), Raw('"' + "\\u0041" * 1000 + '"'),
)  # fmt: skip

FIELDS = (
    "model", "prompt", "messages", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "n", "stop", "stop_token_ids", "ignore_eos", "seed", "stream",
    "stream_options", "echo", "logprobs", "top_logprobs", "tools", "tool_choice", "response_format", "logit_bias", "best_of", "min_p", "presence_penalty", "frequency_penalty",
    "user", "metadata", "suffix", "functions", "function_call", "parallel_tool_calls", "guided_json", "chat_template", "chat_template_kwargs", "prompt_logprobs", "__class__", "",
)  # fmt: skip
MESSAGES: tuple[Any, ...] = (
    {"role": "user", "content": "hi"}, {"role": "system", "content": SENTINEL}, {"role": "tool", "content": "x"}, {"role": "user"}, {"content": "x"}, {"role": 1, "content": "x"},
    {"role": "user", "content": [{"type": "text", "text": "x"}]}, {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]},
    {"role": "assistant", "content": None, "tool_calls": []}, {"role": "user", "content": "x", "name": "{{ x }}"}, {"role": "user", "content": [[]]}, [], None, "user",
)  # fmt: skip

METHODS = ("GET", "HEAD", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "PRI", "post", "G\x00T", "A" * 300)
PATHS = (
    "/", "/health", "/metrics", "/v1/models", "/v1/models/", "/v1/models/../../etc/passwd", "/v1/models/%2e%2e%2f%00", "/v1/models/" + "a" * 5000, "/v1/completions/", "/v1//completions",
    "//v1/completions", "/v1/completions?" + "a=b&" * 500, "/v1/completions#x", "/%ff%fe", "/v1/chat/completions;x", "*", "http://other.example/v1/completions", "/docs", "/openapi.json",
    "/v1/embeddings", "/\u00e9", "/a b", "",
)  # fmt: skip


def make(seed: int, number: int, model: str) -> HttpAttack:
    """Attack number `number` of this seed."""
    rng = random.Random(f"http/{seed}/{number}")
    kind = rng.choices(KINDS, weights=WEIGHTS)[0]
    return kind(rng, model)


def valid_body(rng: random.Random, model: str, *, chat: bool) -> dict[str, Any]:
    """A small request that would be answered."""
    body: dict[str, Any] = {"model": model, "max_tokens": rng.choice((1, 2, 4, 8)), "temperature": rng.choice((0, 1.0))}
    if chat:
        body["messages"] = [{"role": "user", "content": f"say {SENTINEL}"}]
    else:
        body["prompt"] = rng.choice((f"def {SENTINEL}", [1, 5, 9], ["a", SENTINEL], [[4, 5], [6]]))
    if rng.random() < 0.3:
        body["stream"] = True
    return body


def _body(rng: random.Random, model: str) -> HttpAttack:
    chat = rng.random() < 0.4
    body = valid_body(rng, model, chat=chat)
    changes = []
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        name = rng.choice((*body, *FIELDS))
        value = rng.choice(VALUES)
        if name == "messages" and rng.random() < 0.7:
            value = [rng.choice(MESSAGES) for _ in range(rng.choice((1, 2, 40)))]
        if rng.random() < 0.1 and name in body:
            del body[name]
        else:
            body[name] = value
        changes.append(name)
    data = written(body)
    if rng.random() < 0.03:
        data = rng.choice((written(rng.choice(VALUES)), data + b"x", data + data, b"\xef\xbb\xbf" + data, b""))
    if rng.random() < 0.03:
        data = data.replace(
            SENTINEL.encode(), rng.choice((b"\xff\xfe", b"\xc0\x80", b"\xed\xa0\x80", b"\xf5\x80\x80\x80"))
        )
    return HttpAttack(f"body with hostile {', '.join(changes)}", post(_path(chat=chat), data))


def _bytes(rng: random.Random, model: str) -> HttpAttack:
    chat = rng.random() < 0.5
    body = written(valid_body(rng, model, chat=chat))
    if rng.random() < 0.6:
        return HttpAttack("body with bytes turned over", post(_path(chat=chat), turned(rng, body)))
    return HttpAttack("request with bytes turned over", turned(rng, post(_path(chat=chat), body)), whole=False)


def _method(rng: random.Random, model: str) -> HttpAttack:
    body = written(valid_body(rng, model, chat=False)) if rng.random() < 0.3 else b""
    method, path = rng.choice(METHODS), rng.choice(PATHS)
    version = rng.choice(("HTTP/1.1", "HTTP/1.1", "HTTP/1.0", "HTTP/2.0", "HTTP/9", "HTP/1.1", ""))
    line = f"{method} {path} {version}\r\n".encode("utf-8", "surrogatepass")
    data = line + b"Host: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
    data += f"Content-Length: {len(body)}\r\n\r\n".encode() + body
    return HttpAttack(
        f"{method[:20]!r} {path[:40]!r} {version}", data, whole=version == "HTTP/1.1" and method in METHODS[:6]
    )


def _framing(rng: random.Random, model: str) -> HttpAttack:
    body = written(valid_body(rng, model, chat=False))
    size = len(body)
    second = b"GET /smuggled HTTP/1.1\r\nHost: x\r\n\r\n"
    shapes: tuple[tuple[str, bytes], ...] = (
        (f"Content-Length: {size}\r\nContent-Length: {size + 1}", body),
        (f"Content-Length: {size}\r\nTransfer-Encoding: chunked", b"0\r\n\r\n" + second),
        ("Transfer-Encoding: chunked\r\nContent-Length: 6", b"0\r\n\r\nX" + second),
        ("Transfer-Encoding: xchunked", body),
        ("Transfer-Encoding : chunked", b"0\r\n\r\n" + second),
        ("Transfer-Encoding:\tchunked", chunked(body)),
        ("Transfer-Encoding: chunked, identity", chunked(body)),
        ("Transfer-Encoding: chunked\r\nTransfer-Encoding: identity", chunked(body)),
        ("Transfer-Encoding: chunked", b"%x;%s\r\n" % (size, b"e" * 20_000) + body + b"\r\n0\r\n\r\n"),
        ("Transfer-Encoding: chunked", b"f" * 16 + b"\r\n" + body),
        ("Transfer-Encoding: chunked", b"f" * 40 + b"\r\n" + body),
        ("Transfer-Encoding: chunked", b"-1\r\n" + body + b"\r\n0\r\n\r\n"),
        ("Transfer-Encoding: chunked", b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"),
        ("Transfer-Encoding: chunked", chunked(body)[:-5] + b"0\r\n" + b"T: x\r\n" * 500 + b"\r\n"),
        ("Content-Length: -1", body),
        (f"Content-Length: +{size}", body),
        ("Content-Length: 1000000000000000000000000000000", body),
        ("Content-Length: 0x10", body),
        (f"Content-Length: {size}, {size}", body),
        (f"Content-Length: {size}\n", body),
        ("Content-Length: 0", body + second),
        (f" Content-Length: {size}", body),
        (f"X: a\r\n b\r\nContent-Length: {size}", body),
        (f"X: a\x00b\r\nContent-Length: {size}", body),
        (f"X: a\rb\r\nContent-Length: {size}", body),
        (f"Content-Length: {size}\r\nExpect: 100-continue", body),
        (f"Content-Length: {size}\r\nUpgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAMAAABkAAQ", body),
        (f"Content-Length: {size}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Key: x", body),
        (f"Content-Length: {size}\r\nContent-Encoding: gzip", body),
    )  # fmt: skip
    head, rest = rng.choice(shapes)
    data = (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n{head}\r\n\r\n".encode() + rest
    )
    return HttpAttack(f"framing {head[:60]!r}", data, whole=False)


def _headers(rng: random.Random, model: str) -> HttpAttack:
    body = written(valid_body(rng, model, chat=False))
    floods: tuple[tuple[str, bytes], ...] = (
        ("1,000 headers", b"".join(b"X-%d: y\r\n" % number for number in range(1000))),
        ("20,000 headers", b"X: y\r\n" * 20_000),
        ("a header of 100 kB", b"X: " + b"a" * 100_000 + b"\r\n"),
        ("a name of 100 kB", b"a" * 100_000 + b": x\r\n"),
        ("broken UTF-8", b"X-\xff\xfe: \xc0\x80\r\nAuthorization: Bearer \xff\xff\r\n"),
        ("50 Hosts", b"Host: y\r\n" * 50),
        ("odd authorization", b"Authorization: " + rng.choice((b"", b"Bearer", b"Bearer  ", b"Basic Og==", b"Bearer " + b"a" * 8000)) + b"\r\n"),
        ("odd content type", b"Content-Type: " + rng.choice((b"", b"text/plain; charset=utf-7", b"multipart/form-data; boundary=" + b"b" * 3000)) + b"\r\n"),
        ("no name", b": x\r\n"),
    )  # fmt: skip
    what, flood = rng.choice(floods)
    return HttpAttack(what, post("/v1/completions", body, flood), whole=False)


def _truncated(rng: random.Random, model: str) -> HttpAttack:
    data = post("/v1/completions", written(valid_body(rng, model, chat=False)))
    return HttpAttack("a request that stops", data[: rng.randrange(len(data))], whole=False)


KINDS: tuple[Callable[[random.Random, str], HttpAttack], ...] = (_body, _bytes, _method, _framing, _headers, _truncated)
WEIGHTS = (62, 14, 8, 10, 4, 2)


def post(path: str, body: bytes, headers: bytes = b"") -> bytes:
    """A whole request that asks for the connection's end after its answer."""
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n".encode()
    if b"content-type" not in headers.lower():
        head += b"Content-Type: application/json\r\n"
    return head + headers + b"\r\n" + body


def chunked(body: bytes) -> bytes:
    return b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)


def written(value: Any) -> bytes:
    """JSON that may be none: `Raw` as it is, surrogates as they are."""
    return _written(value).encode("utf-8", "surrogatepass")


def turned(rng: random.Random, data: bytes) -> bytes:
    """A few bytes changed, dropped, doubled or moved."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 2, 4, 16))):
        place = rng.randrange(len(out)) if out else 0
        match rng.randrange(4):
            case 0:
                out[place : place + 1] = bytes([rng.randrange(256)])
            case 1:
                del out[place : place + rng.choice((1, 8))]
            case 2:
                out[place:place] = rng.randbytes(rng.choice((1, 8)))
            case _:
                out[place:place] = out[place : place + rng.choice((1, 40))]
    return bytes(out)


def _written(value: Any) -> str:
    if isinstance(value, Raw):
        return str(value)
    if isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(name)}:{_written(each)}" for name, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(_written(each) for each in value) + "]"
    return json.dumps(value, ensure_ascii=False)


def _path(*, chat: bool) -> str:
    return "/v1/chat/completions" if chat else "/v1/completions"
