"""What the messages of one role can be: how large they get, and which values its neighbours may send.

Made by the epoch for each role from its part of the plan. Sockets take their largest message from it, and an inlet hands on
only what passes `check`: afterwards nothing that is allocated, indexed or repeated depends on a number that nobody has looked at.
"""

from dataclasses import dataclass

from msgspec import structs

from strata_planner.contract.block_names import NAME_BYTES, TOKEN_BYTES
from strata_planner.contract.frames import (
    MOST_GRAMMAR_BYTES,
    MOST_HANDED_BLOCKS,
    MOST_LOGPROBS,
    NEVER,
    DataMessage,
    Finish,
    FrameHeader,
    HeldBlock,
    KvPages,
    Open,
    Segment,
    StageLost,
    StepFailed,
    StepResult,
    Survey,
)
from strata_planner.contract.roles import Role
from strata_runtime.errors import StepError
from strata_runtime.formats import COMPUTE_DTYPES
from strata_runtime.stage.inheritance import Refill

_SEGMENT_BYTES = 64  # encoded, with every number at its longest
_OPERATION_BYTES = 128
_RULES_BYTES = 2 * MOST_GRAMMAR_BYTES  # of one sequence: its grammar, biases and bad words
_TOKEN_BYTES = 64 + 24 * MOST_LOGPROBS
_REST_BYTES = 4096
_NUMBER_BYTES = 9
_HELD_BYTES = 64  # of a block in a survey, without its tokens
_WEIGHTS_CHARACTERS = 64
_NAME_CHARACTERS = 253  # of Kubernetes' objects
_SUBMIT_BYTES = 1 << 20  # a request's name, stop tokens and parameters


def largest_request(max_model_len: int) -> int:
    """Bytes of the longest message from a gateway: a prompt and what of its answer has been delivered."""
    return 2 * _NUMBER_BYTES * max_model_len + _SUBMIT_BYTES


@dataclass(frozen=True, slots=True)
class FrameBounds:
    """Of the messages that come in by the inlet of one role. `hidden`, `vocabulary`: the model's."""

    role: Role
    hidden: int
    vocabulary: int

    @property
    def most_tokens(self) -> int:
        """Of one step: the scheduler fills it up to the plan's limit, beside all sequences that decode."""
        return max(self.role.micro_batch.max_step_tokens, self.role.micro_batch.decode)

    @property
    def _most_prompts(self) -> int:
        """That begin in one step: those that go on from an epoch before, too."""
        return max(self.role.micro_batch.most_prompts(), self.role.micro_batch.most_sampled)

    @property
    def most_operations(self) -> int:
        """A sequence holds a page of its own: so many can end between two steps, and as many start as a step has tokens."""
        return self.role.replica_page_budget + 2 * self.most_tokens

    @property
    def most_blocks(self) -> int:
        """That one step appends: a sequence that decodes has one more at times, one whose prompt begins has all that were there already."""
        of_one = -(-self.role.max_model_len // self.role.page_tokens)
        return self.most_tokens + self._most_prompts * of_one

    @property
    def header_bytes(self) -> int:
        """Of the longest message without its hidden states."""
        surveyed = (_HELD_BYTES + TOKEN_BYTES * self.role.page_tokens) * self.role.kv_page_budget
        if self.role.leader:
            return max(_TOKEN_BYTES * self.most_tokens, surveyed) + _REST_BYTES
        ruled = self._most_prompts * (_RULES_BYTES + _NUMBER_BYTES * self.role.max_model_len)
        rest = _OPERATION_BYTES * self.most_operations + ruled + _NUMBER_BYTES * self.most_blocks + _REST_BYTES
        return max((_SEGMENT_BYTES + _NUMBER_BYTES) * self.most_tokens + rest, surveyed + _REST_BYTES)

    @property
    def largest_bytes(self) -> int:
        """Of one frame of the socket."""
        is_bare = self.role.leader and not self.role.states_received
        return max(self.header_bytes, 0 if is_bare else self.most_tokens * self._row_bytes)

    @property
    def _row_bytes(self) -> int:
        return self.hidden * COMPUTE_DTYPES[self.role.compute_type].itemsize

    def check(self, message: DataMessage, bodies: list[int]) -> None:
        """`bodies`: bytes of each frame behind the header. Raises StepError with the value and the rule."""
        role = self.role
        if message.replica != role.replica:
            raise StepError(f"a message for replica {message.replica} came to a role of replica {role.replica}")
        if isinstance(message, StepFailed):
            self._at_most(message.step, "sequences", len(message.sequences), self.most_tokens)
        elif isinstance(message, StageLost):
            self._at_most(-1, "characters of a slot's name", len(message.slot), _NAME_CHARACTERS)
        elif isinstance(message, Finish):
            pass
        elif isinstance(message, Survey):
            self._check_survey(message, bodies)
        elif isinstance(message, StepResult):
            self._check_result(message, bodies)
        else:
            self._check_frame(message, bodies)

    def _check_result(self, result: StepResult, bodies: list[int]) -> None:
        if not self.role.leader:
            raise StepError(f"stage {self.role.stage} got a result, which only the leader takes")
        self._check_states(result.step, bodies)
        self._at_most(result.step, "tokens", len(result.tokens), self.most_tokens)
        self._at_most(result.step, "characters of weights", len(result.weights), _WEIGHTS_CHARACTERS)
        for sampled in result.tokens:
            strange = sampled.top and not all(0 <= token < self.vocabulary for token, _ in sampled.top)
            if strange or not NEVER <= sampled.token < self.vocabulary:
                raise StepError(f"step {result.step}: {sampled}; tokens of this model are 0..{self.vocabulary - 1}")
            if len(sampled.top) > MOST_LOGPROBS:
                count = len(sampled.top)
                raise StepError(f"step {result.step}: {count} log probabilities of a token; {MOST_LOGPROBS} at most")

    def _check_survey(self, survey: Survey, bodies: list[int]) -> None:
        self._at_most(-1, "characters of weights", len(survey.weights), _WEIGHTS_CHARACTERS)
        self._at_most(-1, "starts", len(survey.starts), self.role.stages)
        (first, end), layers = survey.lacking, survey.layers
        if bodies or not 0 <= first <= end <= layers or not all(0 < start <= layers for start in survey.starts):
            raise StepError(
                f"{structs.replace(survey, blocks=None)} with frames of {bodies} bytes behind it: it has none, and layers of {layers} before this stage"
            )
        blocks = survey.blocks or []
        strange = next((each for each in blocks if not can_be(each, self.role.page_tokens)), None)
        if strange is not None or len({each.block for each in blocks}) < len(blocks):
            raise StepError(
                f"a survey tells of {len(blocks)} blocks, of them {strange}: each is told of once, by a name of {NAME_BYTES} bytes and up to "
                f"{self.role.page_tokens} tokens of {TOKEN_BYTES} bytes"
            )

    def _check_frame(self, header: FrameHeader, bodies: list[int]) -> None:
        role, step = self.role, header.step
        if role.leader:
            raise StepError("the leader got a frame of hidden states; only results come back to stage 0")
        kind, ours = (header.dtype, header.hidden), (role.compute_type, self.hidden)
        if kind != ours:
            raise StepError(f"step {step}: hidden states of {kind}; this stage computes with {ours}")
        self._at_most(step, "characters of weights", len(header.weights), _WEIGHTS_CHARACTERS)
        tokens = sum(_length(step, segment, role.max_model_len) for segment in header.segments)
        if header.draft and not all(segment.length == segment.sample == 1 for segment in header.segments):
            raise StepError(f"step {step} drafts: it has one token of each sequence, and samples behind it")
        self._at_most(step, "tokens", tokens, self.most_tokens)
        if header.tokens and (
            len(header.tokens) != tokens or not 0 <= min(header.tokens) <= max(header.tokens) < self.vocabulary
        ):
            raise StepError(
                f"step {step} tells of {len(header.tokens)} tokens from {min(header.tokens)} to {max(header.tokens)} for the {tokens} of its segments; tokens of "
                f"this model are 0..{self.vocabulary - 1}"
            )
        self._at_most(step, "blocks", sum(len(segment.blocks) for segment in header.segments), self.most_blocks)
        self._at_most(step, "KV operations", len(header.operations), self.most_operations)
        for operation in header.operations:
            if isinstance(operation, Open):
                self._check_open(step, operation)
        if header.refill is not None:
            tokens = self._check_refill(header, tokens)
        count, wanted = 1 + (role.states_received if tokens else 0), tokens * self._row_bytes
        if bodies != [wanted] * count:
            raise StepError(
                f"step {step}: frames of {bodies} bytes follow the header; its {tokens} tokens are {count} of {wanted}"
            )

    def _check_refill(self, header: FrameHeader, tokens: int) -> int:
        """The rows that come with it."""
        assert header.refill is not None
        first, end = header.refill
        if not 0 <= first < end or any(segment.sample for segment in header.segments) or header.draft:
            raise StepError(
                f"step {header.step} fills layers {first} to before {end} again: it samples nothing, and drafts nothing"
            )
        refill = Refill.of(header.refill, self.role)
        if refill.reads_log and not self.role.boundary_log_pages:
            raise StepError(f"step {header.step} begins with layer {first}, whose inputs this stage does not keep")
        return tokens if refill.receives else 0

    def _check_states(self, step: int, bodies: list[int]) -> None:
        """Behind a result: how many tokens its step had the leader knows."""
        count, most = self.role.states_received, self.most_tokens * self._row_bytes
        tokens, rest = divmod(bodies[0], self._row_bytes) if bodies else (0, 0)
        if len(bodies) != count or len(set(bodies)) > 1 or rest or tokens > self.most_tokens:
            raise StepError(
                f"step {step}: frames of {bodies} bytes follow a result; here {count} do, of equally many tokens, {most} bytes at most each"
            )

    def _check_open(self, step: int, operation: Open) -> None:
        if (problem := operation.sampling.problem(self.vocabulary)) is not None:
            raise StepError(f"step {step}: sequence {operation.sequence} cannot be sampled: {problem}")
        self._at_most(step, "tokens of a new sequence", len(operation.tokens), self.role.max_model_len)
        self._at_most(step, "bytes before the first block of a sequence", len(operation.root), NAME_BYTES)
        strange = operation.tokens and not 0 <= min(operation.tokens) <= max(operation.tokens) < self.vocabulary
        if strange or not 0 <= operation.prompt_length <= len(operation.tokens):
            raise StepError(
                f"step {step}: sequence {operation.sequence} has a prompt of {operation.prompt_length} of its {len(operation.tokens)} "
                f"tokens; tokens of this model are 0..{self.vocabulary - 1}"
            )

    @staticmethod
    def _at_most(step: int, what: str, count: int, most: int) -> None:
        if count > most:
            raise StepError(f"step {step}: {count} {what}; {most} at most")


def check_pages(pages: KvPages, bodies: list[int], page_tokens: int) -> None:
    """Of pages that another slot gives. `bodies`: bytes of each frame behind the header. Raises StepError with the value and the rule."""
    strange = next((each for each in pages.blocks if not can_be(each, page_tokens) or not each.tokens), None)
    if len(pages.weights) > _WEIGHTS_CHARACTERS or len(pages.blocks) > MOST_HANDED_BLOCKS:
        raise StepError(
            f"pages of layer {pages.layer}: {len(pages.blocks)} blocks, by weights of {len(pages.weights)} characters; "
            f"{MOST_HANDED_BLOCKS} and {_WEIGHTS_CHARACTERS} at most"
        )
    if strange is not None or len({each.block for each in pages.blocks}) < len(pages.blocks) or len(bodies) > 2:
        raise StepError(
            f"pages of layer {pages.layer}: {len(pages.blocks)} blocks, of them {strange}, and {len(bodies)} frames: each comes once, with 1 to "
            f"{page_tokens} tokens, in two frames at most"
        )


def can_be(held: HeldBlock, page_tokens: int) -> bool:
    count, rest = divmod(len(held.tokens), TOKEN_BYTES)
    return held.block >= 0 and len(held.name) == NAME_BYTES and not rest and count <= page_tokens


def _length(step: int, segment: Segment, max_model_len: int) -> int:
    """Of a segment whose numbers can be."""
    start, length, sample = segment.start, segment.length, segment.sample
    if start < 0 or length < 1 or start + length > max_model_len or not 0 <= sample <= length:
        raise StepError(
            f"step {step}: sequence {segment.sequence}: {length} tokens at position {start} with {sample} to sample; a segment has "
            f"at least one token, samples none to all of them and ends within the {max_model_len} positions of a sequence"
        )
    return length
