"""Results of an uninterrupted run of the small recipe, once per session."""

import pytest
from run_recipes import small_recipe

import ropepatch
from ropepatch.training.adaptation import adapt


@pytest.fixture(scope="session")
def adapted(tmp_path_factory):
    """The checkpoint."""
    plan = ropepatch.plan("tiny", to=512, method="yarn")
    return adapt(plan, small_recipe(), tmp_path_factory.mktemp("adapted") / "out").folder


@pytest.fixture(scope="session")
def adapter(tmp_path_factory):
    """The adapter."""
    plan = ropepatch.plan("tiny", to=512, method="yarn")
    return adapt(plan, small_recipe(save="adapter"), tmp_path_factory.mktemp("adapter") / "out").folder
