"""Laws of guesses that are looked up: what followed the longest match, of equals the newest, its own text first."""

from array import array

from hypothesis import given, settings
from hypothesis import strategies as st

from strata_runtime.scheduler.drafts import LONGEST, SHORTEST, Recent, Text, lookup
from tests.laws import share

WORDS = st.integers(0, 3)
TEXTS = st.lists(WORDS, max_size=24)


def followed(text: list[int], end: list[int]) -> int | None:
    """Where what follows the newest `end` begins; None: nothing does."""
    places = [at for at in range(len(end), len(text)) if text[at - len(end) : at] == end]
    return places[-1] if places else None


@settings(max_examples=share(200), deadline=None)
@given(own=TEXTS, answers=st.lists(TEXTS, max_size=6), most=st.integers(1, 5), portion=st.integers(0, 5))
def test_the_longest_match_counts_and_then_the_newest(
    own: list[int], answers: list[list[int]], most: int, portion: int
) -> None:
    recent = Recent()
    for answer in answers:
        recent.add(answer)
    while portion:  # in portions, as steps learn
        recent.learn(portion)
        portion -= 1
    recent.learn(200)
    found = lookup(Text(own), (recent,), most)
    for count in range(min(LONGEST, len(own)), SHORTEST - 1, -1):
        end = own[-count:]
        if (place := followed(own, end)) is not None:
            assert found == own[place : place + most]
            return
        for number in reversed(range(len(answers))):
            if (place := followed(answers[number], end)) is not None:
                behind = [token for answer in answers[number:] for token in answer]
                assert found == behind[place : place + most]
                return
    assert found == []


@settings(max_examples=share(100), deadline=None)
@given(answers=st.lists(TEXTS, max_size=12), most=st.integers(4, 40))
def test_what_is_remembered_is_the_newest_and_bounded(answers: list[list[int]], most: int) -> None:
    recent, patterns = Recent(most), dict[bytes, list[int]]()
    for answer in answers:
        recent.add(answer)
        recent.learn(LONGEST * most)
    kept, size = list[list[int]](), 0
    for answer in reversed(answers):
        size += len(answer[-most:])
        if size > most:
            break
        kept.insert(0, answer[-most:])
    for answer in kept:
        for end in range(SHORTEST, len(answer)):
            patterns[array("I", answer[end - SHORTEST : end]).tobytes()] = answer[end : end + 1]
    assert all(recent.after(pattern, 1) == token for pattern, token in patterns.items())
    assert len(recent._newer) <= most
    assert len(recent._older) <= most
