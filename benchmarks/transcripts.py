"""A tool call and an answer of a JSON schema over three stages, a stage killed in the middle of each: the answers are those without the kill.

`python -m benchmarks.transcripts [--json FILE]` prints what a client sends and reads. strata-tiny, drawn at temperature 0.4 with a seed; what its answers
say is noise, since 10 million parameters know no tools: their form is the point.
"""

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from benchmarks.attack.target import HOST
from benchmarks.deployment import NAME, Deployment, Wishes, deployed
from benchmarks.rows import Row, run

MODEL = Path("examples/models/strata-tiny").resolve()
STAGES = 3
BEFORE_KILL = 12  # pieces
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "colours": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 8, "maxItems": 8},
        "age": {"type": "integer", "minimum": 1, "maximum": 120},
    },
    "required": ["name", "colours", "age"],
}
PATH = {
    "type": "object",
    "properties": {
        "path": {"type": "string", "maxLength": 40},
        "modes": {"type": "array", "items": {"enum": ["r", "w"]}, "minItems": 6, "maxItems": 6},
    },
    "required": ["path", "modes"],
}
TOOLS = [{"type": "function", "function": {"name": "open_file", "description": "Open a file.", "parameters": PATH}}]
QUESTION = [{"role": "user", "content": "What does textwrap.dedent do?"}]
ASKED: dict[str, dict[str, Any]] = {
    "schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}},
    "tool": {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False},
}


def measure() -> list[Row]:
    wishes = Wishes(MODEL, max_model_len=512, prompt_tokens=100, output_tokens=200, stages=STAGES)
    with tempfile.TemporaryDirectory() as folder, deployed(Path(folder), wishes) as deployment:
        return [_seen(deployment, name, asked) for name, asked in ASKED.items()]


def _seen(deployment: Deployment, name: str, fields: dict[str, Any]) -> Row:
    body = {"model": NAME, "messages": QUESTION, "max_tokens": 300, "seed": 8, "temperature": 0.4, **fields}
    print(f"\n> {json.dumps(fields)}")
    url = f"http://{HOST}:{deployment.port}/v1/chat/completions"
    answer = httpx.post(url, json=body, timeout=120)
    answer.raise_for_status()
    (choice,) = answer.json()["choices"]
    whole = _of_message(choice["message"])
    print(f"whole:    {whole}  ({choice['finish_reason']})")
    streamed, pause, place = _streamed(deployment, url, body)
    print(f"streamed: {streamed}\n          (stage 2 killed behind {place!r}; longest pause {pause:.1f} s)")
    return Row(f"transcript_{name}", float(streamed == whole), f"equal; longest pause {pause:.1f} s", goal=1.0)


def _streamed(deployment: Deployment, url: str, body: dict[str, Any]) -> tuple[str, float, str]:
    """The text, the longest pause in seconds, and how far it was when the last stage was killed."""
    pieces: list[str] = []
    killed_behind, pause, last = "", 0.0, time.perf_counter()
    with httpx.stream("POST", url, json={**body, "stream": True}, timeout=120) as response:
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            piece = _of_message(json.loads(line.removeprefix("data: "))["choices"][0]["delta"])
            pause, last = max(pause, time.perf_counter() - last), time.perf_counter()
            pieces.append(piece)
            if len(pieces) == BEFORE_KILL:
                deployment.kill_slot(-1)
                killed_behind = "".join(pieces)
    return "".join(pieces), pause, killed_behind


def _of_message(message: dict[str, Any]) -> str:
    """Content, or a call as name and arguments."""
    functions = [call["function"] for call in message.get("tool_calls", [])]
    return (message.get("content") or "") + "".join(each.get("name", "") + each["arguments"] for each in functions)


if __name__ == "__main__":
    run("transcripts", measure)
