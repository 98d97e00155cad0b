"""Grammars that clients send are tried in a process of their own before anything serves them. Used by `app`.

The process starts with the first one, which therefore takes some seconds; what was tried lately is known. A process that ends is started again.
"""

import asyncio
import contextlib
import logging
import sys
from collections import OrderedDict

import msgspec

from strata_planner.contract.frames import Grammar
from strata_runtime.gateway.errors import UnavailableError
from strata_runtime.gateway.text.tokenizer import Tokenizer
from strata_runtime.structured.compiler import is_installed
from strata_runtime.structured.trial import MOST_WALL_SECONDS, Answer, Asked

log = logging.getLogger(__name__)

START_SECONDS = 60  # torch and transformers are imported
MOST_KNOWN = 512
NOT_INSTALLED = "this server has no xgrammar: install strata-llm[structured]"


class GrammarTrials:
    """For the model that the tokenizer is of."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        model = (str(tokenizer.folder), str(tokenizer.rows))
        self._command = (sys.executable, "-m", "strata_runtime.structured.trial", *model)
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()
        self._known: OrderedDict[Grammar, str | None] = OrderedDict()  # what is wrong, the latest last

    async def problem(self, grammar: Grammar) -> str | None:
        """Why it cannot be used here; None where it can. Raises UnavailableError where nobody can tell."""
        if not is_installed():
            return NOT_INSTALLED
        if grammar in self._known:
            self._known.move_to_end(grammar)
            return self._known[grammar]
        return await asyncio.shield(self._try(grammar))  # a client that goes leaves no answer behind for the next

    async def close(self) -> None:
        """End the process."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()

    async def _try(self, grammar: Grammar) -> str | None:
        async with self._turn:
            if grammar in self._known:  # by who was before
                return self._known[grammar]
            try:
                answer = await self._asked(grammar)
            except (TimeoutError, OSError, msgspec.DecodeError) as error:
                await self.close()
                log.error("the process that tries grammars failed: %s", repr(error))  # noqa: TRY400
                raise UnavailableError(
                    "the form of this answer cannot be looked at now: send the request again"
                ) from error
            self._known[grammar] = answer.problem
            if len(self._known) > MOST_KNOWN:
                self._known.popitem(last=False)
            return answer.problem

    async def _asked(self, grammar: Grammar) -> Answer:
        process = self._process
        if process is None or process.returncode is not None:
            pipe = asyncio.subprocess.PIPE
            process = await asyncio.create_subprocess_exec(*self._command, stdin=pipe, stdout=pipe)
            self._process = process
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(msgspec.json.encode(Asked(grammar.kind, grammar.text, grammar.ends)) + b"\n")
        await process.stdin.drain()
        async with asyncio.timeout(START_SECONDS + MOST_WALL_SECONDS):
            return msgspec.json.decode(await process.stdout.readline(), type=Answer)
