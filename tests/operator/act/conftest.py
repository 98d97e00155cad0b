"""A small model, and an API server with two deployments of it, unless a test's file has its own."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.operator.act.test_controller import (
    LLMDS,
    a_deployment,
    a_node,
)
from tests.operator.commands.test_cli import CONFIG
from tests.operator.fake_api import FakeApi, serving


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(CONFIG)
    return tmp_path


@pytest.fixture
def api(model: Path) -> Iterator[FakeApi]:
    """Two nodes that are CPU devices, two deployments of a small model, one node each."""
    fake = FakeApi()
    for name in ("a", "b"):
        fake.put(f"/api/v1/nodes/{name}", a_node(name))
    for name, other in (("chat", "b"), ("odd", "a")):
        fake.put(f"{LLMDS}/{name}", a_deployment(name, model, placement={"exclude": [other]}))
    with serving(fake):
        yield fake
