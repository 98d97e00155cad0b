"""The kopf shell: starts the controller and its watches, and answers probes. Thin on purpose: no decision is made here.

Only `on.event` handlers: kopf's create, update and delete handlers, timers and daemons would put finalizers and annotations on
objects, and a deletion would hang when no operator runs. kopf runs standalone; a lease of our own picks the active operator.
"""

import asyncio
import logging
import os
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import kopf
import prometheus_client
from pythonjsonlogger.core import RESERVED_ATTRS
from pythonjsonlogger.json import JsonFormatter

from strata_operator.act import metrics
from strata_operator.act.controller import Controller, ControllerOptions
from strata_operator.act.lease import Leadership, LeaseName
from strata_operator.act.plan_process import PlanLimits
from strata_operator.api import GROUP, PLURAL, VERSION
from strata_operator.api.load import read_text
from strata_operator.api.tenants import TenantRules
from strata_operator.observe.inventory import InventoryOptions
from strata_operator.observe.kube import configured, connect
from strata_operator.observe.streams import HttpStreams
from strata_operator.observe.watches import Watches


@dataclass(frozen=True, slots=True)
class OperatorOptions:
    """The flags of `strata operator`."""

    namespaces: tuple[str, ...]
    runtime_image: str
    health_port: int
    metrics_port: int
    lease_namespace: str
    lease_name: str
    inventory_file: Path | None = None
    limits: PlanLimits = field(default_factory=PlanLimits)
    tenants: TenantRules = field(default_factory=TenantRules)


def run(options: OperatorOptions) -> None:
    """Until a signal. Raises NotReadyError without a Kubernetes to connect to, InvalidInputError for a wrong file."""
    _log()
    inventory = _inventory(options.inventory_file)
    if options.metrics_port:
        prometheus_client.start_http_server(options.metrics_port)
    registry = kopf.OperatorRegistry()
    _register(registry, options, inventory)
    health = f"http://0.0.0.0:{options.health_port}/healthz" if options.health_port else None
    kopf.run(
        registry=registry,
        standalone=True,
        clusterwide=not options.namespaces,
        namespaces=options.namespaces,
        liveness_endpoint=health,
    )


def _register(registry: kopf.OperatorRegistry, options: OperatorOptions, inventory: InventoryOptions) -> None:
    """kopf follows LLMDeployments alone, of which there are few: all that decisions rest on is in the controller's own stock."""
    running = _Running(options, inventory)
    kopf.on.login(registry=registry)(kopf.login_via_client)  # as `connect` does; a bare registry knows no way in
    kopf.on.startup(registry=registry)(running.start)
    kopf.on.cleanup(registry=registry)(running.stop)
    kopf.on.event(GROUP, VERSION, PLURAL, registry=registry)(running.wake)


class _Running:
    """The controller and its lease, as long as kopf runs."""

    def __init__(self, options: OperatorOptions, inventory: InventoryOptions) -> None:
        self._options = options
        self._inventory = inventory
        self._tasks: list[asyncio.Task[None]] = []
        self._controller: Controller | None = None

    async def start(self, settings: kopf.OperatorSettings, **_: Any) -> None:
        settings.posting.enabled = False  # events on objects are ours to write
        settings.watching.server_timeout = 300
        options = self._options
        kube = connect()
        name = LeaseName(options.lease_namespace, options.lease_name)
        me = os.environ.get("POD_NAME") or f"{socket.gethostname()}-{os.getpid()}"
        leadership = Leadership(kube, name, me, self._turned)
        metrics.LEADING.set_function(lambda: float(leadership.leading))
        settings_of_controller = ControllerOptions(
            namespaces=options.namespaces,
            runtime_image=options.runtime_image,
            operator_namespace=options.lease_namespace,
            inventory=self._inventory,
            limits=options.limits,
            tenants=options.tenants,
        )
        source = Watches(kube.behind(leadership), HttpStreams(configured()), options.namespaces, self._turned)
        self._controller = Controller(
            kube.behind(leadership), settings_of_controller, lambda: leadership.leading, source=source
        )
        self._tasks = [asyncio.create_task(leadership.keep()), asyncio.create_task(self._controller.run())]

    async def stop(self, **_: Any) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def wake(self, **_: Any) -> None:
        if self._controller is not None:
            self._controller.wake()

    def _turned(self) -> None:
        if self._controller is not None:
            self._controller.wake()


def _inventory(file: Path | None) -> InventoryOptions:
    return InventoryOptions.from_yaml(read_text(file), str(file)) if file else InventoryOptions()


def _log() -> None:
    """kopf speaks up at every watch event and every probe of the kubelet: only its warnings are kept."""
    handler = logging.StreamHandler()
    if os.environ.get("STRATA_LOG_FORMAT") == "json":
        reserved = [*RESERVED_ATTRS, "settings"]  # kopf's, on its records: not for JSON
        handler.setFormatter(JsonFormatter("%(asctime)s %(levelname)s %(name)s %(message)s", reserved_attrs=reserved))
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    level = os.environ.get("STRATA_LOG_LEVEL", "INFO").upper()
    logging.basicConfig(level=level, handlers=[handler], force=True)
    for talkative in ("kopf.objects", "kopf.activities", "aiohttp.access"):
        logging.getLogger(talkative).setLevel(logging.WARNING)
