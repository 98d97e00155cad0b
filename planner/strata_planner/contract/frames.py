"""Data frames: what passes from stage to stage. A msgpack header, then the raw bytes of the hidden states; where a head drafts, behind these those that
the layers in `Speculation.fused` have handed on so far, a part each, ascending. All of them come back behind the result.

One frame may mix chunked prefill, decode and verification of several sequences: its segments are packed along the
token axis, so that hidden states are [tokens, hidden] with tokens = the sum of the segments' lengths. The leader's scheduler
says in which blocks of its KV pool each stage keeps a sequence: the same numbers at all stages, told once, when they are
appended. Encoded as arrays: field order is part of the wire format, new fields go last.
"""

import math
from typing import Final, Literal

import msgspec

from strata_planner.contract.formats import ComputeType

MOST_LOGPROBS = 20  # most likely tokens that one token may carry beside it
MOST_BIASES = 1024  # of one request
MOST_BAD_WORDS, LONGEST_BAD_WORD = 256, 64  # of one request, tokens of one
MOST_GRAMMAR_BYTES = 1 << 18
# In place of a token:
NOT_YET: Final = -1  # its grammar is still being compiled
NEVER: Final = -2  # nothing can be drawn
LARGEST_ANSWER_BYTES = 16 << 20  # of one message of a leader: some 30,000 tokens of one step, each with all of these


class Message(msgspec.Struct, frozen=True, array_like=True):
    """A value of the hot path: positional on the wire."""


GrammarKind = Literal["json_schema", "regex", "ebnf", "lark", "structural_tag"]


class Grammar(Message, frozen=True):
    """What an answer must look like, in one of the forms that xgrammar compiles."""

    kind: GrammarKind
    text: str
    ends: tuple[int, ...]  # tokens that end an answer: behind a whole text these come, and before it none of them


class LogitRules(Message, frozen=True):
    """What changes a row of logits before a token is drawn: functions of the tokens so far, as OpenAI and vLLM define them."""

    presence_penalty: float = 0.0  # once for each token that the answer has
    frequency_penalty: float = 0.0  # for each time that it has it
    repetition_penalty: float = 1.0  # divides the logits of what prompt and answer have (Keskar et al. 2019)
    bias: tuple[tuple[int, float], ...] = ()  # (token, what is added to its logit)
    bad_words: tuple[tuple[int, ...], ...] = ()  # sequences of tokens that the answer never has
    min_tokens: int = 0  # none of `ends` comes earlier
    ends: tuple[int, ...] = ()
    grammar: Grammar | None = None

    def problem(self, vocabulary: int) -> str | None:
        """Why nobody can draw like this. `vocabulary`: rows of the model's embedding."""
        numbers = (self.presence_penalty, self.frequency_penalty, *(value for _, value in self.bias))
        ends = self.ends if self.grammar is None else (*self.ends, *self.grammar.ends)
        tokens = (*(token for token, _ in self.bias), *(token for word in self.bad_words for token in word), *ends)
        if not all(map(math.isfinite, numbers)) or not 0 < self.repetition_penalty < math.inf:
            return "penalties and biases are finite numbers, and repetition_penalty is above 0"
        if tokens and not 0 <= min(tokens) <= max(tokens) < vocabulary:
            return f"tokens of this model are 0..{vocabulary - 1}"
        if len(self.bias) > MOST_BIASES or len(self.bad_words) > MOST_BAD_WORDS:
            return f"at most {MOST_BIASES} biases and {MOST_BAD_WORDS} bad words"
        if not all(1 <= len(word) <= LONGEST_BAD_WORD for word in self.bad_words):
            return f"a bad word has 1 to {LONGEST_BAD_WORD} tokens"
        if (grammar := self.grammar) is not None and (not grammar.ends or len(grammar.text) > MOST_GRAMMAR_BYTES):
            return f"a grammar has at most {MOST_GRAMMAR_BYTES} characters, and a token that ends what it describes"
        return None


class Sampling(Message, frozen=True):
    """How to choose a sequence's next tokens. Draws are keyed by (seed, position): a replay draws the same."""

    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    seed: int = 0
    logprobs: int = -1  # most likely tokens to report beside the chosen one; -1: none
    min_p: float = 0.0  # of the most likely token's probability: tokens below that share are not drawn
    rules: LogitRules | None = None
    prompt_logprobs: int = -1  # likewise of the prompt's own tokens, from the second on

    def problem(self, vocabulary: int) -> str | None:
        """Why no token can be drawn like this: leaders refuse such requests, stages such frames."""
        shares = 0 <= self.top_p <= 1 and 0 <= self.min_p <= 1
        if not (
            0 <= self.temperature < math.inf and shares and max(self.logprobs, self.prompt_logprobs) <= MOST_LOGPROBS
        ):
            return (
                "temperature is a number from 0 on, top_p and min_p lie in 0..1, at most "
                f"{MOST_LOGPROBS} log probabilities are reported"
            )
        return None if self.rules is None else self.rules.problem(vocabulary)


class Segment(Message, frozen=True):
    """`length` consecutive tokens of one sequence, the first at position `start`.

    One that starts before the latest segment's end writes over what lay there, as after rejected drafts.
    `sample`: after how many of the last tokens a choice is wanted: 1 for decode and the last chunk of a prompt, 0 for
    earlier chunks, `length` for a verification step. `blocks`: appended to the sequence's table first, which then reaches the
    segment's end at least; blocks before `start` may hold what another sequence has computed.
    """

    sequence: int
    start: int
    length: int
    sample: int
    blocks: tuple[int, ...] = ()

    @property
    def sampled(self) -> range:
        """Positions after which a choice is wanted."""
        return range(self.start + self.length - self.sample, self.start + self.length)


class Open(Message, frozen=True, tag="open"):
    """A sequence is new: where its sampling parameters reach the last stage.

    Where what is wanted depends on its tokens, they come with it: `prompt_length` of the prompt, then those of the answer. `root`: what stands before
    its first block (`block_names`); empty: what does without a salt.
    """

    sequence: int
    sampling: Sampling
    tokens: tuple[int, ...] = ()
    prompt_length: int = 0
    root: bytes = b""


class Free(Message, frozen=True, tag="free"):
    """The sequence is over, or gave its blocks back: stages forget its table and how to sample it."""

    sequence: int


KvOperation = Open | Free


class FrameHeader(Message, frozen=True, tag="frame/7"):
    """The tag names the layout of its parts: a peer of another one cannot decode it, and so cannot take one field for another.

    Of another epoch: dropped and counted. A gap in `step`: an error. KV operations come before the segments.

    `refill`: first and end of the layers that compute; all others have stored what these tokens leave in them. What enters the first is the tokens, where that
    is the model's first, else what a stage has kept of what it handed on. Nothing is sampled.

    `tokens`: of all segments, so that every stage knows what its blocks hold; empty where nobody would go on from them.
    """

    replica: int
    epoch: int
    step: int
    weights: str  # a digest of the weights that it has run with so far: each stage works its own in
    segments: list[Segment]
    operations: list[KvOperation]
    dtype: ComputeType
    hidden: int
    seconds: float = 0.0  # of the stage that took longest so far
    draft: bool = False  # with draft weights: one token of each sequence, whose keys and values are written over when it is verified
    refill: tuple[int, int] | None = None
    tokens: list[int] = []


class SampledToken(Message, frozen=True):
    """The token chosen after position `position`, or the prompt's own where it goes on, or why there is none.

    `top` holds (token, log probability), most likely first; `rank` of a token of the prompt counts those that are as likely or more.
    """

    sequence: int
    position: int
    token: int
    logprob: float
    top: list[tuple[int, float]]
    rank: int = 0


class HeldBlock(Message, frozen=True):
    """What a block holds: all that it is called by `name` for; or, full or not, these `tokens`, packed, behind the block or root `name`."""

    block: int
    name: bytes
    tokens: bytes = b""


MOST_HANDED_BLOCKS: Final = 512  # in one message
LARGEST_PART_BYTES: Final = 4 << 20  # of one of its frames


class WantPages(Message, frozen=True, tag="want/1"):
    """Whoever gets layers asks who has them: up to `credit` messages with pages that it has not had as they are now, then a `PagesGiven`.

    `rest`: also of blocks that are not full, once the giver has ended its role; before it gives full ones alone, between its steps.
    """

    epoch: int
    replica: int
    layers: list[int]
    credit: int
    rest: bool


class KvPages(Message, frozen=True, tag="pages/2"):
    """Pages of one layer, by their blocks, for the stage that has it next; frames of bytes follow, as its pool has them: [2, kv_heads, blocks, page_tokens, ...].

    They were computed in the epoch `formed` of the replica `before`, by these `weights` of all layers up to it. `blocks`: what each holds, by its tokens.
    """

    epoch: int
    layer: int
    kv_bits: int
    weights: str
    formed: int
    before: int
    blocks: list[HeldBlock]


class PagesGiven(Message, frozen=True, tag="given/1"):
    """The end of what was asked for. `done`: there was no more of this round."""

    epoch: int
    done: bool


PagesMessage = WantPages | KvPages | PagesGiven


class Survey(Message, frozen=True, tag="survey/5"):
    """The leader of a replica that was formed anew asks what its stages have kept: each works in what it still holds, the last one sends it back.

    `blocks`: what all those that hold any layer hold in them, computed in the epoch `formed` of the replica `before`; None: nobody has, so far. `lacking`: first
    and end of the layers that do not hold it any more, or hold what other weights have computed; equal: none. `starts`: layers whose inputs are kept, but
    for those of the blocks `unlogged`. `weights`: as of a frame that would pass now; `layers`: of all stages so far.
    """

    replica: int
    epoch: int
    weights: str = ""
    layers: int = 0
    lacking: tuple[int, int] = (0, 0)
    starts: tuple[int, ...] = ()
    formed: int = 0
    before: int = -1
    blocks: list[HeldBlock] | None = None
    unlogged: tuple[int, ...] = ()

    @property
    def refill(self) -> tuple[int, int]:
        """Which layers compute again what is in the blocks (`going_on`); equal: none. All other blocks are computed through all layers when they are wanted: so
        layers begin where inputs are kept, or with the first where that is less in all.
        """
        first, end = self.lacking
        if first >= end:
            return 0, 0
        start, blocks = max(start for start in (0, *self.starts) if start <= first), self.blocks or []
        logged = len(self._logged)
        without = (end - start) * logged + self.layers * (len(blocks) - logged)
        return (start, end) if without < end * len(blocks) else (0, end)

    @property
    def going_on(self) -> list[HeldBlock]:
        """The blocks that streams go on from."""
        return self._logged if self.refill[0] else list(self.blocks or [])

    @property
    def _logged(self) -> list[HeldBlock]:
        unlogged = frozenset(self.unlogged)
        return [each for each in self.blocks or [] if each.block not in unlogged]


class StepResult(Message, frozen=True, tag="result/3"):
    """What the last stage sends back to the leader for each frame that carried segments. `weights`, `seconds`: over all stages."""

    replica: int
    epoch: int
    step: int
    tokens: list[SampledToken]
    weights: str = ""
    seconds: float = 0.0


class StepFailed(Message, frozen=True, tag="failed"):
    """A stage could not compute a step: passed on from stage to stage to the leader, which tells the gateways."""

    replica: int
    epoch: int
    step: int
    sequences: list[int]  # those of its segments: one of them may be the reason
    reason: str


class StageLost(Message, frozen=True, tag="lost"):
    """A stage has lost a neighbour: passed on from stage to stage to the leader, which tells the gateways."""

    replica: int
    epoch: int
    slot: str  # that is not reached
    hangs: bool = False  # it is, and its step does not end: those in it are suspects


class Finish(Message, frozen=True, tag="finish"):
    """A replica's epoch ends and nobody is lost: its steps under way come to their ends first. Passed on from stage to stage.

    `asked` by a slot that is told to commit; the leader makes no more steps then, and sends `last` behind all that it has made. When that has come round,
    and all results with it, it says that the epoch is `over`: before, no stage takes its sockets away from those behind it.
    """

    replica: int
    epoch: int
    phase: Literal["asked", "last", "over"] = "asked"


DataMessage = FrameHeader | StepResult | StepFailed | Survey | StageLost | Finish
FinishReason = Literal["stop", "length", "abort", "error", "never"]
FAILURES: Final = frozenset({"abort", "error", "never"})  # without a token; the last where nothing can be drawn


# Between a gateway (DEALER) and a leader (ROUTER).


class Submit(Message, frozen=True, tag="submit"):
    """Run a request, or go on with one: `delivered` are the tokens the client already has."""

    request: str
    prompt: list[int]
    delivered: list[int]
    max_tokens: int  # of the whole answer, delivered ones included
    stop_tokens: list[int]
    sampling: Sampling
    alone: bool = False  # it was in a step that failed: until its first token its steps carry nothing else
    priority: int = 0  # lower numbers go first
    salt: str = ""  # KV is shared among requests of one salt
    deadline: float = math.inf  # seconds since 1970; of equal priority the earliest goes first


class Abort(Message, frozen=True, tag="abort"):
    """The client is gone or has enough."""

    request: str


class Hello(Message, frozen=True, tag="hello"):
    """A gateway asks who leads; the leader answers with LeaderHello. Sent after connecting and as a liveness question."""


class LeaderHello(Message, frozen=True, tag="leaderHello"):
    """A leader has committed this epoch. One that says another incarnation or epoch knows none of the old requests."""

    replica: int
    epoch: int
    incarnation: str
    max_tokens: int  # prompt + answer of one request
    running: int
    waiting: int
    kv_usage: float  # share of the page budget in use
    # Since the epoch began:
    preemptions: int = 0  # sequences that gave their blocks back
    drafts: int = 0  # verifications of drafted tokens
    draft_tokens: int = 0
    accepted_tokens: int = 0  # of the drafted ones
    lost: str = ""  # a slot of its replica that is not reached: no step gets through before the next epoch


class PromptScore(Message, frozen=True):
    """What the model made of one token of a prompt. `rank`: 1 for the most likely."""

    token: int
    logprob: float
    rank: int
    top: list[tuple[int, float]]


class TokenEvent(Message, frozen=True):
    """Token number `index` (from 0) of the answer to `request`; `finish` is set on the last.

    `found`: tokens of the prompt and of what was delivered before whose KV was there already. `prompt`: with the first token,
    of the prompt's from the second on, where they are wanted. `refilled`: of `found`, those of which a change of epoch had lost layers, which were
    computed again for this request.
    """

    request: str
    index: int
    token: int
    logprob: float
    top: list[tuple[int, float]]
    finish: FinishReason | None
    found: int = 0
    prompt: tuple[PromptScore, ...] = ()
    refilled: int = 0


class Tokens(Message, frozen=True, tag="tokens"):
    """All tokens of one step, and the leader's load after it."""

    replica: int
    epoch: int
    events: list[TokenEvent]
    running: int
    waiting: int
    kv_usage: float


class Rejected(Message, frozen=True, tag="rejected"):
    """The request can never run here; `reason` has the value, the rule and the fix."""

    request: str
    reason: str


class StepFailure(Message, frozen=True, tag="stepFailure"):
    """A step failed and with it the epoch. `requests`: those of this gateway in the step, which carried `carried` in all."""

    replica: int
    epoch: int
    requests: list[str]
    carried: int
    reason: str


GatewayMessage = Submit | Abort | Hello
LeaderMessage = LeaderHello | Tokens | Rejected | StepFailure

encode = msgspec.msgpack.encode
data_decoder: msgspec.msgpack.Decoder[DataMessage] = msgspec.msgpack.Decoder(DataMessage)
pages_decoder: msgspec.msgpack.Decoder[PagesMessage] = msgspec.msgpack.Decoder(PagesMessage)
gateway_message_decoder: msgspec.msgpack.Decoder[GatewayMessage] = msgspec.msgpack.Decoder(GatewayMessage)
leader_message_decoder: msgspec.msgpack.Decoder[LeaderMessage] = msgspec.msgpack.Decoder(LeaderMessage)
