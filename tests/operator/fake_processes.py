"""Processes that speak the control messages and nothing else: what a local deployment starts in tests, without torch.

`python -m`-like modules for the launcher: `fake_slot_process` and `fake_gateway_process` hold the `main` of each.
"""

import argparse
import os
import threading
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import zmq

from strata_planner.contract.control import Watch, encode
from strata_planner.contract.keys import curve_secret_key


def serve(address: str, decoder: Any, handle: Callable[[Any], Any], settle: Callable[[], Any | None]) -> None:
    """Answer control messages for ever; `settle` is called when idle and returns a status that watchers must see."""
    context = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    socket.curve_server = True
    socket.curve_secretkey = curve_secret_key(os.environ["STRATA_CONTROL_KEY"], "server")
    socket.bind(f"tcp://{address}")
    watchers = set()
    while True:
        if socket.poll(20):
            identity, payload = socket.recv_multipart()
            request = decoder.decode(payload)
            if isinstance(request, Watch):
                watchers.add(identity)
            socket.send_multipart([identity, encode(handle(request))])
        elif (status := settle()) is not None:
            for identity in watchers:
                socket.send_multipart([identity, encode(status)])


def serve_http(port: int) -> None:
    """200 to every GET, in a thread of its own."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None: ...

    threading.Thread(target=HTTPServer(("127.0.0.1", port), Handler).serve_forever, daemon=True).start()


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", default="127.0.0.1")
    for name in ("--name", "--control-host", "--model-uri", "--served-model-name", "--api-keys-file"):
        parser.add_argument(name)
    for name in ("--port", "--control-port", "--threads"):
        parser.add_argument(name, type=int)
    return parser.parse_args(arguments)
