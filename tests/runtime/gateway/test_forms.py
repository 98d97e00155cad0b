"""What an answer must look like: every way to say it comes to one grammar, which is tried before a pipeline gets it."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from strata_planner.contract.frames import Grammar
from strata_runtime.gateway.errors import InvalidRequestError, TooManyRequestsError
from strata_runtime.gateway.http.structured import form
from strata_runtime.gateway.text.tokenizer import Tokenizer, load_tokenizer
from strata_runtime.gateway.trials import GrammarTrials
from strata_runtime.structured import trial
from strata_runtime.structured.compiler import Compiler
from strata_runtime.structured.schemas import unsupported
from strata_runtime.structured.trial import Answer, in_a_fork, problem_of
from tests.laws import swept
from tests.runtime.gateway.fake_leader import FakeLeader
from tests.runtime.gateway.harness import Harness, TrialsHere, a_gateway, a_leader, scripted
from tests.runtime.gateway.models import CHAT_TEMPLATE, write_model_folder

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
CHOICE = {"type": "or", "elements": [{"type": "const_string", "value": "a"}, {"type": "const_string", "value": 'b"é'}]}
END = 1  # of the tests' model


def of_schema(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


FORMS = [
    pytest.param({"response_format": {"type": "text"}}, None, id="text"),
    pytest.param({"response_format": {"type": "json_object"}}, ("json_schema", {"type": "object"}), id="any object"),
    pytest.param(of_schema(SCHEMA), ("json_schema", SCHEMA), id="schema"),
    pytest.param(
        {"response_format": {"type": "structural_tag", "format": CHOICE}},
        ("structural_tag", {"type": "structural_tag", "format": CHOICE}),
        id="structural tag",
    ),
    pytest.param({"structured_outputs": {"json": SCHEMA}}, ("json_schema", SCHEMA), id="vLLM's schema"),
    pytest.param({"structured_outputs": {"json": json.dumps(SCHEMA)}}, ("json_schema", SCHEMA), id="schema as text"),
    pytest.param({"structured_outputs": {"json_object": True}}, ("json_schema", {"type": "object"}), id="json_object"),
    pytest.param({"structured_outputs": {"regex": "a+", "choice": None}}, ("regex", "a+"), id="regex"),
    pytest.param({"structured_outputs": {"grammar": 'root ::= "a"'}}, ("ebnf", 'root ::= "a"'), id="EBNF"),
    pytest.param({"structured_outputs": {"grammar": 'start: "a"'}}, ("lark", 'start: "a"'), id="Lark"),
    pytest.param(
        {"structured_outputs": {"choice": ["a", 'b"é', "a"]}},
        ("structural_tag", {"type": "structural_tag", "format": CHOICE}),
        id="choice",
    ),
    pytest.param({"structured_outputs": {}}, None, id="nothing"),
]


@pytest.mark.parametrize(("fields", "expected"), FORMS)
async def test_every_way_to_say_it_comes_to_one_grammar(
    gateway: Harness, leader: FakeLeader, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], expected: Any
) -> None:
    monkeypatch.setattr(gateway.gateway.trials, "problem", lambda _: asyncio.sleep(0))
    answer = await gateway.complete(max_tokens=1, **fields)
    assert answer.status_code == 200, answer.text
    rules = leader.submits[-1].sampling.rules
    if expected is None:
        assert rules is None
        return
    assert rules is not None
    assert rules.grammar is not None
    kind, text = expected
    assert rules.grammar.kind == kind
    assert (rules.grammar.text if isinstance(text, str) else json.loads(rules.grammar.text)) == text
    assert rules.grammar.ends == (END,)


REFUSED = [
    pytest.param({"response_format": {"type": "yaml"}}, "response_format.type", "'json_schema'", id="unknown type"),
    pytest.param({"response_format": "json"}, "response_format", "send an object", id="text for an object"),
    pytest.param({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "`schema`", id="none"),
    pytest.param(of_schema(None), "response_format.json_schema.schema", "send the JSON schema", id="no schema"),
    pytest.param(of_schema(5), "response_format.json_schema.schema", "is an object", id="a number"),
    pytest.param(of_schema({"not": {}}), "response_format.json_schema.schema", "has not, which", id="unsupported"),
    pytest.param(
        {"structured_outputs": {"structural_tag": {"format": [{"type": "json_schema", "json_schema": {"not": {}}}]}}},
        "structured_outputs.structural_tag",
        "has not, which",
        id="unsupported, in a tag",
    ),
    pytest.param({"response_format": {"type": "json_object", "a": 1}}, "response_format.a", "not a parameter", id="+"),
    pytest.param({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "send one", id="two"),
    pytest.param({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "at least one", id="no choice"),
    pytest.param({"structured_outputs": {"choice": [""]}}, "structured_outputs.choice", "none of them", id="empty"),
    pytest.param({"structured_outputs": {"regex": 5}}, "structured_outputs.regex", "as a string", id="no regex"),
    pytest.param({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "not valid JSON", id="broken"),
    pytest.param({"structured_outputs": {"speed": 1}}, "structured_outputs.speed", "not a parameter", id="unknown"),
    pytest.param(
        {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
        "structured_outputs",
        "send one of them",
        id="both",
    ),
    pytest.param(
        {"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "structured_outputs.regex", "ends", id="-"
    ),
]


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(("fields", "param", "words"), REFUSED)
async def test_what_says_nothing_sensible_is_refused_by_name(
    standing: Harness, fields: dict[str, Any], param: str, words: str
) -> None:
    answer = await standing.complete(max_tokens=1, **fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert words in error["message"]


async def test_json_that_is_too_deep_is_no_failure(gateway: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    """What can just be read may be too deep for what follows."""
    monkeypatch.setattr(gateway.gateway.trials, "problem", lambda _: asyncio.sleep(0))
    statuses = set()
    for depth in range(940, 1010):
        form = '{"const": ' + "[" * depth + "]" * depth + "}"
        body = f'{{"model": "tiny", "prompt": "a", "max_tokens": 1, "structured_outputs": {{"json": {form}}}}}'
        answer = await gateway.http.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
        statuses.add(answer.status_code)
    assert statuses == {200, 400}


def test_a_form_has_a_bearable_length() -> None:
    with pytest.raises(InvalidRequestError, match="300000 characters; 262144 at most"):
        form("regex", "a" * 300_000, "structured_outputs.regex")


@pytest.mark.parametrize(
    ("schema", "part"),
    [
        ({"properties": {"not": {"type": "integer"}, "if": {}}}, None),
        ({"uniqueItems": False, "$ref": "#/$defs/x", "description": "x", "$defs": {"x": True}}, None),
        ({"type": "string", "enum": ["a"]}, None),
        ({"type": ["number", "null"], "enum": [1, 1.5, None]}, None),
        ({"type": "object", "anyOf": [{"properties": {}}, {"type": "object"}]}, None),
        ({"oneOf": [{"$ref": "#/$defs/x"}], "discriminator": {}, "$defs": {"x": {"properties": {}}}}, None),
        ({"properties": {"a": True}, "required": ["a"], "propertyNames": {"pattern": "a"}}, None),
        ({"format": "date", "title": "no constraints", "default": 1}, None),
        ({"additionalProperties": False, "$ref": "#/$defs/x", "$defs": {"x": {}}}, None),
        ({"properties": {"a": {"items": {"not": {}}}}}, "schema.properties.a.items.not"),
        ({"anyOf": [{}, {"if": {}}]}, "schema.anyOf.1.if"),
        ({"$defs": {"x": {"uniqueItems": True}}}, "schema.$defs.x.uniqueItems"),
        ({"allOf": [{}, {}]}, "schema.allOf (of more than one schema)"),
        (
            {"additionalProperties": {"$ref": "https://x/y"}},
            "schema.additionalProperties.$ref (to another document, or to an anchor)",
        ),
        ({"$ref": "#x"}, "schema.$ref (to another document, or to an anchor)"),
        ({"$ref": "#/x/y", "x": {"y": {"not": {}}}}, "schema.x.y.not"),
        ({"minimum": 1, "maxLength": 3}, "schema.minimum (without a type)"),
        ({"type": "object", "required": ["a"]}, "schema.required ('a' is none of its properties)"),
        ({"type": "object", "properties": {}, "anyOf": [{"required": ["a"]}]}, "schema.type (beside anyOf)"),
        ({"properties": {}, "anyOf": [{"properties": {}}]}, "schema.properties (beside anyOf)"),
        ({"$ref": "#/$defs/x", "minimum": 1, "$defs": {"x": {}}}, "schema.minimum (beside $ref)"),
        ({"type": "integer", "enum": [1, "a"]}, "schema.type (beside enum)"),
        ({"type": "string", "const": "a", "maxLength": 1}, "schema.maxLength (beside const)"),
        ({"type": "string", "pattern": "a", "format": "date"}, "schema.pattern (beside format)"),
        ({"anyOf": []}, "schema.anyOf (of nothing)"),
        ({"allOf": 5, "enum": 5, "required": 5, "format": []}, "schema.allOf (beside enum)"),
        ({"enum": [{"not": 1}]}, None),
        ({"const": {"if": 1}}, None),
    ],
)
def test_parts_of_schemas_that_would_be_passed_over_are_found(schema: Any, part: str | None) -> None:
    assert unsupported(schema) == part


@pytest.fixture(scope="module")
def compiler(model_folder: Path, tokenizer: Tokenizer) -> Compiler:
    made = Compiler(model_folder, tokenizer.rows)
    made.prepare()
    return made


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        ("regex", "a+", None),
        ("regex", "(a", "The parenthesis is not closed"),
        ("json_schema", '{"type": "array"}', None),
        ("json_schema", '{"type": 5}', "Type should be a string"),
        ("ebnf", "root ::= ", "Expect element"),
        ("structural_tag", "{}", "must have a format field"),
        ("ebnf", "root ::= root", "behind 0 tokens of a text nothing is allowed"),
        ("ebnf", 'root ::= "a"{1,9}', None),
        ("json_schema", '{"type": "string", "pattern": "(?!a)b"}', "Lookahead assertion is not supported"),
        ("json_schema", '{"type": "string", "pattern": "a*", "maxLength": 3}', "ignoring minLength/maxLength"),
        ("json_schema", '{"oneOf": [{"type": "integer"}, {"type": "number"}]}', None),
        ("regex", r"\A[\p{L}]", r"Escape sequence '\A' is not recognized"),
        pytest.param("regex", r"\A" * 100_000, r"Escape sequence '\A' is not recognized", marks=pytest.mark.slow),
        pytest.param(
            *("regex", "((((((a{1,100}){1,100}){1,100}){1,100}){1,100}){1,100})", "tokens of a text take too long"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_trial_says_what_is_wrong(compiler: Compiler, kind: Any, text: str, words: str | None) -> None:
    problem = problem_of(compiler, Grammar(kind, text, (END,)))
    assert (problem is None) if words is None else (problem is not None and words in problem)
    assert problem is None or "cpp" not in problem


@pytest.mark.slow
def test_a_trial_is_bounded_in_time_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "MOST_SECONDS", 1)
    monkeypatch.setattr(trial, "MOST_MEMORY_BYTES", 1 << 26)

    def endless() -> str:
        while True:
            pass

    assert in_a_fork(lambda: "fine") == "fine"
    assert "takes more than 1 s" in in_a_fork(endless)
    assert "takes more than 64 MiB" in in_a_fork(lambda: str(len(bytes(1 << 28))))
    assert "takes more than" in in_a_fork(lambda: os.kill(os.getpid(), signal.SIGSEGV) or "")


def test_the_process_of_trials_does_without_torch(model_folder: Path) -> None:
    """Whose import would be two thirds of what the first form after a start waits for, and four fifths of the memory."""
    tried = "import sys; from strata_runtime.structured import trial; trial.main(sys.argv[1:]); sys.exit('torch' in sys.modules)"
    grammars = b"".join(msgspec.json.encode(Grammar("regex", text, (END,))) + b"\n" for text in ("(a", "ab", "[0-9]+"))
    rows = str(load_tokenizer(model_folder).rows)
    done = subprocess.run(
        [sys.executable, "-c", tried, str(model_folder), rows], input=grammars, stdout=subprocess.PIPE, check=False
    )
    refused, *fine = (msgspec.json.decode(line, type=Answer).problem for line in done.stdout.splitlines())
    assert refused is not None
    assert "The parenthesis is not closed" in refused
    assert (fine, done.returncode) == ([None, None], 0)


@pytest.mark.slow  # a process; the tests below have who waits for one, those above what it says
@pytest.mark.parametrize("ends", swept([False, True], [False]))
async def test_grammars_are_tried_in_a_process_that_may_end(model_folder: Path, *, ends: bool) -> None:
    """The real one: what is none is refused, what was tried is known, and a process that is killed is started again."""
    tokenizer = load_tokenizer(model_folder)
    async with a_gateway(tokenizer) as gateway, a_leader(scripted(tokenizer, "ab")) as leader:
        await gateway.connect(leader)
        refused = await gateway.complete(structured_outputs={"regex": "(a"})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "structured_outputs.regex")
        assert "The parenthesis is not closed" in refused.json()["error"]["message"]
        assert not leader.submits
        process = gateway.gateway.trials._process
        assert process is not None
        if ends:
            process.kill()
            await process.wait()
        assert (await gateway.complete(structured_outputs={"regex": "(a"})).status_code == 400, "it was known"
        answers = await asyncio.gather(*(gateway.complete(structured_outputs={"regex": "ab"}) for _ in range(3)))
        short = {"json": {"type": "string", "maxLength": 9}}
        assert (await gateway.complete(structured_outputs=short)).status_code == 200
        assert [answer.json()["choices"][0]["text"] for answer in answers] == ["ab"] * 3


class HeldTrials(GrammarTrials):
    """Without a process: the grammar `slow` is looked at until `go_on`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer)
        self.go_on = asyncio.Event()
        self.asked: list[str] = []

    async def _asked(self, grammar: Grammar) -> Answer:
        self.asked.append(grammar.text)
        if grammar.text == "slow":
            await self.go_on.wait()
        return Answer(None)

    async def waits_for(self, *texts: str) -> list["asyncio.Task[str | None]"]:
        tasks = [asyncio.create_task(self.problem(Grammar("regex", text, (END,)))) for text in texts]
        await asyncio.sleep(0)
        return tasks


async def test_who_goes_away_before_a_trial_leaves_nothing_behind(tokenizer: Tokenizer) -> None:
    trials = HeldTrials(tokenizer)
    slow, *gone, honest = await trials.waits_for("slow", "a", "b", "c", "d")
    for task in (slow, *gone):
        task.cancel()
    await asyncio.gather(slow, *gone, return_exceptions=True)
    (again,) = await trials.waits_for("slow")  # its trial goes on, for who asks next
    assert not honest.done()
    trials.go_on.set()
    assert await asyncio.gather(honest, again) == [None, None]
    assert trials.asked == ["slow", "d"]
    assert not trials._waiting


async def test_few_grammars_wait_at_once(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strata_runtime.gateway.trials.MOST_WAITING", 2)
    trials = HeldTrials(tokenizer)
    tasks = await trials.waits_for("slow", "slow", "a", "a")
    with pytest.raises(TooManyRequestsError, match="2 forms of answers wait"):
        await trials.problem(Grammar("regex", "b", (END,)))
    trials.go_on.set()
    assert await asyncio.gather(*tasks) == [None] * 4
    assert trials.asked == ["slow", "a"]


THINKING = CHAT_TEMPLATE + "{# <think> </think> #}"


@pytest.mark.parametrize(("opened", "begin"), [(False, "<think>"), (True, "")])
async def test_the_form_is_that_of_what_follows_the_thoughts(tmp_path: Path, opened: bool, begin: str) -> None:  # noqa: FBT001
    """A model that thinks first is not held to the form while it does."""
    template = THINKING + ("{% if add_generation_prompt %}<think>\n{% endif %}" if opened else "")
    tokenizer = load_tokenizer(write_model_folder(tmp_path, chat_template=template))
    text = f"{begin}so it is</think>\n\n" + '{"a": 5}'
    trials = TrialsHere(tokenizer)
    async with a_gateway(tokenizer, trials=trials) as gateway, a_leader(scripted(tokenizer, text)) as leader:
        await gateway.connect(leader)
        answer = await gateway.chat(**of_schema(SCHEMA))
        message = answer.json()["choices"][0]["message"]
        assert (message["content"], message["reasoning_content"]) == ('{"a": 5}', "so it is")
        rules = leader.submits[-1].sampling.rules
        assert rules is not None
        assert rules.grammar is not None
        thoughtful = Compiler(tmp_path, tokenizer.rows).begin(rules.grammar)
        assert all(map(thoughtful.accept, [*tokenizer.encode(text), END]))
        thoughtless = Compiler(tmp_path, tokenizer.rows).begin(rules.grammar)
        assert all(map(thoughtless.accept, [*tokenizer.encode('{"a": 5}'), END])) == (not opened)
