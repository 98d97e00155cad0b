"""Links and collectives: alpha-beta, measured ones first, and what a link is busy with."""

import pytest

from strata_planner.costs.communication import (
    ALPHA_BETA,
    RING_SHARE,
    Exchange,
    hand_over_seconds,
    hidden_states_busy_seconds,
    hidden_states_bytes,
    hidden_states_seconds,
    layer_collectives,
    layer_collectives_seconds,
    ring_seconds,
)
from strata_planner.costs.roofline import Roofline
from strata_planner.costs.source import Timed
from strata_planner.question.catalogue import CPU
from strata_planner.question.cluster import LinkRate
from tests.planner.builders import a_model

LINK = LinkRate(gbps=8, latency_ms=1)


class Measured:
    """A source that measured pairs alone."""

    def all_reduce(self, device: str, degree: int, size_bytes: int) -> Timed | None:
        return Timed(1e-6 * size_bytes, f"NCCL on {device}") if degree == 2 else None


def test_a_link_is_busy_for_the_bytes_and_late_by_the_latency() -> None:
    busy = hidden_states_busy_seconds(a_model(), LINK, 1000, "bfloat16")
    assert busy == pytest.approx(256_000 / 1e9)
    assert hidden_states_seconds(a_model(), LINK, 1000, "bfloat16") == pytest.approx(0.001 + busy)


def test_measured_collectives_come_before_alpha_and_beta() -> None:
    found = layer_collectives((Roofline(), Measured()), Exchange("H100", 2, LINK, 1000))
    assert found == Timed(pytest.approx(2e-3), "NCCL on H100")


def test_alpha_and_beta_answer_what_was_not_measured() -> None:
    exchange = Exchange("H100", 4, LINK, 256_000)
    found = layer_collectives((Measured(),), exchange)
    assert found.source == ALPHA_BETA
    assert found.seconds == pytest.approx(2 * ring_seconds(exchange))
    assert found.seconds == pytest.approx(layer_collectives_seconds(a_model(), LINK, 4, 1000, "bfloat16"))


def test_a_ring_takes_twice_the_steps_of_its_other_devices() -> None:
    assert ring_seconds(Exchange("", 4, LINK, 4000)) == pytest.approx(6 * (0.001 + 1000 / (RING_SHARE * 1e9)))
    assert ring_seconds(Exchange("", 1, LINK, 4000)) == 0


def test_processors_add_up_over_their_memory_whatever_link_joins_them() -> None:
    """As two ranks were seen to, and longer the more there are and the more they have."""
    two = [layer_collectives((), Exchange(CPU, 2, LINK, size)).seconds / 2 for size in (4 << 10, 256 << 10)]
    assert two == pytest.approx([5e-6, 52e-6], rel=0.2)
    assert layer_collectives((), Exchange(CPU, 4, LINK, 256 << 10)).seconds / 2 > two[1]
    assert layer_collectives((), Exchange(CPU, 1, LINK, 4096)).seconds == 0


def test_a_step_is_handed_over_to_the_other_processors_of_a_group() -> None:
    size = hidden_states_bytes(a_model(), 100, "bfloat16")
    assert hand_over_seconds(CPU, 2, LINK, 0) == 0.001
    assert hand_over_seconds(CPU, 4, LINK, size) == pytest.approx(0.001 + 3 * size / LINK.bytes_per_second)
    assert hand_over_seconds(CPU, 1, LINK, size) == hand_over_seconds("H100", 4, LINK, size) == 0
