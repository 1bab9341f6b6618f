"""Fixtures of the probe tests."""

import pytest

import ropepatch


@pytest.fixture(scope="session")
def extended(tmp_path_factory):
    """An extended checkpoint with its fingerprint."""
    return ropepatch.extend(
        "tiny", tmp_path_factory.mktemp("extended") / "out", to="4x"
    ).folder
