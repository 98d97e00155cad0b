"""A pod says nothing to a slot that the slot does not read; local processes are held to it by `fake_processes`."""

import pytest

from strata_operator.render.names import CONTROL_PORT
from strata_runtime.pipeline import slot as entry
from strata_runtime.pipeline.slot import parse
from tests.operator.builders import a_deployment
from tests.operator.render.test_releases import stored
from tests.operator.render.test_render import CPU_SLOT, slot_pod


@pytest.fixture(autouse=True)
def _secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRATA_CONTROL_KEY", "secret")


def test_a_pods_command_is_what_a_slot_reads() -> None:
    command = slot_pod(a_deployment().build(), CPU_SLOT)["containers"][0]["command"]
    assert command[:3] == ["python", "-m", entry.__name__]
    options = parse(command[3:])
    assert (options.name, options.control_port, options.threads) == (CPU_SLOT.name, CONTROL_PORT, 2)


def test_an_image_of_0_1_0_has_what_its_pods_are_started_by() -> None:
    """A deployment keeps its image when the operator is upgraded; a pod that comes back gets the new operator's command."""
    template = stored("statefulset-chat-a-cpu")["spec"]["template"]
    old = template["spec"]["containers"][0]["command"]
    new = slot_pod(a_deployment().build(), CPU_SLOT)["containers"][0]["command"]
    assert new[:3] == old[:3]
    assert {word for word in new if word.startswith("--")} <= set(old)


@pytest.mark.parametrize("flag", ["--data-port", "--request-port"])
def test_what_each_prepare_tells_is_no_flag(flag: str) -> None:
    with pytest.raises(SystemExit):
        parse(["--name", "a", "--control-port", "7070", flag, "7071"])
