"""What the tests of one deployment's life share: what it is asked, what is expected, and streams in whose midst something happens."""

import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from tests.cluster.deployed import Deployed, Status, condition, stream
from tests.cluster.operator_release import MODELS
from tests.cluster.testbed.processes import wait_until
from tests.cluster.timings import Steps

QUESTION = "What does json.dumps do?"
PROMPT = f"<|user|>\n{QUESTION}<|end|>\n<|assistant|>\n"
LONG = 160  # tokens of an answer that is still being streamed when something is lost
WORKERS = {"node-a", "node-b", "node-c"}


class Transformers:
    """The whole model in one process, greedy and in fp32: LONG tokens at most."""

    def __init__(self) -> None:
        import torch  # noqa: PLC0415  heavy, and needed by few
        import transformers  # noqa: PLC0415  same

        torch.set_num_threads(1)
        folder = str(MODELS / "strata-tiny")
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self._model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def complete(self, text: str) -> str:
        """What follows, the end of the text ignored."""
        return self._generate(self.tokenizer(text, return_tensors="pt"), eos_token_id=None)

    def answer(self, question: str) -> str:
        """What follows in a conversation, until it ends."""
        messages = [{"role": "user", "content": question}]
        made = self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        return self._generate(made)

    def _generate(self, prompt: Any, **options: Any) -> str:
        tokens = self._model.generate(**prompt, max_new_tokens=LONG, do_sample=False, pad_token_id=0, **options)
        made = tokens[0, prompt["input_ids"].shape[1] :].tolist()
        assert len(set(made)) >= 40, f"a text that repeats itself would hide a slip: {made}"
        return str(self.tokenizer.decode(made, skip_special_tokens=True))


def streamed_through(chat: Deployed, happens: Callable[[], None], steps: Steps) -> str:
    """The text of a long answer in whose middle something happens. Marks the end of the longest pause in it."""
    with chat.client() as client:
        pieces = stream(client, chat.name, PROMPT, LONG)
        text = next(pieces) + next(pieces)
        happens()
        steps.mark("done to it")
        heard, pause, goes_on = time.monotonic(), 0.0, steps.now()
        for piece in pieces:
            text += piece
            silence = time.monotonic() - heard
            heard += silence
            if silence > pause:
                pause, goes_on = silence, steps.now()
    steps.happened("stream goes on", timedelta(seconds=goes_on))
    steps.mark("stream complete")
    return text


def streamed(chat: Deployed, meanwhile: Callable[[], object] = lambda: None) -> str:
    """The text of a long answer in whose midst something happens."""
    with chat.client() as client:
        pieces = stream(client, chat.name, PROMPT, LONG)
        text = next(pieces) + next(pieces)
        meanwhile()
        return text + "".join(pieces)


def ready_with_three(chat: Deployed) -> Status:
    """What an earlier test took away is there again, and neither the plan nor the gateway is being changed."""
    chat.cluster.kubectl(
        "rollout", "status", f"deployment/{chat.name}-gateway", f"--namespace={chat.namespace}", "--timeout=60s"
    )
    wait_until(lambda: len(lasting_gateways(chat)) == 1, "single gateway", 60)
    return chat.wait(
        lambda now: now["phase"] == "Ready" and "3 devices" in condition(now, "Inventoried")["message"],
        "Ready beside three devices",
    )


def node_without_gateway(chat: Deployed) -> str:
    """One of the plan's."""
    (gateway,) = chat.pods("gateway").values()
    nodes = [str(stage["node"]) for stage in chat.get()["status"]["stages"]]
    return next(node for node in nodes if node != gateway["spec"]["nodeName"])


def lasting_gateways(chat: Deployed) -> dict[str, Any]:
    """All of them, where none is about to go: all are of one template."""
    pods = chat.pods("gateway")
    templates = {each["metadata"]["labels"]["pod-template-hash"] for each in pods.values()}
    leaving = any("deletionTimestamp" in each["metadata"] for each in pods.values())
    return {} if leaving or len(templates) != 1 else pods


def process_of(slot: str) -> int:
    """The one process here that runs this slot."""
    (found,) = processes_of(slot)
    return found


def processes_of(slot: str) -> list[int]:
    with os.scandir("/proc") as entries:
        numbers = [int(each.name) for each in entries if each.name.isdigit()]
    return [number for number in numbers if f"slot\0--name\0{slot}\0" in command_of(number)]


def command_of(process: int) -> str:
    try:
        with open(f"/proc/{process}/cmdline", errors="replace") as file:  # noqa: PTH123  no file to keep
            return file.read()
    except OSError:
        return ""
