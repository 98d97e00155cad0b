"""The gateway's process: `python -m strata_runtime.gateway --help`.

Started by the operator's Deployment or by `strata up`. Opens its ports first, so that a port in use is told at once, then
reads the tokenizer, then serves until SIGTERM or SIGINT. Exit codes: 0 asked to end, 2 could not start.
"""

import asyncio
import contextlib
import logging
import math
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import replace

from strata_planner.contract.keys import journal_secret, position_secret
from strata_runtime.collector import freeze_imports
from strata_runtime.errors import InputError
from strata_runtime.gateway.control import ControlServer
from strata_runtime.gateway.errors import StartError
from strata_runtime.gateway.http.api_keys import read_api_keys
from strata_runtime.gateway.http.app import Gateway, create_app
from strata_runtime.gateway.http.connections import WAITING_CLIENTS, BoundedServer, server_config
from strata_runtime.gateway.keeping.keeper import Keeper
from strata_runtime.gateway.keeping.twins import TwinLinks
from strata_runtime.gateway.metrics import Metrics
from strata_runtime.gateway.routing.dispatcher import Dispatcher
from strata_runtime.gateway.settings import Limits, Settings, read_settings
from strata_runtime.gateway.standing.carrying import OrderCarrier
from strata_runtime.gateway.text.tokenizer import Tokenizer, load_tokenizer
from strata_runtime.gateway.trials import GrammarTrials
from strata_runtime.loading.uri import resolve_model
from strata_runtime.logs import set_up_logs
from strata_runtime.stopwatch import Stopwatch
from strata_runtime.wire.transport import Keys, take_all_files

log = logging.getLogger(__name__)


def main(arguments: Sequence[str] | None = None) -> int:
    set_up_logs()
    try:
        asyncio.run(serve(read_settings(arguments)))
    except InputError as error:
        print(f"strata-gateway: {error}", file=sys.stderr)  # noqa: T201  the log may go elsewhere
        return 2
    return 0


async def serve(settings: Settings) -> None:
    """Run until a signal. Raises InputError when it cannot start."""
    asked_to_end = _hear_signals()
    api_keys = read_api_keys(settings.api_keys_file)
    listener = _listen(settings.host, settings.port)
    limits = within_files(settings.limits, take_all_files())
    metrics = Metrics(settings.served_model_name)
    dispatcher = Dispatcher(limits, metrics)
    async with contextlib.AsyncExitStack() as held:
        held.push_async_callback(dispatcher.close)
        orders = OrderCarrier(dispatcher, metrics.order_done)
        held.push_async_callback(orders.close)
        control = ControlServer(dispatcher, settings.control_host, settings.control_port, settings.control_key, orders)
        held.push_async_callback(control.close)
        held.callback(listener.close)
        keeper = Keeper(dispatcher, limits, position_secret(settings.control_key).encode())
        held.push_async_callback(keeper.close)
        if settings.journal_port is not None:
            held.push_async_callback(_twins(settings, settings.journal_port, keeper, dispatcher).close)
        watch = Stopwatch()
        with watch.during("tokenizer"):
            tokenizer = await asyncio.to_thread(_load_tokenizer, settings.model_uri)
        watch.tell(log)
        trials = GrammarTrials(tokenizer)
        held.push_async_callback(trials.close)
        name = settings.served_model_name
        gateway = Gateway(name, tokenizer, dispatcher, metrics, api_keys, limits, trials, settings.pages, keeper)
        host, port = listener.getsockname()[:2]
        log.info("gateway of %s: http://%s:%d, control port %d", settings.served_model_name, host, port, control.port)
        await _serve_http(gateway, listener, control, asked_to_end)


async def _serve_http(
    gateway: Gateway, listener: socket.socket, control: ControlServer, asked_to_end: asyncio.Event
) -> None:
    """A control port that fails ends the process too: without it no epoch after this one would be heard of."""
    freeze_imports()
    config = server_config(create_app(gateway), gateway.limits)
    config.timeout_graceful_shutdown = math.ceil(gateway.limits.drain_seconds) + 1
    server = BoundedServer(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    ending = asyncio.create_task(asked_to_end.wait())
    failing = asyncio.create_task(control.failed())
    await asyncio.wait({serving, ending, failing}, return_when=asyncio.FIRST_COMPLETED)
    ending.cancel()
    log.info("gateway ends: no new requests, running ones have %g s", gateway.limits.drain_seconds)
    server.should_exit = True
    await gateway.dispatcher.drain()
    await serving
    if failing.done():
        await failing
    failing.cancel()


def _twins(settings: Settings, port: int, keeper: Keeper, dispatcher: Dispatcher) -> TwinLinks:
    """It listens to the other gateways, and tells them all that it keeps."""
    keys = Keys.of(journal_secret(settings.control_key))
    twins = TwinLinks(dispatcher.incarnation, settings.control_host, port, keys, keeper.hear, keeper.kept)
    keeper.twins = twins
    twins.follow(settings.peers)
    return twins


def _hear_signals() -> asyncio.Event:
    asked_to_end = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, asked_to_end.set)
    return asked_to_end


def within_files(limits: Limits, files: int) -> Limits:
    """Every connection is a file, and half of all files are for others: leaders, the controller, strangers at its port."""
    if limits.max_connections <= files // 2:
        return limits
    log.warning(
        "--max-connections %d: this process may open %d files, so it takes %d; raise the limit (ulimit -Hn)",
        limits.max_connections, files, files // 2,
    )  # fmt: skip
    return replace(limits, max_connections=files // 2)


def _load_tokenizer(model_uri: str) -> Tokenizer:
    return load_tokenizer(resolve_model(model_uri))


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(WAITING_CLIENTS)  # early clients wait for the tokenizer, and the port is taken for all to see
    except OSError as error:
        listener.close()
        raise StartError(
            f"--port {port}: cannot listen at {host}:{port}: {error.strerror or error}; "
            "choose a free port or end the process that has it"
        ) from error
    listener.set_inheritable(True)
    return listener


if __name__ == "__main__":
    sys.exit(main())
