"""The testbed's command line: `up`, `down`, `run`, `status`. Runs outside the world; only `_bring_up` runs inside."""

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable

from tests.cluster.testbed.cluster import Cluster, bring_up
from tests.cluster.testbed.nodes import DEFAULT_NODES
from tests.cluster.testbed.processes import TestbedError
from tests.cluster.testbed.tools import ToolError, missing, tool_path
from tests.cluster.testbed.world import CHECKOUT, World, WorldError, fresh


def main() -> int:
    """Run one verb; its exit status."""
    arguments = _parser().parse_args()
    # End by way of `finally` blocks on SIGTERM too: they take the world down.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    world = World(arguments.name)
    try:
        return _VERBS[arguments.verb](world, arguments)
    except (TestbedError, ToolError, WorldError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def up(world: World, arguments: argparse.Namespace) -> int:
    """Bring a cluster up and leave it running."""
    if world.first_process is not None:
        print(f"the testbed {world.name!r} is up already; end it with: python -m tests.cluster.testbed down")
        return 1
    _check_tools()
    world.create(bound=False)
    status = _fill(world, arguments)
    if status != 0:
        world.destroy()
        return status
    print("use it:  python -m tests.cluster.testbed run bash\nend it:  python -m tests.cluster.testbed down")
    return 0


def down(world: World, _: argparse.Namespace) -> int:
    """End the cluster; nothing happens where there is none."""
    world.destroy()
    return 0


def run(world: World, arguments: argparse.Namespace) -> int:
    """Run a command in the cluster that is up, else in a fresh one that ends with the command; its exit status."""
    command = arguments.command or [os.environ.get("SHELL", "/bin/sh")]
    if world.first_process is not None:
        return world.enter(command, _environment(world))
    _check_tools()
    with fresh(world):
        return _fill(world, arguments) or world.enter(command, _environment(world))


def status(world: World, _: argparse.Namespace) -> int:
    """Show the nodes, or that there is no cluster."""
    return world.enter(["kubectl", "get", "nodes", "-o", "wide"], _environment(world))


def _bring_up(world: World, arguments: argparse.Namespace) -> int:
    """What `up` and `run` run inside the new world."""
    began = time.monotonic()
    if arguments.nodes > len(DEFAULT_NODES):
        raise TestbedError(f"--nodes is {arguments.nodes}; at most {len(DEFAULT_NODES)}, more with Cluster.add_nodes")
    cluster = bring_up(world.directory, DEFAULT_NODES[: arguments.nodes], arguments.node_grace_seconds)
    print(f"cluster with {len(cluster.nodes())} nodes ready in {time.monotonic() - began:.1f} s", flush=True)
    return 0


_VERBS: dict[str, Callable[[World, argparse.Namespace], int]] = {
    "up": up,
    "down": down,
    "run": run,
    "status": status,
    "_bring_up": _bring_up,
}


def _fill(world: World, arguments: argparse.Namespace) -> int:
    options = [f"--nodes={arguments.nodes}", f"--node-grace-seconds={arguments.node_grace_seconds}"]
    module = [sys.executable, "-m", "tests.cluster.testbed"]
    return world.enter([*module, f"--name={world.name}", "_bring_up", *options], {"PYTHONPATH": str(CHECKOUT)})


def _check_tools() -> None:
    if todo := missing():
        names = ", ".join(tool.name for tool in todo)
        raise ToolError(f"{names} not built yet: run scripts/build-cluster-tools (10 to 30 minutes, once)")


def _environment(world: World) -> dict[str, str]:
    """A user's environment: kubectl and helm at their usual names, speaking to this cluster."""
    folders = {str(tool_path(tool).parent) for tool in ("kubectl", "helm")}
    path = os.pathsep.join([*sorted(folders), os.environ.get("PATH", "")])
    return {"KUBECONFIG": str(Cluster(world.directory).kubeconfig), "PATH": path}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.cluster.testbed", description="A real Kubernetes for tests.")
    parser.add_argument("--name", default="testbed", help="which testbed; several may be up at once")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="up|down|run|status")
    for name in ("up", "run", "_bring_up"):
        child = verbs.add_parser(name, help=_VERBS[name].__doc__)
        child.add_argument("--nodes", type=int, default=len(DEFAULT_NODES), help="real nodes, 0 for fleets only")
        child.add_argument("--node-grace-seconds", type=int, default=8, help="silence after which a node is lost")
        if name == "run":
            child.add_argument("command", nargs=argparse.REMAINDER, help="a command and its arguments, else a shell")
    for name in ("down", "status"):
        verbs.add_parser(name, help=_VERBS[name].__doc__)
    return parser


if __name__ == "__main__":
    sys.exit(main())
