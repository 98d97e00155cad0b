"""Grammars that clients send are tried in a process of their own before anything serves them. Used by `app`.

The process starts with the first one, which therefore takes some seconds; what was tried lately is known. A process that ends is started again.
"""

import asyncio
import contextlib
import hashlib
import logging
import sys
from collections import Counter, OrderedDict

import msgspec

from strata_planner.contract.frames import Grammar
from strata_runtime.gateway.errors import TooManyRequestsError, UnavailableError
from strata_runtime.gateway.text.tokenizer import Tokenizer
from strata_runtime.structured.compiler import is_installed
from strata_runtime.structured.trial import MOST_WALL_SECONDS, Answer

log = logging.getLogger(__name__)

START_SECONDS = 60  # xgrammar and transformers are imported, and torch for models without a tokenizer.json
MOST_KNOWN = 512
MOST_WAITING = 32  # grammars at once: each may take as long as a trial may
NOT_INSTALLED = "this server has no xgrammar: install strata-llm[structured]"


class GrammarTrials:
    """For the model that the tokenizer is of."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        model = (str(tokenizer.folder), str(tokenizer.rows))
        self._command = (sys.executable, "-m", "strata_runtime.structured.trial", *model)
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()
        self._known: OrderedDict[bytes, str | None] = OrderedDict()  # what is wrong, by name, the latest last
        self._waiting: Counter[bytes] = Counter()  # requests, by the name of their grammar

    async def problem(self, grammar: Grammar) -> str | None:
        """Why it cannot be used here; None where it can. Raises UnavailableError where nobody can tell, TooManyRequestsError."""
        if not is_installed():
            return NOT_INSTALLED
        name = hashlib.sha256(msgspec.msgpack.encode(grammar)).digest()  # texts may be long
        if name in self._known:
            self._known.move_to_end(name)
            return self._known[name]
        if name not in self._waiting and len(self._waiting) >= MOST_WAITING:
            raise TooManyRequestsError(
                f"{len(self._waiting)} forms of answers wait to be looked at, the most this server takes: send this request again later"
            )
        self._waiting[name] += 1
        try:
            return await self._in_turn(name, grammar)
        finally:
            self._waiting[name] -= 1
            self._waiting += Counter()  # without those that nobody waits for

    async def _in_turn(self, name: bytes, grammar: Grammar) -> str | None:
        """A client that goes away before its turn waits no more; later it leaves no answer behind for the next."""
        await self._turn.acquire()
        trial = asyncio.ensure_future(self._try(name, grammar))
        trial.add_done_callback(self._end_turn)
        return await asyncio.shield(trial)

    def _end_turn(self, trial: "asyncio.Future[str | None]") -> None:
        self._turn.release()
        if not trial.cancelled():
            trial.exception()  # told to whoever waits for it, if anybody does

    async def close(self) -> None:
        """End the process."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()

    async def _try(self, name: bytes, grammar: Grammar) -> str | None:
        if name in self._known:  # by who was before
            return self._known[name]
        try:
            answer = await self._asked(grammar)
        except (TimeoutError, OSError, msgspec.DecodeError) as error:
            await self.close()
            log.error("the process that tries grammars failed: %s", repr(error))  # noqa: TRY400
            raise UnavailableError("the form of this answer cannot be looked at now: send the request again") from error
        self._known[name] = answer.problem
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
        process.stdin.write(msgspec.json.encode(grammar) + b"\n")
        await process.stdin.drain()
        async with asyncio.timeout(START_SECONDS + MOST_WALL_SECONDS):
            return msgspec.json.decode(await process.stdout.readline(), type=Answer)
