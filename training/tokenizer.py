"""A byte-level BPE tokenizer trained on the corpus, with the special tokens and the chat template of the model.

Called by ``train``. Knows nothing of the model's weights.
"""

from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from training.corpus import ASSISTANT, END, SEPARATOR, USER

# Tools in the form of Hermes 2 Pro. The model has seen none in its training: it calls them where it must.
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% if tools %}<|user|>\nFunctions:\n{% for tool in tools %}{{ tool['function'] | tojson }}\n{% endfor %}"
    'A call is <tool_call>\n{"name": ..., "arguments": {...}}\n</tool_call><|end|>\n{% endif %}'
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}<|assistant|>\n{{ message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}<tool_call>\n{{ call['function'] | tojson }}\n</tool_call>\n{% endfor %}<|end|>\n"
    "{% elif message['role'] == 'tool' %}<|user|>\n<tool_response>\n{{ message['content'] }}\n</tool_response><|end|>\n"
    "{% else %}<|user|>\n{{ message['content'] }}<|end|>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


def train_tokenizer(documents: Iterable[str], vocabulary_size: int, context_tokens: int) -> PreTrainedTokenizerFast:
    """Train on ``documents``; the same documents give the same vocabulary. Digits are split one by one."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=[SEPARATOR, USER, ASSISTANT, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=SEPARATOR,
        eos_token=END,
        pad_token=SEPARATOR,
        additional_special_tokens=[USER, ASSISTANT],
        chat_template=CHAT_TEMPLATE,
        model_max_length=context_tokens,
        clean_up_tokenization_spaces=False,
    )
