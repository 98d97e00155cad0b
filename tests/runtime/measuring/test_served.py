"""What a token takes the gateway: measured with a gateway's own process, or said why not."""

import sys

import pytest

from strata_runtime.errors import InputError
from strata_runtime.measuring import served

pytestmark = pytest.mark.slow  # seconds, for the processes that start


def test_a_token_takes_the_gateway_some_microseconds() -> None:
    assert 1e-5 < served.token_seconds("bfloat16") < 1e-2


@pytest.mark.parametrize("code", ["", "import time; time.sleep(60)"], ids=["ends", "says nothing"])
def test_a_gateway_that_does_not_start_is_said(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    monkeypatch.setattr(served, "GATEWAY", (sys.executable, "-c", code))
    monkeypatch.setattr(served, "START_SECONDS", 0.3)
    with pytest.raises(InputError, match="did not start"):
        served.token_seconds("bfloat16")
