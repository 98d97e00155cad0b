"""Models whose sequences keep state, through real slots: as many run as the plan says, and bytes are those that were planned."""

from pathlib import Path

import pytest
import torch
from msgspec import structs

from strata_planner.contract.plan import Plan, Speculation
from strata_planner.contract.roles import Role, roles_of
from strata_planner.costs.memory import layer_weights_bytes
from strata_planner.question.model import Model
from strata_planner.question.workload import Workload
from strata_planner.search.planning import make_plan
from strata_runtime.errors import InputError
from strata_runtime.formats import stored_bytes_of
from strata_runtime.loading.load import load_stage
from strata_runtime.slot.role_cache import cache_of
from strata_runtime.wire.client import greedy
from tests.laws import swept
from tests.planner.builders import a_cluster, a_request
from tests.runtime.architectures import make_tiny_model, unsliced
from tests.runtime.plans import even_plan
from tests.runtime.slot.harness import PipelineHarness

NAMES = swept(["qwen3_next", "lfm2", "qwen3_5_text"], ["lfm2"])
ANSWER = 12


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stateful")


def a_model(folders: Path, name: str) -> Path:
    folder = folders / name
    return folder if folder.exists() else make_tiny_model(folder, name)


@pytest.mark.parametrize("stages", swept([1, 3], [3]))
@pytest.mark.parametrize("name", NAMES)
def test_more_requests_than_states_in_too_few_blocks_have_their_own_text(folders: Path, name: str, stages: int) -> None:
    """Ten requests, of which four run at once, and now and then one is driven out and computed again."""
    model, slots = a_model(folders, name), [f"s{place}" for place in range(stages)]
    prompts = {f"r{number}": [3 + (number * place) % 90 for place in range(9 + 2 * number)] for number in range(10)}
    whole = unsliced(model)
    expected = {
        request: whole.generate(
            torch.tensor([prompt]), max_new_tokens=ANSWER, do_sample=False, pad_token_id=0, eos_token_id=None
        )[0, len(prompt) :].tolist()
        for request, prompt in prompts.items()
    }
    with PipelineHarness(slots) as pipeline:
        leader = pipeline.serve(even_plan(model, slots, pages=8))
        for turn in range(20):  # where requests come more slowly than they are answered, nobody is driven out
            asked = [greedy(f"{turn} {request}", prompt, ANSWER) for request, prompt in prompts.items()]
            assert leader.generate(asked) == {f"{turn} {request}": text for request, text in expected.items()}
            if leader.hello().preemptions > 0:
                break
        else:
            pytest.fail("nobody was ever driven out")


def planned(model: Path, read: Model, kv_bits: int) -> Plan:
    workload = Workload(prompt_tokens=32, output_tokens=16, concurrency=3)
    wishes = {"model_uri": str(model), "model": read, "workload": workload, "kv_bits": kv_bits, "min_stages": 3}
    return make_plan(a_request(a_cluster(32, 32, 32), compute_type="float32", allowed_bits=(8, 16), **wishes)).plan


@pytest.mark.parametrize("kv_bits", swept([16, 8], [8]))
@pytest.mark.parametrize("name", NAMES)
def test_a_stage_holds_the_bytes_that_its_plan_counts(folders: Path, name: str, kv_bits: int) -> None:
    model = a_model(folders, name)
    read = Model.from_folder(model)
    plan = planned(model, read, kv_bits)
    for stage in plan.stages:
        (role,) = roles_of(plan)[stage.slot]
        loaded = load_stage(role, model, lambda *_: None, torch.device("cpu"))
        assert cache_of(role, loaded).bytes == stage.memory.kv_bytes
        layers = zip(range(stage.layers[0], stage.layers[1] + 1), stage.format, strict=True)
        counted = [layer_weights_bytes(read.layers[layer], name, "float32") for layer, name in layers]
        assert [stored_bytes_of(each) for each in loaded.layers] == counted
        assert sum(counted) == stage.memory.weights_bytes


def a_role(folders: Path, **changes: object) -> Role:
    (role,) = roles_of(even_plan(a_model(folders, "lfm2"), ["s0"]))["s0"]
    return structs.replace(role, **changes)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"state_slots": 0}, "stateSlots 0"),
        ({"prefix_caching": True}, "prefixCaching True"),
        ({"speculation": Speculation("ngram")}, "speculation ngram"),
    ],
    ids=lambda each: "".join(each) if isinstance(each, dict) else "",
)
def test_a_role_that_shares_or_goes_back_in_state_is_refused(
    folders: Path, changes: dict[str, object], said: str
) -> None:
    role = a_role(folders, **changes)
    model = load_stage(role, a_model(folders, "lfm2"), lambda *_: None, torch.device("cpu"))
    with pytest.raises(InputError, match=said):
        cache_of(role, model)
