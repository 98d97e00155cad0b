"""Who starts a slot says nothing that the slot does not read: pods and local processes, against the slot's own parser."""

from pathlib import Path

import pytest

from strata_operator.local.services import SlotService
from strata_operator.render.names import CONTROL_PORT
from strata_runtime.slot.slot import parse
from tests.operator.builders import a_deployment
from tests.operator.test_render import CPU_SLOT, slot_pod


@pytest.fixture(autouse=True)
def _secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRATA_CONTROL_KEY", "secret")


def test_a_pods_command_is_what_a_slot_reads() -> None:
    command = slot_pod(a_deployment().build(), CPU_SLOT)["containers"][0]["command"]
    assert command[:3] == ["python", "-m", parse.__module__]
    options = parse(command[3:])
    assert (options.name, options.control_port, options.threads) == (CPU_SLOT.name, CONTROL_PORT, 2)


def test_a_local_processs_arguments_are_what_a_slot_reads(tmp_path: Path) -> None:
    service = SlotService("tiny-a", parse.__module__, tmp_path, "secret", roles=2, threads=3)
    service._control_port = 7000
    service._choose_ports()
    options = parse(service._arguments())
    assert (options.name, options.host, options.threads) == ("tiny-a", "127.0.0.1", 3)
    assert options.control_port == 7000


@pytest.mark.parametrize("flag", ["--data-port", "--request-port"])
def test_what_each_prepare_tells_is_no_flag(flag: str) -> None:
    with pytest.raises(SystemExit):
        parse(["--name", "a", "--control-port", "7070", flag, "7071"])
