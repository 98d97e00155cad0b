"""Any precision on a cluster: the Job of examples/ makes the copy, the operator sees it, slots serve its 4-bit model."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.cluster.deployed import Deployed, deployed
from tests.cluster.operator_release import OperatorRelease, machine_pod, models_folder
from tests.cluster.testbed.cluster import Cluster, Manifest
from tests.cluster.testbed.images import IMAGE
from tests.cluster.testbed.world import CHECKOUT
from tests.cluster.timings import Steps

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

TOKENS = 40
PROMPT = "<|user|>\nWhat does json.dumps do?<|end|>\n<|assistant|>\n"


@pytest.fixture
def four(cluster: Cluster, operator: OperatorRelease) -> Iterator[Deployed]:
    placement = {"minStages": 2, "maxStages": 2}
    with deployed(cluster, operator, "four", precision={"allowed": [4]}, placement=placement) as four:
        yield four


def quantize_job(namespace: str) -> Manifest:
    """As the example has it, with this testbed's image, mounts and model."""
    job: Manifest = yaml.safe_load((CHECKOUT / "examples" / "quantize-job.yaml").read_text(encoding="utf-8"))
    job["metadata"]["namespace"] = namespace
    pod, host = job["spec"]["template"]["spec"], machine_pod()
    (container,) = pod["containers"]
    container["image"] = IMAGE
    container["command"] = [each.replace("llama", "strata-tiny") for each in container["command"]]
    container["resources"] = {}
    container["env"] += host["env"]
    container["volumeMounts"] += [each for each in host["volumeMounts"] if each["name"] != "models"]
    models = {"name": "models", "hostPath": {"path": str(models_folder()), "type": "Directory"}}
    others = [each for each in (*pod["volumes"], *host["volumes"]) if each["name"] != "models"]
    pod["volumes"] = [models, *others]
    return job


def test_a_job_makes_the_copy_and_slots_serve_its_four_bit_model(cluster: Cluster, four: Deployed) -> None:
    steps, namespace = Steps("any precision"), four.namespace
    cluster.apply(quantize_job(namespace))
    cluster.kubectl("wait", "--for=condition=complete", "job/quantize", f"--namespace={namespace}", "--timeout=120s")
    told: dict[str, Any] = json.loads(
        cluster.kubectl("logs", "job/quantize", f"--namespace={namespace}").splitlines()[-1]
    )
    assert told["folder"].endswith("strata-tiny/strata-any")
    steps.mark("quantized")

    four.apply()
    status = four.wait_ready()
    steps.mark("Ready")
    assert [set(stage["bits"]) for stage in status["stages"]] == [{"4"}, {"4"}]
    with four.client() as client:
        answer = client.completions.create(
            model="four", prompt=PROMPT, max_tokens=TOKENS, temperature=0, extra_body={"ignore_eos": True}
        )
    assert answer.choices[0].text == four_bit_answer()


def four_bit_answer() -> str:
    """The same prompt, in one process, through transformers with the weights that the copy has at 4 bits."""
    import torch  # noqa: PLC0415  heavy, and needed by few
    import transformers  # noqa: PLC0415  same

    from strata_runtime.loading.artefact import find_artefact  # noqa: PLC0415  same

    torch.set_num_threads(1)
    folder = models_folder() / "strata-tiny"
    copy = find_artefact(folder)
    assert copy is not None
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        for layer in copy.manifest.files:
            for key in layer.shapes:
                model.get_submodule(key).weight.copy_(copy.read(key, 4, torch.float32).dequantized())
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer(PROMPT, return_tensors="pt")
    tokens = model.generate(**prompt, max_new_tokens=TOKENS, do_sample=False, pad_token_id=0, eos_token_id=None)
    return str(tokenizer.decode(tokens[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True))
