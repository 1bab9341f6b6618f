"""Results of an uninterrupted run of the small recipe, once per session."""

import pytest
from run_recipes import train


@pytest.fixture(scope="session")
def fine_tuned(tmp_path_factory):
    """The checkpoint."""
    return train(tmp_path_factory.mktemp("fine-tuned") / "out").path


@pytest.fixture(scope="session")
def adapter(tmp_path_factory):
    """The adapter."""
    return train(tmp_path_factory.mktemp("adapter") / "out", save="adapter").path
