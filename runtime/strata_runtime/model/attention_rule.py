"""What a layer's attention does with its scores, for the attention over pages and for the one that writes them out."""

from dataclasses import dataclass, replace

from torch import Tensor

from strata_runtime.kernels.native_attention import Scores
from strata_runtime.model.kv.batch import Reach


@dataclass(frozen=True, slots=True, eq=False)
class AttentionRule:
    """What a layer makes of softmax(scale * q k) v: its scale, how far back it sees (`window` positions, or to the begin of its own `chunk` of positions; `first`: nothing before that position), the cap on its
    scores (tanh), and two terms of each head [heads], one of them at most: `slopes` times a key's position are added to the scores (ALiBi, arXiv 2108.12409); `sinks` are scores
    of a key without a value (gpt-oss).
    """

    scale: float
    window: int | None = None
    soft_cap: float | None = None
    slopes: Tensor | None = None
    sinks: Tensor | None = None
    chunk: int | None = None
    first: int = 0

    @property
    def reach(self) -> Reach:
        return Reach(self.window, self.chunk, self.first)

    @property
    def native(self) -> Scores:
        """As the native library takes it."""
        slopes, sinks = (None if each is None else each.float().contiguous() for each in (self.slopes, self.sinks))
        return Scores(self.scale, self.window, self.chunk, self.soft_cap, slopes, sinks, self.first)

    @property
    def written_out(self) -> bool:
        """Whether the fused kernels do not know it."""
        return self.soft_cap is not None or self.slopes is not None or self.sinks is not None

    def with_heads_as(self, heads: int, rows: int) -> "AttentionRule":
        """The terms of each head as [heads, rows, 1]: `rows` queries of the same key head stand one below the other."""
        if self.slopes is None and self.sinks is None:
            return self
        assert self.slopes is None or self.sinks is None, "positions of keys are counted from the last: a sink has none"
        slopes, sinks = (
            None if each is None else each.float().view(heads, rows, 1) for each in (self.slopes, self.sinks)
        )
        return replace(self, slopes=slopes, sinks=sinks)
