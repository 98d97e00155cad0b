"""Which replica has computed which prefix: what the dispatcher remembers of the prompts that it has sent.

A guess, as llm-d's approximate prefix scorer: leaders may have used the room for something else since. Pure; bounded.
"""

from collections.abc import Collection, Sequence

from strata_planner.contract.block_names import name_of, packed, root_of

CHUNK_TOKENS = 64  # what is remembered is cut so: coarser than blocks, so that a long prompt is few entries
MOST_CHUNKS = 256  # of one prompt
MOST_KEPT = 2**15  # chunks, of all prompts

Chunk = bytes


def chunks_of(prompt: Sequence[int], salt: str = "") -> tuple[Chunk, ...]:
    """A digest for each whole chunk at the prompt's beginning, of it and all before it."""
    chunks: list[Chunk] = []
    parent = root_of(salt)
    for end in range(CHUNK_TOKENS, min(len(prompt), MOST_CHUNKS * CHUNK_TOKENS) + 1, CHUNK_TOKENS):
        parent = name_of(parent, packed(prompt[end - CHUNK_TOKENS : end]))
        chunks.append(parent)
    return tuple(chunks)


class Prefixes:
    """Chunk -> replicas that were sent it, the one sent longest ago first."""

    def __init__(self, most: int = MOST_KEPT) -> None:
        self._most = most
        self._replicas: dict[Chunk, set[int]] = {}

    def found(self, chunks: Sequence[Chunk]) -> dict[int, int]:
        """Replica -> how many of these chunks, from the first one on, it was sent."""
        found: dict[int, int] = {}
        for count, chunk in enumerate(chunks, start=1):
            having = self._replicas.get(chunk, set())
            going_on = [replica for replica in having if found.get(replica, 0) == count - 1]
            if not going_on:
                break
            found |= dict.fromkeys(going_on, count)
        return found

    def forget_all_but(self, replicas: Collection[int]) -> None:
        """The others have computed nothing yet."""
        kept = ((chunk, having.intersection(replicas)) for chunk, having in self._replicas.items())
        self._replicas = {chunk: having for chunk, having in kept if having}

    def sent(self, chunks: Sequence[Chunk], replica: int) -> None:
        for chunk in chunks:
            self._replicas[chunk] = self._replicas.pop(chunk, set()) | {replica}
        while len(self._replicas) > self._most:
            del self._replicas[next(iter(self._replicas))]
