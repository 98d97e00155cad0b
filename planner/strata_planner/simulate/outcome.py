"""What a simulation, or a run that was measured the same way, came to: a frozen value with the figures that are asked of it.

Made by `simulation`; shown by `strata simulate` and benchmarks. Times are seconds; rates count from time 0 to the end.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from strata_planner.simulate.trace import Request

Metric = Literal["ttft", "tpot", "latency"]
METRICS: tuple[Metric, ...] = ("ttft", "tpot", "latency")


@dataclass(frozen=True, slots=True)
class Served:
    """One request. `replica` None: refused, too long for the replicas. Moments are None for what did not come to pass."""

    request: Request
    replica: int | None
    first_token_at: float | None
    finished_at: float | None
    produced_tokens: int

    @property
    def ttft_seconds(self) -> float | None:
        """From arrival to the first token."""
        return None if self.first_token_at is None else self.first_token_at - self.request.arrival_seconds

    @property
    def latency_seconds(self) -> float | None:
        """From arrival to the last token."""
        return None if self.finished_at is None else self.finished_at - self.request.arrival_seconds

    @property
    def tpot_seconds(self) -> float | None:
        """From one token to the next, on average; None also for answers of one token."""
        if self.finished_at is None or self.first_token_at is None or self.request.output_tokens == 1:
            return None
        return (self.finished_at - self.first_token_at) / (self.request.output_tokens - 1)

    def tokens_between(self, begin: float, end: float) -> float:
        """Of a request that has ended: its tokens in these seconds, the first one at its moment and the others evenly after it."""
        if self.first_token_at is None or self.finished_at is None:
            return 0.0
        first = float(begin <= self.first_token_at < end)
        span, others = self.finished_at - self.first_token_at, self.produced_tokens - 1
        inside = max(0.0, min(end, self.finished_at) - max(begin, self.first_token_at))
        return first + (others * inside / span if span else 0.0)

    def meets(self, ttft_seconds: float, tpot_seconds: float) -> bool:
        """Finished, with both within their bounds; an answer of one token has no time per token to miss."""
        ttft = self.ttft_seconds
        return (
            self.finished_at is not None
            and ttft is not None
            and ttft <= ttft_seconds
            and ((self.tpot_seconds or 0.0) <= tpot_seconds)
        )


@dataclass(frozen=True, slots=True)
class ReplicaUse:
    """What one replica did. `kv_peak`: the largest share of its pages that was in use at once. `preemptions`: times that a request
    gave its pages back and was computed again.
    """

    requests: int
    steps: int
    busy_seconds: tuple[float, ...]  # of each stage
    kv_peak: float
    preemptions: int


@dataclass(frozen=True)
class Outcome:
    """`requests` in the trace's order. `seconds`: from time 0 to the last event."""

    requests: tuple[Served, ...]
    replicas: tuple[ReplicaUse, ...]
    seconds: float

    @property
    def finished(self) -> int:
        return sum(each.finished_at is not None for each in self.requests)

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens."""
        return sum(each.produced_tokens for each in self.requests) / self.seconds if self.seconds else 0.0

    def steady_tokens_per_second(self, clients: int) -> float:
        """Of a closed loop, while it is full: from when all of the first `clients` requests are gone to when the last one has come."""
        begin = max((each.finished_at or 0.0 for each in self.requests[:clients]), default=0.0)
        end = max((each.request.arrival_seconds for each in self.requests), default=0.0)
        return self.tokens_between(begin, end) / (end - begin) if end > begin else self.tokens_per_second

    def tokens_between(self, begin: float, end: float) -> float:
        """Generated in these seconds; those of a request come evenly from its first to its last."""
        return sum(each.tokens_between(begin, end) for each in self.requests)

    @property
    def requests_per_second(self) -> float:
        return self.finished / self.seconds if self.seconds else 0.0

    @property
    def utilisation(self) -> tuple[tuple[float, ...], ...]:
        """Per replica, per stage: the share of the time that it computed."""
        return tuple(
            tuple(busy / self.seconds if self.seconds else 0.0 for busy in use.busy_seconds) for use in self.replicas
        )

    def values(self, metric: Metric) -> tuple[float, ...]:
        """Seconds of every request that has them, ascending."""
        named = (getattr(each, f"{metric}_seconds") for each in self.requests)
        return tuple(sorted(each for each in named if each is not None))

    def percentile(self, metric: Metric, percent: float) -> float | None:
        """Between the two nearest values; None where no request has one."""
        return percentile(self.values(metric), percent)

    def mean(self, metric: Metric) -> float | None:
        values = self.values(metric)
        return sum(values) / len(values) if values else None

    def attainment(self, ttft_seconds: float, tpot_seconds: float) -> float:
        """Share of all requests, refused and unfinished ones included, that met both bounds."""
        return self._share(sum(each.meets(ttft_seconds, tpot_seconds) for each in self.requests))

    def attainment_of_latency(self, seconds: float) -> float:
        """Share of all requests whose last token came within `seconds` (HexGen's and AlpaServe's SLO)."""
        return self._share(sum(each <= seconds for each in self.values("latency")))

    def goodput(self, ttft_seconds: float, tpot_seconds: float) -> float:
        """Requests a second that met both bounds."""
        return self.attainment(ttft_seconds, tpot_seconds) * len(self.requests) / self.seconds if self.seconds else 0.0

    def as_json(self) -> dict[str, Any]:
        """Plain data: counts, rates, percentiles and the use of the replicas; not the single requests."""
        return {
            "requests": len(self.requests),
            "finished": self.finished,
            "refused": sum(each.replica is None and each.finished_at is None for each in self.requests),
            "seconds": self.seconds,
            "tokensPerSecond": self.tokens_per_second,
            "requestsPerSecond": self.requests_per_second,
            **{f"{metric}Seconds": self._distribution(metric) for metric in METRICS},
            "replicas": [
                {
                    "requests": use.requests,
                    "steps": use.steps,
                    "kvPeak": use.kv_peak,
                    "preemptions": use.preemptions,
                    "utilisation": list(shares),
                }
                for use, shares in zip(self.replicas, self.utilisation, strict=True)
            ],
        }

    def _distribution(self, metric: Metric) -> dict[str, float | None]:
        values = self.values(metric)
        mean = sum(values) / len(values) if values else None
        return {"mean": mean} | {f"p{percent}": percentile(values, percent) for percent in (50, 90, 95, 99)}

    def _share(self, count: int) -> float:
        return count / len(self.requests) if self.requests else 0.0


def percentile(ascending: Sequence[float], percent: float) -> float | None:
    """Linear between the two nearest of ascending values."""
    if not ascending:
        return None
    place = (len(ascending) - 1) * percent / 100
    below = int(place)
    above = min(below + 1, len(ascending) - 1)
    return ascending[below] + (ascending[above] - ascending[below]) * (place - below)
