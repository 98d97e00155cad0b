"""The gateway's flags and environment, read once by `__main__` into one frozen value."""

import argparse
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from strata_planner.contract.origins import ORIGIN_PATTERN, ORIGIN_RULE
from strata_runtime.command_line import positive
from strata_runtime.gateway.errors import StartError

CONTROL_KEY_VARIABLE = "STRATA_CONTROL_KEY"


@dataclass(frozen=True, slots=True)
class Limits:
    """How much the gateway takes and how long it waits."""

    max_requests: int = 1024  # answers in the journal, held ones included; each of a request's n choices counts
    max_prompt_tokens: int = 2**22  # of their prompts together, each choice again: a leader keeps them as numbers
    max_body_bytes: int = 0  # 0: by what requests of the route's maxModelLen can use
    max_held_body_bytes: int = 2**28  # of all bodies that are being read; more get 503
    max_connections: int = 4096  # at the bound the longest idle one makes room for a new one
    header_seconds: float = 10.0  # how long the headers of a request may take, from the connection on
    body_seconds: float = 60.0  # how long its body may take
    write_seconds: float = 30.0  # how long a client may not read while there is something to write
    max_unread_events: int = 1024  # of each answer: a client that reads none of them for so long gets no more
    hold_seconds: float = 120.0  # how long a request waits for a leader
    drain_seconds: float = 2.0  # how long running requests may go on after SIGTERM
    resume_seconds: float = 30.0  # how long an answer under an Idempotency-Key goes on while nobody reads it
    keep_seconds: float = 120.0  # how long it is kept once it is complete
    max_kept_bytes: int = 2**26  # of all that are kept; the oldest go first

    def body_bytes(self, max_tokens: int) -> int:
        """The largest body that is read: 256 bytes for each token that prompt and answer may have, within bounds.

        A token takes some 9 bytes as a number and 4 to 12 as text; the rest is for bodies with many prompts.
        """
        return self.max_body_bytes or min(max(256 * max_tokens, 2**18), 2**24)

    def held_body_bytes(self, max_tokens: int) -> int:
        """What all bodies that are being read may hold together: at least one of the largest."""
        return max(self.max_held_body_bytes, self.body_bytes(max_tokens))


@dataclass(frozen=True, slots=True)
class Pages:
    """What web pages get."""

    allowed_origins: tuple[str, ...] = ()  # whose pages may ask and read the answers; `*`: all
    docs: bool = False  # /docs and /openapi.json


@dataclass(frozen=True, slots=True)
class Peer:
    """Where other gateways are reached: a name may stand for several."""

    host: str
    port: int


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything the process was started with."""

    host: str
    port: int
    control_host: str
    control_port: int
    control_key: str
    model_uri: str
    served_model_name: str
    api_keys_file: Path | None
    limits: Limits
    pages: Pages
    journal_port: int | None = None  # for other gateways
    peers: tuple[Peer, ...] = ()


_LIMITS = {  # what their flags say
    "max_requests": "running and waiting answers, more get 429",
    "max_prompt_tokens": "of the prompts of all running and waiting answers, more get 429 (default: 4 Mi)",
    "max_body_bytes": "the largest request body (default: 256 bytes per token of maxModelLen, 256 KiB to 16 MiB)",
    "max_held_body_bytes": "of all request bodies that are being read, more get 503 (default: 256 MiB)",
    "max_connections": "open HTTP connections, idle ones too",
    "header_seconds": "how long a request's headers may take",
    "body_seconds": "how long a request's body may take",
    "write_seconds": "how long a client may leave its answer unread",
    "max_unread_events": "tokens of an answer that may wait for its client to read, then it ends",
    "hold_seconds": "how long requests wait for a lost pipeline",
    "drain_seconds": "how long answers may go on after SIGTERM",
    "resume_seconds": "how long an answer under an Idempotency-Key goes on while nobody reads it",
    "keep_seconds": "how long it is kept once it is complete",
    "max_kept_bytes": "of all answers that are kept (default: 64 MiB)",
}


def read_settings(arguments: Sequence[str] | None, environment: Mapping[str, str] = os.environ) -> Settings:
    """Parse flags (exit code 2 with usage for malformed ones). Raises StartError for a missing secret."""
    flags = _parser().parse_args(arguments)
    control_key = environment.get(CONTROL_KEY_VARIABLE, "")
    if not control_key:
        raise StartError(f"{CONTROL_KEY_VARIABLE} is empty: set it to the secret that the controller uses")
    return Settings(
        host=flags.host,
        port=flags.port,
        control_host=flags.control_host,
        control_port=flags.control_port,
        control_key=control_key,
        model_uri=flags.model_uri,
        served_model_name=flags.served_model_name,
        api_keys_file=flags.api_keys_file,
        limits=Limits(**{limit.name: getattr(flags, limit.name) for limit in fields(Limits)}),
        pages=Pages(flags.allowed_origins, flags.docs),
        journal_port=flags.journal_port,
        peers=flags.peers,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="strata-gateway",
        description="OpenAI-compatible HTTP in front of a Strata pipeline. It answers 503 until a controller has sent "
        f"it a route over the control port, which is authenticated by the secret in ${CONTROL_KEY_VARIABLE}.",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address of the HTTP port (default: %(default)s)")
    parser.add_argument("--port", type=_port, default=8000, help="HTTP port, 0: any free one (default: %(default)s)")
    parser.add_argument(
        "--control-host", default="127.0.0.1", help="address of the control port (default: %(default)s)"
    )
    parser.add_argument("--control-port", type=_port, required=True, help="control port")
    parser.add_argument("--model-uri", required=True, help="model folder: file:///path, /path, pvc:// or hf://")
    parser.add_argument("--served-model-name", required=True, help="the model's name in requests and metrics")
    parser.add_argument("--api-keys-file", type=Path, help="one key per line; without it everyone may ask")
    _add_page_flags(parser)
    parser.add_argument(
        "--journal-port", type=_port, help="port at which other gateways tell what they keep (default: none do)"
    )
    parser.add_argument(
        "--peers",
        type=_peers,
        default=(),
        metavar="HOST:PORT,...",
        help="journal ports of the other gateways; a name is looked up every 2 s and may stand for all, this one too",
    )
    for limit in fields(Limits):
        parser.add_argument(
            f"--{limit.name.replace('_', '-')}",
            type=_seconds if limit.type is float else positive,
            default=limit.default,
            help=_LIMITS[limit.name],
        )
    return parser


def _add_page_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--allowed-origins",
        type=_origins,
        default=(),
        metavar="ORIGINS",
        help="comma-separated, like http://localhost:3000, or *: whose web pages may ask (default: none)",
    )
    parser.add_argument("--docs", action="store_true", help="serve /openapi.json, and /docs, a page that shows it")


def _seconds(text: str) -> float:
    number = float(text)
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is no time: use 0 or more seconds")
    return number


def _peers(text: str) -> tuple[Peer, ...]:
    peers = []
    for one in text.split(","):
        host, colon, port = one.strip().rpartition(":")
        if not host or not colon or not port.isdecimal():
            raise argparse.ArgumentTypeError(f"{one!r} is no address of gateways: use host:port")
        peers.append(Peer(host, _port(port)))
    return tuple(peers)


def _origins(text: str) -> tuple[str, ...]:
    origins = tuple(one.strip() for one in text.split(","))
    for one in origins:
        if not re.fullmatch(ORIGIN_PATTERN, one):
            raise argparse.ArgumentTypeError(f"{one!r} is no origin of a web page: {ORIGIN_RULE}")
    return origins


def _port(text: str) -> int:
    number = int(text)
    if not 0 <= number < 2**16:
        raise argparse.ArgumentTypeError(f"{number} is not a port: use 0 to 65535")
    return number
