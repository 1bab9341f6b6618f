"""Fixtures of the tests of position encodings."""

import pytest
from tiny_models import tiny_model
from transformers import PreTrainedModel


@pytest.fixture
def model() -> PreTrainedModel:
    return tiny_model("llama")
