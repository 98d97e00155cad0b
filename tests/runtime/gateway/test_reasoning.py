"""Which thoughts a chat template asks for, and whether a prompt opened one."""
# ruff: noqa: RUF001 (DeepSeek's markers have fullwidth bars)

import pytest

from strata_runtime.gateway.text import reasoning
from strata_runtime.gateway.text.reasoning import REASONING_NAMES, reasoning_format

# What tells them apart in the published templates.
TEMPLATES = {
    "DeepSeek-R1": (
        (
            "{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}"
            "{{'<｜Assistant｜><think>\\n'}}"
        ),
        "think",
    ),
    "Qwen3": (
        "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}",
        "think",
    ),
    "Magistral": ("{%- set default_system_message = 'First draft [THINK]your thoughts[/THINK] then' %}", "magistral"),
    "gpt-oss": (
        (
            '{{- "<|start|>assistant<|channel|>analysis<|message|>" + message.thinking + "<|end|>" }}'
            '{{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|end|>" }}'
        ),
        "harmony",
    ),
    "Llama 3": ("<|start_header_id|>assistant<|end_header_id|>\n\n", None),
}


@pytest.mark.parametrize("model", TEMPLATES)
def test_the_family_is_told_from_the_chat_template(model: str) -> None:
    template, name = TEMPLATES[model]
    found = reasoning.detect(template)
    assert (found.name if found else None) == name


@pytest.mark.parametrize("name", REASONING_NAMES)
def test_a_format_has_a_name(name: str) -> None:
    assert reasoning_format(name).name == name


@pytest.mark.parametrize(
    ("prompt", "opened"),
    [
        ("<|im_start|>assistant\n<think>\n", True),
        ("<|im_start|>assistant\n<think>", True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("What does <think> mean?<|im_end|>\n<|im_start|>assistant\n", False),
        ("", False),
    ],
)
def test_a_prompt_may_open_the_thought(prompt: str, opened: bool) -> None:  # noqa: FBT001 (a table's column)
    assert reasoning_format("think").opened_by(prompt) is opened
