"""Folders of tiny models, saved once for all tests of the batch library; no test changes them."""

import pytest
from cli_language_models import save_whisper
from cli_models import save_gpt2


@pytest.fixture(scope="module", autouse=True)
def _one_thread(one_thread):
    """Uses one thread, because the models are small."""


@pytest.fixture(scope="session")
def gpt2(tmp_path_factory):
    return save_gpt2(tmp_path_factory.mktemp("models") / "gpt2")


@pytest.fixture(scope="session")
def whisper(tmp_path_factory):
    return save_whisper(tmp_path_factory.mktemp("models") / "whisper")
