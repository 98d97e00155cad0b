"""Runs this folder's tests inside a testbed: the one that is up, else a fresh one that ends with the session."""

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.cluster.operator_release import OperatorRelease
from tests.cluster.testbed.cluster import Cluster
from tests.cluster.testbed.world import CHECKOUT, ENVIRONMENT_VARIABLE
from tests.cluster.timings import TOLD, Steps

SESSION_SECONDS = (
    25 * 60
)  # three times what all tests take: where the cluster itself is broken, each would wait for its own limit


def pytest_cmdline_main(config: pytest.Config) -> int | None:
    """Start the session again inside a testbed when it was started outside of one."""
    if ENVIRONMENT_VARIABLE in os.environ or config.option.collectonly or config.option.help:
        return None
    limit = f"--session-timeout={SESSION_SECONDS}"  # first, so that another one may be asked for
    again = [sys.executable, "-m", "pytest", limit, *config.invocation_params.args]
    # The testbed ends with this process, however it ends, and with it all that the session has started.
    bound = ["setpriv", "--pdeathsig", "TERM", "--"]
    command = [*bound, sys.executable, "-m", "tests.cluster.testbed", "run", *again]
    return subprocess.run(command, env={**os.environ, "PYTHONPATH": str(CHECKOUT)}, check=False).returncode


@pytest.fixture(scope="session")
def cluster() -> Cluster:
    return Cluster.current()


@pytest.fixture(scope="session")
def operator(cluster: Cluster) -> Iterator[OperatorRelease]:
    """The operator, installed once for all tests that need it and removed with all that it serves."""
    release = OperatorRelease(cluster)
    release.add_node()
    steps = Steps("helm install")
    release.install()
    steps.mark("operator ready")
    yield release
    release.uninstall()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The time of each step, to be quoted."""
    for steps in TOLD:
        terminalreporter.write_line(str(steps))


@pytest.fixture
def namespace(cluster: Cluster) -> Iterator[str]:
    """A namespace for one test."""
    name = f"test-{secrets.token_hex(4)}"
    cluster.kubectl("create", "namespace", name)
    yield name
    cluster.kubectl("delete", "namespace", name, "--wait=false")
