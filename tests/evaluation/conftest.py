"""Fixtures of the tests of measures."""

import pytest
from loss_models import build


@pytest.fixture(scope="session")
def llama():
    """A tiny random model; nobody changes it."""
    return build()
