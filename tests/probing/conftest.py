"""What the tests of the room share."""

import pytest

import ropepatch


@pytest.fixture(scope="session")
def extended(tmp_path_factory):
    """A checkpoint with its reading."""
    return ropepatch.extend("tiny", tmp_path_factory.mktemp("extended") / "out", to="4x").folder
