"""The rules by which a leader fills its steps: the runtime's scheduler follows them, the planner's simulator too."""

WATERMARK = 0.01  # of all blocks: free when a prompt is admitted, so that it does not drive out another at once
FEWEST_PROMPTS = 2  # that a step takes if there are so many: a small one is not behind a large one
DRAFT_ROWS = 16  # rows that a step may want logits of for drafted tokens, where it has fewer sequences
OLDEST_SHARE = 4  # the prompt that is first in rank gets at least one part in so many of what prompts have of a step

_STREAMS_PART = 0.8  # of the seconds that streams were promised: the rest is for what steps vary by
_NEWEST = 0.25  # weight of the newest step in a mean


class Pace:
    """How many tokens of prompts go into a step beside sequences that decode, so that streams keep their pace.

    While one request waits for its first token, a step takes at most twice as long as one that only decodes; while n do, 1 + n times:
    where many wait, streams slow down for them instead of keeping them out. Learns from the steps themselves; before it has seen
    any, and where nothing decodes, nothing is bounded.
    """

    def __init__(self) -> None:
        self._decoding = 0.0  # seconds of a step that only decodes
        self._token = 0.0  # further seconds for each token of a prompt

    def learn(self, decoding: int, prompt_tokens: int, seconds: float) -> None:
        """A step has come back: sequences that decoded in it, tokens of prompts, and seconds of the stage that took longest."""
        if not prompt_tokens:
            self._decoding = _mean(self._decoding, seconds)
        elif decoding and self._decoding:
            self._token = _mean(self._token, max(0.0, seconds - self._decoding) / prompt_tokens)
        elif not self._token:
            self._token = seconds / prompt_tokens

    def tokens(self, waiting: int) -> float:
        """Most tokens of prompts beside streams, while so many requests wait for their first token."""
        if not self._decoding or not self._token:
            return float("inf")
        return _STREAMS_PART * waiting * self._decoding / self._token


def _mean(known: float, newest: float) -> float:
    return newest if not known else known + _NEWEST * (newest - known)
