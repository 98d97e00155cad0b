"""Fixtures of the gateway's tests."""

from pathlib import Path

import pytest

from strata_runtime.gateway.tokenizer import Tokenizer, load_tokenizer
from tests.runtime.gateway.models import write_model_folder


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def tokenizer(model_folder: Path) -> Tokenizer:
    return load_tokenizer(model_folder)
