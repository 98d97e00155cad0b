"""Plans of mixtures of experts: what fits because experts are stored in few bits."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from strata_planner.answer.alternatives import with_alternatives
from strata_planner.contract.plan import Plan
from strata_planner.costs.latency import Latencies
from strata_planner.errors import InfeasibleError
from strata_planner.question.cluster import Cluster
from strata_planner.question.model import Model
from strata_planner.question.request import PlanRequest
from strata_planner.question.workload import Workload
from strata_planner.search.planning import make_plan
from strata_planner.simulate import fleet, of_clients, simulate
from tests.laws import swept
from tests.planner.builders import a_request

EXAMPLES = Path("examples")
CONFIG: dict[str, Any] = json.loads((EXAMPLES / "models/qwen3-235b-a22b-fp8/config.json").read_text(encoding="utf-8"))
CLUSTER = (EXAMPLES / "clusters/h100-4.yaml").read_text(encoding="utf-8")
PLAIN = {key: value for key, value in CONFIG.items() if key != "quantization_config"}


def planned(config: dict[str, Any], devices: int, **wishes: Any) -> Plan:
    return make_plan(asked(config, devices, **wishes)).plan


def asked(config: dict[str, Any], devices: int, **wishes: Any) -> PlanRequest:
    return PlanRequest(
        deployment="qwen3",
        model_uri="file:///models/qwen3-235b-a22b-fp8",
        model=Model.from_config(config),
        cluster=Cluster.from_yaml(CLUSTER.replace("count: 4", f"count: {devices}")),
        workload=Workload(prompt_tokens=1024, output_tokens=256, concurrency=16),
        max_model_len=4096,
        **wishes,
    )


def test_the_example_has_the_published_number_of_parameters() -> None:
    assert round(Model.from_config(CONFIG).parameters / 1e9) == 235


def test_a_checkpoint_in_float8_of_235_billion_parameters_fits_four_h100() -> None:
    plan = planned(CONFIG, 4)
    usable = {each.name: each.usable_bytes for each in Cluster.from_yaml(CLUSTER).accelerators()}
    assert {name for stage in plan.stages for name in stage.format} >= {"fp8_block"}
    assert all(stage.memory.total_bytes <= usable[stage.devices[0].type] for stage in plan.stages)
    assert sum(len(stage.bits) for stage in plan.stages) == 94


@pytest.mark.parametrize("case", swept([((4,), 2), ((4, 8), 3), ((8,), 4)], [((4, 8), 3)]), ids=str)
def test_experts_that_are_rounded_while_they_load_fit_as_many(case: tuple[tuple[int, ...], int]) -> None:
    bits, devices = case
    plan = planned(PLAIN, devices, allowed_bits=bits)
    assert {each for stage in plan.stages for each in stage.bits} <= set(bits)


@pytest.mark.parametrize("clients", [4, 32])
def test_few_tokens_of_a_prompt_read_most_experts_so_that_steps_carry_more_and_plans_tell_what_comes(
    clients: int,
) -> None:
    load = Workload(prompt_tokens=2048, output_tokens=64, concurrency=clients)
    request = replace(asked(CONFIG, 4), workload=load)
    plan = make_plan(request).plan
    (replica,) = plan.replicas
    assert 256 < replica.micro_batch.least_prompt_tokens < replica.micro_batch.max_step_tokens
    (model,) = fleet(plan, request.model, request.cluster, Latencies(request.latency_sources))
    trace = of_clients(clients, 64 + 2 * clients, 2048, 64, 1, model.limits.most_tokens)
    rate = simulate([model], trace, in_flight=clients).steady_tokens_per_second(clients)
    assert plan.prediction.tokens_per_second == pytest.approx(rate, rel=0.15)


def test_a_model_without_experts_carries_as_few_as_streams_bear() -> None:
    request = a_request(workload=Workload(prompt_tokens=32, output_tokens=16, concurrency=4))
    assert all(replica.micro_batch.least_prompt_tokens == 0 for replica in make_plan(request).plan.replicas)


@pytest.mark.slow
def test_no_alternative_says_16_bits_where_the_checkpoint_s_own_may_be_planned() -> None:
    request = asked(CONFIG, 4)
    plan = with_alternatives(request, make_plan(request)).plan
    assert {bits for stage in plan.stages for bits in stage.bits} == {8, 16}
    summaries = {each.summary for each in plan.alternatives}
    assert "8 bits everywhere" in summaries
    assert "16 bits everywhere" not in summaries


def test_what_still_does_not_fit_is_told() -> None:
    with pytest.raises(InfeasibleError, match=r"needs .* at 8 bits"):
        planned(PLAIN, 3, allowed_bits=(8, 16))
