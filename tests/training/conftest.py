"""Results of an uninterrupted run of the small recipe, once per session."""

import pytest
from run_recipes import fine_tune, small_recipe

import ropepatch


@pytest.fixture(scope="session")
def fine_tuned(tmp_path_factory):
    """The checkpoint."""
    plan = ropepatch.plan("tiny", to=512, method="yarn")
    return fine_tune(
        plan, small_recipe(), tmp_path_factory.mktemp("fine-tuned") / "out"
    ).path


@pytest.fixture(scope="session")
def adapter(tmp_path_factory):
    """The adapter."""
    plan = ropepatch.plan("tiny", to=512, method="yarn")
    return fine_tune(
        plan, small_recipe(save="adapter"), tmp_path_factory.mktemp("adapter") / "out"
    ).path
