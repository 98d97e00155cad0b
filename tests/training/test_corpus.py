from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.laws import share
from training.corpus import HELDOUT_PERCENT, Explained, is_heldout, read_corpus

MODULES = 150


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A small standard library: modules, each with one documented function, and what must be left out."""
    for i in range(MODULES):
        (tmp_path / f"module{i}.py").write_text(
            f'"""Module {i}."""\ndef f{i}(a, b=1):\n    """Add {i}.\n\n    Second."""\n', encoding="utf-8"
        )
    for folder in ("site-packages", "ensurepip/_bundled", "test"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "foreign.py").write_text("FOREIGN = 1\n", encoding="utf-8")
    (tmp_path / "pydoc_data").mkdir()
    (tmp_path / "pydoc_data" / "topics.py").write_text("topics = {'for': 'The for statement'}\n", encoding="utf-8")
    return tmp_path


def test_every_document_is_in_exactly_one_split(library: Path) -> None:
    corpus = read_corpus(library)
    heldout = {i for i in range(MODULES) if is_heldout(f"module{i}.py")}
    assert heldout
    assert len(corpus.heldout) == len(heldout)
    assert len(corpus.library) == MODULES - len(heldout) + 1  # and one topic
    assert not any("FOREIGN" in text for text in (*corpus.library, *corpus.heldout))


def test_no_dialogue_is_made_from_a_heldout_file(library: Path) -> None:
    names = {e.name for e in read_corpus(library).explained}
    for i in range(MODULES):
        assert (f"module{i}.f{i}" in names) is not is_heldout(f"module{i}.py")


def test_an_explanation_has_signature_and_paragraphs(library: Path) -> None:
    kept = next(i for i in range(MODULES) if not is_heldout(f"module{i}.py"))
    explained = {e.name: e for e in read_corpus(library).explained}
    assert explained[f"module{kept}.f{kept}"] == Explained(
        f"module{kept}.f{kept}", "(a, b=1)", f"Add {kept}.\n\nSecond."
    )


def test_an_epoch_depends_on_its_seed_alone(library: Path) -> None:
    corpus = read_corpus(library)
    assert corpus.epoch(1, 2) == corpus.epoch(1, 2)
    assert corpus.epoch(1, 2) != corpus.epoch(2, 2)
    assert len(corpus.epoch(1, 2)) == len(corpus.library) + 2 * len(corpus.explained)


@settings(max_examples=share(40))
@given(st.lists(st.text(min_size=1), min_size=400, max_size=400, unique=True))
def test_the_split_keeps_to_its_share(names: list[str]) -> None:
    assert sum(map(is_heldout, names)) < 400 * (HELDOUT_PERCENT / 100) * 3.5
