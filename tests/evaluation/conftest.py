"""What several tests of measures read with, and what they find."""

import pytest
from loss_models import build
from tokenizer_makes import TOKENIZERS


@pytest.fixture(scope="session")
def tokenizer():
    """That of the bundled checkpoint."""
    return TOKENIZERS["bundled"]()


@pytest.fixture(scope="session")
def llama():
    """A tiny random model; nobody changes it."""
    return build()
