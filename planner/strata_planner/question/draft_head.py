"""A head that drafts, as a model of one layer: so that it is counted and priced like a small model. Called by whoever asks for a plan with one.

Whether the head brings an embedding of its own is not said in config.json: it is counted as if it did.
"""

from strata_planner.contract.draft_head import FUSED, DraftHead
from strata_planner.question.linear import Linear
from strata_planner.question.model import LayerShape, Model

EAGLE = "eagle3"  # the architecture of such a model
_VALUES_OF_A_TOKEN = 4  # of 16 bits: the number of a token that it drafts
_NORMS = 3  # before attention, of embeddings and of states, and before the MLP


def head_model(head: DraftHead) -> Model:
    """`vocab_size`: tokens that it drafts. A wider state of the model that verifies counts as its own width, since it is held as long."""
    hidden, width = head.hidden_size, head.intermediate_size
    queries, keys, bias = head.heads * head.head_dim, head.kv_heads * head.head_dim, head.attention_bias
    linears = (
        Linear("fc", hidden, FUSED * head.target_hidden_size),
        Linear("q_proj", queries, 2 * hidden, bias),
        Linear("k_proj", keys, 2 * hidden, bias),
        Linear("v_proj", keys, 2 * hidden, bias),
        Linear("o_proj", hidden, queries, bias),
        Linear("gate_proj", width, hidden),
        Linear("up_proj", width, hidden),
        Linear("down_proj", hidden, width),
    )
    return Model(
        architecture=EAGLE,
        hidden_size=max(hidden, head.target_hidden_size),
        embedding_size=hidden,
        vocab_size=head.draft_vocab_size,
        max_positions=head.positions,
        layers=(LayerShape(head.heads, head.kv_heads, head.head_dim, linears, _NORMS * hidden),),
        embedding_other=head.vocab_size * hidden,
        head_other=hidden + _VALUES_OF_A_TOKEN * head.draft_vocab_size,
        tied=True,  # it has one table of what it drafts
    )
