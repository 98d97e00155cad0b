"""Seconds of a strategy on real devices: a roofline for what is computed, alpha-beta for what is moved.

Asked by `switching`. Products and attention cost what costs.roofline says (Megatron's are the same to the digit, which a
test holds), collectives go around a ring (`states.ring_steps`) whose link is the slowest of the group. Gathers of weights do not wait for
activations and may run beside the computing (DynPart, EECS-2024-108, section 5.2): `overlap` is the share of the computing
that they are hidden by. Collectives of activations are waited for.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from strata_planner.contract.formats import COMPUTE_TYPE_BYTES, FormatName, stored_bytes
from strata_planner.costs.memory import kv_bytes_per_token
from strata_planner.costs.source import Rates
from strata_planner.errors import ModelError, WorkloadError
from strata_planner.partition.chain import Kind, WeightName, linears_of
from strata_planner.partition.states import CS, RS, Collective, State, Volume, ring_steps, volume
from strata_planner.partition.strategy import Apply, Move, Strategy
from strata_planner.question.cluster import LinkRate
from strata_planner.question.model import LayerShape


@dataclass(frozen=True)
class Group:
    """Equal devices, what they hold a layer's weights in, and the link between any two of them (one direction).

    `link_shares`: the share of the link's bandwidth that a collective reaches, 1 where absent. `shares_memory`: every device reads the weights of all
    where they lie, so that to gather them moves nothing; and a collective is one meeting, no ring.
    """

    rates: Rates
    link: LinkRate
    degree: int
    format_name: FormatName = "dense"
    overlap: float = 0.0
    link_shares: Mapping[Collective, float] = field(default_factory=dict)
    shares_memory: bool = False

    def __post_init__(self) -> None:
        if self.degree < 2:
            raise WorkloadError(f"a layer is cut over {self.degree} devices; at least 2 are needed")
        if not 0 <= self.overlap <= 1:
            raise WorkloadError(f"overlap {self.overlap} must be between 0 (gathers are waited for) and 1 (hidden)")

    @property
    def item(self) -> int:
        return COMPUTE_TYPE_BYTES[self.rates.compute_type]


@dataclass(frozen=True)
class LayerSeconds:
    """Of one layer, on one device. `gathers`: collectives of weights; `hidden`: what of them the computing covers."""

    compute: float
    activations: float
    gathers: float
    hidden: float

    @property
    def total(self) -> float:
        return self.compute + self.activations + self.gathers - self.hidden


def layer_seconds(strategy: Strategy, layer: LayerShape, hidden_size: int, group: Group, tokens: int) -> LayerSeconds:
    """A prefill step of one sequence of `tokens`. Raises ModelError for experts and heads that `degree` does not divide."""
    if layer.heads % group.degree:
        raise ModelError(
            f"{layer.heads} heads cannot be dealt to {group.degree} devices; use a degree that divides them"
        )
    sizes = _Sizes(layer, hidden_size, group, tokens)
    compute = group.rates.profile.layer_overhead_seconds + sum(sizes.apply(step) for step in strategy.applications)
    activations = sum(sizes.move(step) for step in strategy.moves if step.weight is None)
    gathers = (
        0.0 if group.shares_memory else sum(sizes.move(step) for step in strategy.moves if step.weight is not None)
    )
    return LayerSeconds(compute, activations, gathers, min(gathers, group.overlap * compute))


class _Sizes:
    """A layer's numbers in place of the symbols, uneven shares rounded up."""

    def __init__(self, layer: LayerShape, hidden_size: int, group: Group, tokens: int) -> None:
        self._layer, self._group, self._tokens = layer, group, tokens
        self._linears = linears_of(layer)
        widths = {"d": hidden_size, "q": layer.heads * layer.head_dim, "k": layer.kv_heads * layer.head_dim}
        self._widths = widths | {"m": self._linears["w2"][0].in_features, "n": tokens, "g": group.degree}

    def apply(self, step: Apply) -> float:
        if step.operation.kind is Kind.ATTENTION:
            return self._attention(self._share(self._layer.heads) if step.before is CS else self._layer.heads)
        if step.operation.weight is None or step.weight is None:
            return 0.0  # element by element: a small part of the layer's overhead
        return self._product(step.operation.weight, step.before, step.weight)

    def move(self, step: Move) -> float:
        group = self._group
        size = self._weight_bytes(step.weight) if step.weight else step.elements.value(**self._widths) * group.item
        sent = size * volume(step.collective, Volume.TRAFFIC).value(g=float(group.degree))
        rate = group.link.bytes_per_second * group.link_shares.get(step.collective, 1.0)
        steps = 1 if group.shares_memory else ring_steps(step.collective, group.degree)
        return steps * group.link.latency_seconds + sent / rate

    def _product(self, weight: WeightName, activation: State, used: State) -> float:
        rows = self._share(self._tokens) if activation is RS else self._tokens
        rates, name = self._group.rates, self._group.format_name
        seconds = 0.0
        for linear in self._linears[weight]:
            outputs = self._outputs(linear.name, linear.out_features) if used is CS else linear.out_features
            inputs = self._share(linear.in_features) if used is RS else linear.in_features
            stored = stored_bytes(name, outputs, inputs, rates.compute_type)
            moved = stored + rows * (inputs + outputs) * self._group.item
            profile = rates.profile
            seconds += max(
                2 * rows * inputs * outputs / (rates.flops_per_second * profile.prefill_efficiency[name]),
                moved / rates.reading(name),
            )
        return seconds

    def _outputs(self, name: str, whole: int) -> int:
        """Whole heads: keys and values are held more than once where there are fewer heads than devices."""
        kv = self._share(self._layer.kv_heads) * self._layer.head_dim
        queries = self._share(self._layer.heads) * self._layer.head_dim
        return {"k_proj": kv, "v_proj": kv, "q_proj": queries, "qkv_proj": queries + 2 * kv}.get(
            name, self._share(whole)
        )

    def _attention(self, heads: int) -> float:
        rates, layer = self._group.rates, self._layer
        context = self._tokens / 2  # causal: each token sees half of the others
        share = heads / layer.heads
        keys = context * kv_bytes_per_token(layer, rates.kv_bits, rates.compute_type) * share
        profile = rates.profile
        return max(
            4
            * self._tokens
            * context
            * heads
            * layer.head_dim
            / (rates.flops_per_second * profile.prefill_efficiency["dense"]),
            keys / rates.reading("dense"),
        )

    def _weight_bytes(self, weight: WeightName) -> int:
        group = self._group
        return sum(
            stored_bytes(group.format_name, each.out_features, each.in_features, group.rates.compute_type)
            for each in self._linears[weight]
        )

    def _share(self, whole: int) -> int:
        return -(-whole // self._group.degree)
