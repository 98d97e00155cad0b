"""A gateway behind real HTTP whose model calls tools and thinks aloud, for the clients of the interfaces beside OpenAI's first."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

from strata_runtime.gateway.http.api_keys import ApiKeys
from strata_runtime.gateway.settings import Limits
from strata_runtime.gateway.text.tokenizer import Tokenizer
from tests.runtime.gateway.fake_leader import FakeLeader, route_to
from tests.runtime.gateway.harness import Harness, a_gateway, a_leader, endless, scripted

LONGEST = 2048
API_KEY = "a key of this deployment"
WEATHER = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln", "days": 2}}\n</tool_call>'

# Answers are told to have calls as Hermes 2 Pro writes them.
TOOLS = (
    "{% if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>"
    'A call is <tool_call>\n{"name": ..., "arguments": {...}}\n</tool_call>{% endif %}'
    "{% for m in messages %}<|{{ m.role }}|>{% if m.reasoning_content %}[{{ m.reasoning_content }}]{% endif %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>\n{{ call.function | tojson }}\n</tool_call>{% endfor %}"
    "{{ ' of ' + m.name if m.name else '' }}{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# The same of a model that thinks, unless it is told not to.
THOUGHTS = TOOLS + (
    "{% if add_generation_prompt %}{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    "{{ '' if not reasoning_effort is defined else '(' + reasoning_effort + ')' }}{% endif %}"
)


@dataclass
class Chatting:
    """A gateway at `url` with a leader that says what it is told to."""

    gateway: Harness
    leader: FakeLeader
    tokenizer: Tokenizer
    url: str

    def says(self, text: str) -> None:
        self.leader.model = scripted(self.tokenizer, text)

    @property
    def asked(self) -> str:
        """The last prompt."""
        return self.tokenizer.decode(self.leader.submits[-1].prompt)


@contextlib.asynccontextmanager
async def chatting(tokenizer: Tokenizer, *, limits: Limits | None = None) -> AsyncIterator[Chatting]:
    """Grammars are taken as they are: whether they are any is tested elsewhere."""
    async with (
        a_leader(endless(tokenizer), max_tokens=LONGEST) as leader,
        a_gateway(tokenizer, api_keys=ApiKeys((API_KEY,)), limits=limits) as gateway,
    ):
        gateway.gateway.trials.problem = lambda _: asyncio.sleep(0)
        gateway.dispatcher.set_route(route_to(leader, max_model_len=LONGEST))
        await gateway.until(lambda: gateway.dispatcher.status().leaders_connected == 1)
        async with gateway.serving() as url:
            yield Chatting(gateway, leader, tokenizer, url)
