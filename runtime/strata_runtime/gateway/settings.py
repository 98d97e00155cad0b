"""The gateway's flags and environment, read once by `__main__` into one frozen value."""

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from strata_runtime.gateway.errors import StartError

CONTROL_KEY_VARIABLE = "STRATA_CONTROL_KEY"


@dataclass(frozen=True, slots=True)
class Limits:
    """How much the gateway takes and how long it waits."""

    max_requests: int = 1024  # answers in the journal, held ones included; each of a request's n choices counts
    max_body_bytes: int = 0  # 0: by what requests of the route's maxModelLen can use
    hold_seconds: float = 120.0  # how long a request waits for a leader
    drain_seconds: float = 2.0  # how long running requests may go on after SIGTERM

    def body_bytes(self, max_tokens: int) -> int:
        """The largest body that is read: 256 bytes for each token that prompt and answer may have, within bounds.

        A token takes some 9 bytes as a number and 4 to 12 as text; the rest is for bodies with many prompts.
        """
        return self.max_body_bytes or min(max(256 * max_tokens, 2**18), 2**24)


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
        limits=Limits(
            max_requests=flags.max_requests,
            max_body_bytes=flags.max_body_bytes,
            hold_seconds=flags.hold_seconds,
            drain_seconds=flags.drain_seconds,
        ),
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
    limits = Limits()
    parser.add_argument(
        "--max-requests", type=_positive, default=limits.max_requests, help="running and waiting answers, more get 429"
    )
    parser.add_argument(
        "--max-body-bytes",
        type=_positive,
        default=limits.max_body_bytes,
        help="the largest request body (default: 256 bytes per token of maxModelLen, 256 KiB to 16 MiB)",
    )
    parser.add_argument(
        "--hold-seconds", type=float, default=limits.hold_seconds, help="how long requests wait for a lost pipeline"
    )
    parser.add_argument(
        "--drain-seconds", type=float, default=limits.drain_seconds, help="how long answers may go on after SIGTERM"
    )
    return parser


def _port(text: str) -> int:
    number = int(text)
    if not 0 <= number < 2**16:
        raise argparse.ArgumentTypeError(f"{number} is not a port: use 0 to 65535")
    return number


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is too few: use 1 or more")
    return number
