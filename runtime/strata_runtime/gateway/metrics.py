"""Prometheus metrics, under vLLM's names where they exist so that dashboards and autoscalers made for it work.

Names and labels: vLLM's "Production Metrics" page and `docs/design/metrics.md`. Filled by `dispatcher`, served by `app`.
Gauges come from leaders' reports; latencies are measured here, at the client's side of the pipeline.
"""

from dataclasses import astuple, dataclass
from typing import Self

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from strata_planner.contract.acceptance import DraftCounts
from strata_planner.contract.frames import LeaderHello

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0)
_TOKEN_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0)


@dataclass(frozen=True, slots=True)
class Load:
    """All replicas together. `kv_usage` is the fullest replica's share."""

    running: int
    waiting: int
    kv_usage: float
    epoch: int
    leaders_connected: int
    leaders_missing: int = 0  # of the route, but not to be used now


@dataclass(frozen=True, slots=True)
class Counts:
    """What a leader counts since its epoch began."""

    preemptions: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0

    @classmethod
    def of(cls, hello: LeaderHello) -> Self:
        return cls(hello.preemptions, hello.drafts, hello.draft_tokens, hello.accepted_tokens)

    def since(self, earlier: "Counts") -> "Counts":
        """What has come to it; none of it is below 0, whatever a leader says."""
        pairs = zip(astuple(self), astuple(earlier), strict=True)
        return Counts(*(max(0, now - before) for now, before in pairs))


class Metrics:
    """One registry per gateway: nothing is shared with other gateways in the process."""

    def __init__(self, model_name: str) -> None:
        self._registry = CollectorRegistry()
        self._model_name = model_name
        self._drafted, self._tokens = DraftCounts(), 0
        gauge, counter = self._gauge, self._counter
        self._running = gauge("vllm:num_requests_running", "Requests that leaders run.")
        self._waiting = gauge("vllm:num_requests_waiting", "Requests that wait at leaders or are held here.")
        self._kv_usage = gauge(
            "vllm:kv_cache_usage_perc", "Share of the KV page budget in use, 0 to 1; fullest replica."
        )
        self._prompt_tokens = counter("vllm:prompt_tokens", "Prompt tokens of the answers that got a first token.")
        self._cache_queries = counter(
            "vllm:prefix_cache_queries", "Prompt tokens that were looked for in the KV cache."
        )
        self._cache_hits = counter("vllm:prefix_cache_hits", "Prompt tokens that were found in the KV cache.")
        self._preemptions = counter(
            "vllm:num_preemptions", "Times that a running request gave its KV back and waited to be computed again."
        )
        self._drafts = counter("vllm:spec_decode_num_drafts", "Verifications of drafted tokens.")
        self._draft_tokens = counter("vllm:spec_decode_num_draft_tokens", "Tokens that were drafted and verified.")
        self._accepted_tokens = counter("vllm:spec_decode_num_accepted_tokens", "Drafted tokens that were right.")
        self._generation_tokens = counter("vllm:generation_tokens", "Tokens delivered.")
        self._first_token = self._histogram("vllm:time_to_first_token_seconds", "Request to first token.", _SECONDS)
        self._inter_token = self._histogram(
            "vllm:inter_token_latency_seconds", "Token to next token of one answer.", _TOKEN_SECONDS
        )
        self._per_token = self._histogram(
            "vllm:request_time_per_output_token_seconds", "Mean time per token after the first.", _TOKEN_SECONDS
        )
        self._latency = self._histogram("vllm:e2e_request_latency_seconds", "Request to last token.", _SECONDS)
        self._success = Counter(
            "vllm:request_success",
            "Answers that ended, by how.",
            ("model_name", "finished_reason"),
            registry=self._registry,
        )
        self._epoch = gauge("strata_epoch", "The epoch that requests are routed to; 0: no route yet.")
        self._leaders = gauge("strata_leaders_connected", "Leaders that have said hello in this epoch.")
        self._replays = counter("strata_replays", "Times that a running request was handed to a leader again.")
        self._pause = self._histogram(
            "strata_pause_seconds",
            "Token to next token of answers that a loss or a change of epoch interrupted.",
            _SECONDS,
        )
        self._lost = counter("strata_lost_requests", "Answers that ended in an error while no leader had them.")
        self._orders = Counter(
            "strata_standing_orders",
            "Epochs that this gateway came to route to by standing orders, by what they did: takeover or renewal.",
            ("model_name", "kind"),
            registry=self._registry,
        )

    def first_token(self, seconds: float, prompt_tokens: int, found_tokens: int) -> None:
        """`found_tokens`: of the prompt, those whose KV was there already."""
        self._first_token.observe(seconds)
        self._prompt_tokens.inc(prompt_tokens)
        self._cache_queries.inc(prompt_tokens)
        self._cache_hits.inc(found_tokens)
        self._delivered()

    def next_token(self, seconds: float) -> None:
        self._inter_token.observe(seconds)
        self._delivered()

    def finished(self, reason: str, seconds: float, seconds_per_token: float | None) -> None:
        """`seconds_per_token` is None for answers of fewer than two tokens."""
        self._success.labels(self._model_name, reason).inc()
        self._latency.observe(seconds)
        if seconds_per_token is not None:
            self._per_token.observe(seconds_per_token)

    def counted(self, more: Counts) -> None:
        """What a leader has counted since it was heard last."""
        self._preemptions.inc(more.preemptions)
        self._drafts.inc(more.drafts)
        self._draft_tokens.inc(more.draft_tokens)
        self._accepted_tokens.inc(more.accepted_tokens)
        self._drafted = self._drafted.plus(DraftCounts(more.drafts, more.draft_tokens, more.accepted_tokens))

    @property
    def drafted(self) -> DraftCounts | None:
        """Since this process started; None: nothing was drafted."""
        return self._drafted.plus(DraftCounts(tokens=self._tokens)) if self._drafted.verifications else None

    def order_done(self, kind: str) -> None:
        self._orders.labels(self._model_name, kind).inc()

    def paused(self, seconds: float) -> None:
        self._pause.observe(seconds)

    def lost(self) -> None:
        self._lost.inc()

    def replayed(self, times: int) -> None:
        self._replays.inc(times)

    def _delivered(self) -> None:
        self._generation_tokens.inc()
        self._tokens += 1

    def render(self, load: Load) -> bytes:
        """The page that Prometheus scrapes."""
        self._running.set(load.running)
        self._waiting.set(load.waiting)
        self._kv_usage.set(load.kv_usage)
        self._epoch.set(load.epoch)
        self._leaders.set(load.leaders_connected)
        return generate_latest(self._registry)

    def _gauge(self, name: str, help_text: str) -> Gauge:
        return Gauge(name, help_text, ("model_name",), registry=self._registry).labels(self._model_name)

    def _counter(self, name: str, help_text: str) -> Counter:
        return Counter(name, help_text, ("model_name",), registry=self._registry).labels(self._model_name)

    def _histogram(self, name: str, help_text: str, buckets: tuple[float, ...]) -> Histogram:
        unlabelled = Histogram(name, help_text, ("model_name",), registry=self._registry, buckets=buckets)
        return unlabelled.labels(self._model_name)
