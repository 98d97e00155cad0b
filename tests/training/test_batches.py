from itertools import islice

import pytest
import torch

from training.batches import Batches
from training.corpus import Corpus, Explained
from training.tokenizer import train_tokenizer

CORPUS = Corpus(
    tuple(f"def f{i}(x):\n    return x + {i}\n" * 20 for i in range(12)),
    ("held out",),
    (Explained("len", "(obj, /)", "Count."),),
)


@pytest.fixture(scope="module")
def batches() -> Batches:
    return Batches(CORPUS, train_tokenizer(CORPUS.library, 300, 64), seed=3)


def test_skipping_goes_on_where_a_run_was_cut_off(batches: Batches) -> None:
    whole = list(islice(batches.rows(16, 64), 9))
    rest = list(islice(batches.rows(16, 64, skip=4), 5))
    assert all(torch.equal(a, b) for a, b in zip(whole[4:], rest, strict=True))
    assert all(batch.shape == (4, 17) for batch in whole)


def test_a_dialogue_of_the_corpus_is_what_the_chat_template_renders() -> None:
    tokenizer = train_tokenizer(CORPUS.library, 300, 64)
    messages = [{"role": "user", "content": "What is len?"}, {"role": "assistant", "content": "`len(obj, /)`: Count."}]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False)
    assert rendered == tokenizer.bos_token + CORPUS.explained[0].dialogue("What is {}?")


def test_text_survives_the_tokenizer() -> None:
    tokenizer = train_tokenizer(CORPUS.library, 300, 64)
    text = "  naïve: 2048 ≥ x\n\tπ\r\n"
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text
