"""Clients of the checker: what each has of its answer, and what it should have."""

import asyncio
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from strata_planner.contract.frames import Sampling
from strata_runtime.gateway.http.asked import KEY_HEADER, POSITION_HEADER
from strata_runtime.gateway.keeping.birth import Birth
from strata_runtime.gateway.routing.journal import GenerationRequest
from tests.chain.arithmetic import STOP, text_of

if TYPE_CHECKING:
    from tests.chain.gateway_process import GatewayProcess

PATH = "/v1/completions"


@dataclass(eq=False)
class Client:
    """One request, whose stream ends with its gateway: it is asked anew then."""

    request: GenerationRequest
    got: list[int] = field(default_factory=list)
    wanted: list[int] = field(default_factory=list)
    error: str = ""
    done: bool = False
    broken: str = ""  # a law
    found: int = 0  # tokens that were in the cache, summed over its tokens
    served_by: "GatewayProcess | None" = None
    reader: "asyncio.Task[None] | None" = None

    def __post_init__(self) -> None:
        self.wanted = text_of(self.request.prompt, self.request.max_tokens, self.request.sampling)

    def leave(self) -> None:
        """It wants no more."""
        self.done = True
        self.drop()

    def drop(self) -> None:
        """Its connection breaks."""
        if self.reader is not None:
            self.reader.cancel()

    def begin_anew(self) -> None:
        self.got.clear()

    def take(self, index: int, token: int, finish: str | None) -> None:
        if index != len(self.got):
            self.broken = f"{self.request.id}: token {index} came where {len(self.got)} was due"
        self.got.append(token)
        if self.got != self.wanted[: len(self.got)]:
            self.broken = f"{self.request.id}: {self.got} is no beginning of {self.wanted}"
        self.done = finish is not None
        if self.done and self.got != self.wanted:
            self.broken = f"{self.request.id} ended after {len(self.got)} tokens of {len(self.wanted)}"


@dataclass(eq=False)
class KeptClient(Client):
    """One under an Idempotency-Key, without a seed: it goes on with its answer at whichever gateway it reaches. `may_be_lost`: no other gateway knew all of it."""

    times: int = 1  # that it had to begin anew
    last_id: str = ""
    may_be_lost: bool = False

    def __post_init__(self) -> None: ...

    @property
    def body(self) -> bytes:
        return repr(self.request.prompt).encode()

    def headers(self) -> dict[str, str]:
        last = {POSITION_HEADER: self.last_id} if self.last_id else {}
        return {KEY_HEADER: f"{self.request.id}-{self.times}", **last}

    def born(self, birth: Birth) -> GenerationRequest:
        """The request, by what of it is chance. What has been told of one answer is gone on with by no other one."""
        sampling = Sampling(temperature=1.0, seed=birth.seed)
        wanted = text_of(self.request.prompt, self.request.max_tokens, sampling)
        if self.got and wanted != self.wanted:
            self.broken = f"{self.request.id}: another answer goes on with {self.got}"
        self.wanted = wanted
        return replace(self.request, id=f"{self.request.id}-{birth.name}", sampling=sampling)

    def begin_anew(self) -> None:
        """It goes on with it: nothing is."""

    def forgets(self) -> None:
        """It has lost what it had, and knows its key."""
        self.got.clear()
        self.last_id = ""

    def is_lost(self, reason: str) -> None:
        if not self.may_be_lost:
            self.broken = f"{self.request.id}: the other gateway knew {self.got} and does not go on: {reason}"
        self.forgets()
        self.times += 1
        self.may_be_lost = False


def a_client(name: str, prompt: tuple[int, ...], most: int, seed: int | None) -> Client:
    """`seed`: None: of an answer under a key."""
    sampling = Sampling(temperature=0.0 if seed == 0 else 1.0, seed=seed or 0)
    request = GenerationRequest(name, prompt, most, (STOP,), sampling)
    return KeptClient(request) if seed is None else Client(request)
