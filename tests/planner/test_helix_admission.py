"""Who runs in Helix's simulator on a pipeline of ours: by KV in use, first come first served, and nobody is lost."""

from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.reference.helix_admission import AHEAD, Admission, Sequence
from strata_planner.contract.steps import WATERMARK

LONGEST = 100
LENGTHS = st.lists(st.tuples(st.integers(1, 40), st.integers(1, LONGEST - 40)), min_size=1, max_size=40)
CAPACITY = st.integers(2 * LONGEST, 2000)


class Pipe:
    """Nodes that hand tokens back in the order in which they were issued, as a chain does. Keeps what is held on them."""

    def __init__(self, capacity: int, lengths: list[tuple[int, int]], most_prompts: int = 100) -> None:
        self.admission = Admission(capacity, most_prompts, LONGEST, lengths)
        self.under_way: deque[Sequence] = deque()
        self.held: dict[int, int] = {}  # by rank: with a prompt or a token on its way as if it were there
        self.begun: list[int] = []
        self.ended: list[Sequence] = []
        self.begin()

    def begin(self) -> None:
        for each in self.admission.admit():
            self.begun.append(each.rank)
            self.held[each.rank] = each.tokens
            self.under_way.append(each)

    def step(self) -> None:
        each = self.under_way.popleft()
        ends = each.decodes and each.produced + 1 == each.answer
        if ends:
            self.admission.end(each)
            self.ended.append(each)
        elif self.admission.goes_on(each):
            self.held[each.rank] += 1
            self.under_way.append(each)
        if each not in self.under_way:
            del self.held[each.rank]
        self.begin()


@given(LENGTHS, CAPACITY, st.integers(1, 50))
def test_every_request_ends_with_its_whole_answer(
    lengths: list[tuple[int, int]], capacity: int, most_prompts: int
) -> None:
    pipe = Pipe(capacity, lengths, most_prompts)
    while pipe.under_way:
        assert sum(not each.decodes for each in pipe.under_way) <= most_prompts
        pipe.step()
    assert sorted((each.rank, each.prompt, each.produced) for each in pipe.ended) == [
        (rank, *each) for rank, each in enumerate(lengths)
    ]
    assert (pipe.admission.running, pipe.admission.held) == (0, 0)


@given(LENGTHS, CAPACITY)
def test_kv_never_runs_over(lengths: list[tuple[int, int]], capacity: int) -> None:
    pipe = Pipe(capacity, lengths)
    while pipe.under_way:
        assert sum(pipe.held.values()) <= capacity
        pipe.step()


@given(LENGTHS, CAPACITY)
def test_first_come_first_served_as_long_as_the_watermark_stays_free(
    lengths: list[tuple[int, int]], capacity: int
) -> None:
    admission = Admission(capacity, 100, LONGEST, lengths)
    begun = [each.rank for each in admission.admit()]
    assert begun == [*range(len(begun))]
    free = max(WATERMARK * capacity, AHEAD * len(begun))
    assert admission.held == sum(prompt for prompt, _ in lengths[: len(begun)]) <= capacity - free
    if len(begun) < len(lengths):
        assert admission.held + lengths[len(begun)][0] > capacity - max(free, AHEAD * (len(begun) + 1))


@given(LENGTHS, CAPACITY, st.integers(1, 60))
def test_nobody_asks_how_long_an_answer_will_be(lengths: list[tuple[int, int]], capacity: int, answer: int) -> None:
    """Until the first request ends, all goes the same however long answers are."""
    known, other = Pipe(capacity, lengths), Pipe(capacity, [(prompt, answer) for prompt, _ in lengths])
    while known.under_way and not known.ended and not other.ended:
        assert [each.rank for each in known.under_way] == [each.rank for each in other.under_way]
        known.step()
        other.step()


def test_the_last_to_come_leaves_first_and_is_back_before_who_came_later() -> None:
    pipe = Pipe(200, [(60, 40), (60, 40), (60, 40), (30, 1)])
    while not pipe.admission.preempted:
        pipe.step()
    assert [each.rank for each in pipe.under_way] == [0, 1]
    while pipe.under_way:
        pipe.step()
    assert pipe.begun.index(3) > pipe.begun.index(2, 3)
